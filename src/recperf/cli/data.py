"""recperf data get|check|make|info NAME"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ..errors import DataError, UsageError, closest
from .parse import parse
from .terminal import Terminal, print_error, print_json

ACTIONS = {
    "get": "download a dataset, verify it, keep it in the cache folder",
    "check": "read a whole dataset and compare it with its digests",
    "make": "write an embedded, synthetic dataset into a folder",
    "info": "describe a dataset",
}

HELP = """usage: recperf data ACTION NAME [OPTIONS]

{actions}

names: movielens-100k (real), movielens-like (embedded, synthetic)
  recperf data ACTION --help    options of an action"""


@dataclass(frozen=True, kw_only=True)
class Options:
    name: tyro.conf.Positional[str]
    """Dataset."""
    path: Path | None = None
    """Folder of the dataset; none means the cache folder."""
    seed: int = 7
    """Seed of an embedded dataset."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


def command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(actions="\n".join(f"  {name:<6} {text}" for name, text in ACTIONS.items())))
        return 0
    action = words[0]
    if action not in ACTIONS:
        guess = closest(action, ACTIONS)
        raise UsageError(
            f"unknown action {action!r}" + (f"; did you mean {guess!r}?" if guess else ""), fix="recperf data --help"
        )
    options: Options = parse(Options, words[1:], prog=f"recperf data {action}", description=ACTIONS[action] + ".")
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    found = perform(action, options, terminal)
    if options.json:
        print_json(found)
    else:
        for name, value in found.items():
            terminal.say(f"{name:<20} {_shown(value)}")
    if action == "check" and not found["intact"]:
        error = DataError(f"these are not the files of {options.name}", where={"folder": found.get("folder", "-")})
        print_error(error, as_json=False)
        return error.exit_code
    return 0


def perform(action: str, options: Options, terminal: Terminal) -> dict[str, Any]:
    from ..data import catalogue

    if action == "get":
        if options.path is not None:
            raise UsageError(
                "data get keeps datasets in the cache folder; --path is not for it", fix="set RECPERF_HOME to choose it"
            )
        return catalogue.get(options.name, say=terminal.say)
    if action == "check":
        return catalogue.check(options.name, path=options.path)
    if action == "info":
        return catalogue.info(options.name, path=options.path, seed=options.seed)
    if options.path is None:
        raise UsageError(
            "data make needs --path, the folder to write", fix=f"recperf data make {options.name} --path DIR"
        )
    return catalogue.make(options.name, path=options.path, seed=options.seed)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
