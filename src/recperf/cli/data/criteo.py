"""Criteo's click logs: make, check, convert, info."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from ...errors import DataError, Interrupted, UsageError
from ..terminal import Terminal
from .progress import Bar
from .words import say_filled

if TYPE_CHECKING:
    from ...data.criteo.config import CriteoConfig


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


OPTIONS: dict[str, Any] = {
    "get": CriteoCheck,
    "make": CriteoMake,
    "check": CriteoCheck,
    "convert": CriteoConvert,
    "info": CriteoConvert,
}


def perform(action: str, options: Any, terminal: Terminal) -> dict[str, Any]:
    if action == "get":
        raise UsageError(
            "Criteo's logs are not downloaded by recperf: their terms are yours to accept",
            fix="download them from Criteo, then name them with --path; or: recperf data make criteo --path FILE",
        )
    if options.path is None:
        wanted = "FILE" if action == "make" else "FILE_OR_FOLDER"
        raise UsageError(f"data {action} criteo needs --path", fix=f"recperf data {action} criteo --path {wanted}")

    from ...data.criteo import catalogue

    if action == "make":
        return catalogue.make(path=options.path, lines=options.lines, seed=options.seed, packed=options.gzip)
    if action == "info":
        return catalogue.info(_config(options))
    bar = Bar(terminal, "checking" if action == "check" else "converting")
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
    from ...data.criteo.config import CriteoConfig

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


def not_intact(name: str, found: dict[str, Any]) -> DataError:
    first = found["first_bad"][0]
    return DataError(
        f"{found['bad_lines']:,} of {found['lines']:,} lines cannot be used (first: {first['file']}, line "
        f"{first['line']:,}: {first['what']})",
        where={"path": found["path"]},
        fix="mend the files, or leave such lines out: recperf data convert criteo --on-error skip",
    )


def say(found: dict[str, Any], terminal: Terminal) -> None:
    """As usual, and every bad line has a line of its own."""
    say_filled({name: value for name, value in found.items() if name != "first_bad"}, terminal)
    for bad in found.get("first_bad") or ():
        terminal.say(f"{'bad line':<20} {bad['file']}, line {bad['line']:,}: {bad['what']}")
