"""recperf data check PATH --sums FILE: the files of a folder against a list of SHA-256 sums."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from ...data.sums import check_sums
from ...errors import DataError
from ..parse import OutputOptions, parse
from ..terminal import Terminal, conclude
from .output import count_of, progress_bars


@dataclass(frozen=True, kw_only=True)
class CheckSums(OutputOptions):
    path: tyro.conf.Positional[Path]
    """Folder of the files."""
    sums: Path
    """List of SHA-256 sums with paths below the folder, as sha256sum writes it."""


def check(arguments: list[str]) -> int:
    description = "Compare the files of a folder with a list of SHA-256 sums."
    options = parse(CheckSums, arguments, prog="recperf data check", description=description)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    with progress_bars(terminal, resumable=False) as bar:
        facts = check_sums(options.path, options.sums, bar("comparing", "bytes"))
    faults = [(how, name) for how in ("missing", "differing", "extra") for name in facts[how]]
    for how, name in faults:
        terminal.say(f"{how:<9}  {name}")
    error = None
    if faults:
        counts = ", ".join(f"{len(facts[how])} {how}" for how in ("missing", "differing", "extra") if facts[how])
        fix = "get missing and differing files again, and move extra ones away"
        error = DataError(f"the files are not those of the list: {counts}", where={"folder": facts["folder"]}, fix=fix)
    else:
        terminal.say(f"{count_of(facts['compared'], 'file')} as listed, {facts['bytes']:,} bytes")
    return conclude(error, facts if options.json else None)
