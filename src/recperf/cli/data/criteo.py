"""Criteo's click logs: make, check, convert, info."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from ...errors import DataError, UsageError
from ..parse import OutputOptions
from ..terminal import Terminal
from .output import print_facts
from .progress import progress_bars

if TYPE_CHECKING:
    from ...data.criteo.config import CriteoConfig


@dataclass(frozen=True, kw_only=True)
class CriteoMake(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset: criteo."""
    path: Path | None = None
    """File to write; an existing file is not changed."""
    lines: int = 100_000
    """Number of lines."""
    gzip: bool = False
    """Compress the file with gzip."""
    seed: int = 7
    """Seed of the synthetic data."""


@dataclass(frozen=True, kw_only=True)
class CriteoCheck(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset: criteo."""
    path: Path | None = None
    """A TSV file, a folder with train.txt, or a folder with day_0, day_1, ...; plain or gzipped."""
    layout: Literal["auto", "kaggle", "terabyte"] = "auto"
    """Layout of the files; auto decides by their names."""


@dataclass(frozen=True, kw_only=True)
class CriteoConvert(CriteoCheck):
    rows: tuple[int, ...] = (100_000,)
    """Rows of the 26 tables to which categories are hashed, or one number for all."""
    hash_seed: int = 0
    """Seed of the hashes."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do with a malformed line: stop with an error, or skip and count it."""
    cache: Path | None = None
    """Folder of the arrays; default: the user's cache folder."""


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
            "recperf does not download Criteo's logs: you must accept their terms yourself",
            fix="download them from Criteo, then name them with --path; or: recperf data make criteo --path FILE",
        )
    if options.path is None:
        kind = "FILE" if action == "make" else "FILE_OR_FOLDER"
        raise UsageError(f"data {action} criteo needs --path", fix=f"recperf data {action} criteo --path {kind}")

    from ...data.criteo import catalogue

    if action == "make":
        return catalogue.make(path=options.path, lines=options.lines, seed=options.seed, packed=options.gzip)
    if action == "info":
        return catalogue.info(_config(options))
    with progress_bars(terminal, resumable=action == "convert") as bar:
        if action == "check":
            return catalogue.check(_config(options), progress=bar("checking", "bytes"))
        return catalogue.make_arrays(_config(options), progress=bar("converting", "bytes"))


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


def not_intact(name: str, facts: dict[str, Any]) -> DataError:
    first = facts["first_bad"][0]
    return DataError(
        f"{facts['bad_lines']:,} of {facts['lines']:,} lines are malformed (first: {first['file']}, line "
        f"{first['line']:,}: {first['what']})",
        where={"path": facts["path"]},
        fix="correct the files, or skip such lines: recperf data convert criteo --on-error skip",
    )


def say(facts: dict[str, Any], terminal: Terminal) -> None:
    """Print the facts, and a line for every malformed line of the log."""
    print_facts({name: value for name, value in facts.items() if name != "first_bad"}, terminal)
    for bad in facts.get("first_bad") or ():
        terminal.say(f"{'malformed line':<20} {bad['file']}, line {bad['line']:,}: {bad['what']}")
