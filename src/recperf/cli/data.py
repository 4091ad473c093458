"""recperf data get|check|make|convert|info NAME"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import tyro

from ..errors import DataError, Interrupted, UsageError, closest
from .parse import parse
from .terminal import Terminal, number, print_error, print_json, size

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..data.criteo.config import CriteoConfig

ACTIONS = {
    "get": "download a dataset, verify it, keep it in the cache folder",
    "check": "read a whole dataset and compare it with its digests or its format",
    "make": "write an embedded, synthetic dataset",
    "convert": "turn a click log into arrays, once, in bounded memory",
    "info": "describe a dataset",
}

HELP = """usage: recperf data ACTION NAME [OPTIONS]

{actions}

names: movielens-100k (real), movielens-like (embedded, synthetic), criteo (click logs you have; nothing is downloaded)
  recperf data ACTION NAME --help    options of an action"""

CRITEO = "criteo"


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


@dataclass(frozen=True, kw_only=True)
class CriteoMake:
    name: tyro.conf.Positional[str]
    """Dataset: criteo."""
    path: Path | None = None
    """File to write; what exists is left alone."""
    lines: int = 100_000
    """Lines of the log."""
    gzip: bool = False
    """Pack the file."""
    seed: int = 7
    """Seed of what is made up."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


@dataclass(frozen=True, kw_only=True)
class CriteoCheck:
    name: tyro.conf.Positional[str]
    """Dataset: criteo."""
    path: Path | None = None
    """A TSV file, a folder with train.txt, or a folder with day_0, day_1, ...; each may be gzipped."""
    layout: Literal["auto", "kaggle", "terabyte"] = "auto"
    """How the files are laid out; auto looks at the names."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


@dataclass(frozen=True, kw_only=True)
class CriteoConvert(CriteoCheck):
    rows: tuple[int, ...] = (100_000,)
    """Rows of the 26 tables that categories are hashed to, or one number for all."""
    hash_seed: int = 0
    """Seed of the hashes."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a malformed line does: stop names it and ends, skip leaves it out and counts it."""
    cache: Path | None = None
    """Folder of the arrays; none means the user's cache folder."""


CRITEO_OPTIONS: dict[str, Any] = {
    "make": CriteoMake,
    "check": CriteoCheck,
    "convert": CriteoConvert,
    "info": CriteoConvert,
}


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
    kind = CRITEO_OPTIONS.get(action, Options) if _names_criteo(words[1:]) or action == "convert" else Options
    options: Any = parse(kind, words[1:], prog=f"recperf data {action}", description=ACTIONS[action] + ".")
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    found = perform(action, options, terminal)
    if options.json:
        print_json(found)
    elif options.name == CRITEO:
        _say_log(found, terminal)
    else:
        for name, value in found.items():
            terminal.say(f"{name:<20} {_shown(value)}")
    if action == "check" and not found["intact"]:
        error = _not_intact(options.name, found)
        print_error(error, as_json=False)
        return error.exit_code
    return 0


def _names_criteo(words: list[str]) -> bool:
    """Whether criteo is the dataset rather than the value of an option."""
    switches = ("--json", "--quiet", "--gzip", "--no-json", "--no-quiet", "--no-gzip")
    before = ["", *words]
    return any(
        word == CRITEO and (not before[index].startswith("-") or before[index] in switches)
        for index, word in enumerate(words)
    )


def perform(action: str, options: Any, terminal: Terminal) -> dict[str, Any]:
    from ..data import catalogue

    if options.name == CRITEO:
        return _perform_criteo(action, options, terminal)
    if closest(options.name, (*catalogue.NAMES, CRITEO)) == CRITEO:
        raise UsageError(f"unknown dataset {options.name!r}; did you mean {CRITEO!r}?", fix="recperf data --help")
    if action == "convert":
        raise UsageError(
            f"{options.name} is read as it is; only click logs are converted",
            fix="recperf data convert criteo --path FILE_OR_FOLDER",
        )
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


