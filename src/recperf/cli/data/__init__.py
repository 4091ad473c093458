"""recperf data ACTION NAME: each family of datasets has a module here with its options and what it does and says."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from ... import places
from ...errors import RecperfError, UsageError, closest
from ..parse import parse
from ..terminal import Terminal, print_error, print_json

ACTIONS = {
    "get": "download a dataset, verify it, keep it in the cache folder",
    "check": "read a whole dataset and compare it with its digests or its format",
    "make": "write an embedded, synthetic dataset",
    "convert": "turn a click log into arrays, once, in bounded memory",
    "prepare": "turn raw listening events into an event store, once, in bounded memory",
    "import": "turn events of your own (CSV or parquet) into an event store",
    "info": "describe a dataset",
}

HELP = """usage: recperf data ACTION NAME [OPTIONS]

{actions}

names: movielens-100k (real), movielens-like (embedded, synthetic), criteo (click logs you have; nothing is downloaded),
       yambda-50m, yambda-500m, yambda-5b (real), yambda-like (embedded, synthetic), or the name of what you imported
  recperf data ACTION NAME --help    options of an action"""

FAMILY = {
    "movielens-100k": "movielens",
    "movielens-like": "movielens",
    "criteo": "criteo",
    "yambda-50m": "yambda",
    "yambda-500m": "yambda",
    "yambda-5b": "yambda",
    "yambda-like": "yambda",
}
"""The module of every named dataset."""
ONLY = {
    "convert": ("criteo", "is read as it is; only click logs are converted", "--path FILE_OR_FOLDER"),
    "prepare": ("yambda-50m", "is not raw listening events; only those are prepared", "--path FOLDER"),
}
"""Actions only one family knows: an example of it, why others are refused, and how it is called."""
NAMED_BY = {
    "get": ("movielens-100k", "yambda-50m", "yambda-500m", "yambda-5b"),
    "check": tuple(FAMILY),
    "make": ("movielens-like", "criteo", "yambda-like"),
    "info": tuple(FAMILY),
}
"""Actions that several families know, each with options of its own: the names they are for."""
WITHOUT_NAME = """usage: recperf data {action} NAME [OPTIONS]

{text}.

names: {names}
  recperf data {action} NAME --help    options, which are not the same for all of them"""
_SWITCHES = (
    "-h", "--help", *(f"--{no}{name}" for no in ("", "no-") for name in ("json", "quiet", "gzip", "offline"))
)  # fmt: skip


def command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(actions="\n".join(f"  {name:<8} {text}" for name, text in ACTIONS.items())))
        return 0
    action = words[0]
    if action not in ACTIONS:
        guess = closest(action, ACTIONS)
        raise UsageError(
            f"unknown action {action!r}" + (f"; did you mean {guess!r}?" if guess else ""), fix="recperf data --help"
        )
    if action in NAMED_BY and _named(words[1:]) is None:
        names = ", ".join(NAMED_BY[action])
        if not {"-h", "--help"} & set(words):
            raise UsageError(f"data {action} needs the name of a dataset", fix=f"recperf data {action} NAME: {names}")
        own = "" if action in ("get", "make") else ",\n       or the name of what you imported"
        print(WITHOUT_NAME.format(action=action, text=ACTIONS[action], names=names + own))
        return 0
    family = import_module(f".{_family(action, words[1:])}", __name__)
    options: Any = parse(
        family.OPTIONS[action], words[1:], prog=f"recperf data {action}", description=ACTIONS[action] + "."
    )
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    found = family.perform(action, options, terminal)
    if options.json:
        print_json(found)
    else:
        family.say(found, terminal)
    if action == "check" and not found["intact"]:
        error: RecperfError = family.not_intact(options.name, found)
        print_error(error, as_json=False)
        return error.exit_code
    return 0


def _family(action: str, words: list[str]) -> str:
    """Which module knows the named dataset."""
    if action == "import":
        return "yambda"
    name = _named(words)
    example, refusal, call = ONLY.get(action, ("", "", ""))
    if name is None:
        return FAMILY[example]
    family = FAMILY.get(name) or ("yambda" if _imported(name) else None)
    if family is None:
        guess = closest(name, FAMILY)
        raise UsageError(
            f"unknown dataset {name!r}; " + (f"did you mean {guess!r}?" if guess else f"known: {', '.join(FAMILY)}"),
            fix=f"one of: {', '.join(FAMILY)}",
        )
    if refusal and family != FAMILY[example]:
        raise UsageError(f"{name} {refusal}", fix=f"recperf data {action} {example} {call}")
    return family


def _named(words: list[str]) -> str | None:
    """The first word that is neither an option nor the value of one."""
    before = ["", *words]
    for word, last in zip(words, before):
        if not word.startswith("-") and (not last.startswith("-") or "=" in last or last in _SWITCHES):
            return word
    return None


def _imported(name: str) -> bool:
    return os.path.basename(name) == name and (places.dataset_folder(name) / "store" / "store.json").is_file()