def _perform_criteo(action: str, options: Any, terminal: Terminal) -> dict[str, Any]:
    if action == "get":
        raise UsageError(
            "Criteo's logs are not downloaded by recperf: their terms are yours to accept",
            fix="download them from Criteo, then name them with --path; or: recperf data make criteo --path FILE",
        )
    if options.path is None:
        wanted = "FILE" if action == "make" else "FILE_OR_FOLDER"
        raise UsageError(f"data {action} criteo needs --path", fix=f"recperf data {action} criteo --path {wanted}")

    from ..data.criteo import catalogue

    if action == "make":
        return catalogue.make(path=options.path, lines=options.lines, seed=options.seed, packed=options.gzip)
    if action == "info":
        return catalogue.info(_config(options))
    bar = _Bar(terminal, "checking" if action == "check" else "converting")
    try:
        if action == "check":
            return catalogue.check(_config(options), progress=bar)
        return catalogue.make_arrays(_config(options), progress=bar)
    except KeyboardInterrupt:
        kept = action == "convert"
        raise Interrupted(
            "interrupted; what is converted is kept" if kept else "interrupted",
            fix="the same command goes on where it stopped" if kept else None,
        ) from None
    finally:
        bar.close()


def _config(options: CriteoCheck) -> CriteoConfig:
    from ..data.criteo.config import CriteoConfig

    if not isinstance(options, CriteoConvert):
        return CriteoConfig(path=options.path, layout=options.layout)
    return CriteoConfig(
        path=options.path,
        layout=options.layout,
        rows=options.rows,
        hash_seed=options.hash_seed,
        on_error=options.on_error,
        cache=options.cache,
    )


class _Bar:
    """Progress of reading: a live bar on a terminal, elsewhere a line every five seconds."""

    def __init__(self, terminal: Terminal, label: str) -> None:
        self.terminal, self.label = terminal, label
        self.began = self.last = monotonic()
        self.first: int | None = None
        self.bar: Progress | None = None

    def __call__(self, done: int, total: int, rows: int) -> None:
        now = monotonic()
        if self.first is None:
            self.first = done
        if self.terminal.quiet or now - self.last < (0.1 if self.terminal.live else 5.0):
            return
        self.last = now
        left = (now - self.began) / max(1, done - self.first) * (total - done)
        line = f"{self.label}  {size(done)} of {size(total)}  {number(rows)} rows  {left:,.0f} s left"
        if not self.terminal.live:
            self.terminal.say(line)
            return
        if self.bar is None:
            self.bar = self._made(total)
        self.bar.update(self.bar.task_ids[0], completed=done, description=line, refresh=True)

    def _made(self, total: int) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        bar = Progress(*columns, console=self.terminal.screen, auto_refresh=False, transient=True)
        bar.add_task(self.label, total=total)
        bar.start()
        return bar

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _not_intact(name: str, found: dict[str, Any]) -> DataError:
    if name != CRITEO:
        return DataError(f"these are not the files of {name}", where={"folder": found.get("folder", "-")})
    first = found["first_bad"][0]
    return DataError(
        f"{found['bad_lines']:,} of {found['lines']:,} lines cannot be used (first: {first['file']}, line "
        f"{first['line']:,}: {first['what']})",
        where={"path": found["path"]},
        fix="mend the files, or leave such lines out: recperf data convert criteo --on-error skip",
    )


def _say_log(found: dict[str, Any], terminal: Terminal) -> None:
    """What is empty is left out, bytes are said in a unit, and every bad line has a line of its own."""
    for name, value in found.items():
        if name == "first_bad":
            for bad in value:
                terminal.say(f"{'bad line':<20} {bad['file']}, line {bad['line']:,}: {bad['what']}")
        elif value is not None and value not in ([], {}):
            shown = f"{size(value)} ({value:,} bytes)" if name.endswith("bytes") else _shown(value)
            terminal.say(f"{name:<20} {shown}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
