"""The file of a machine's ceilings, stored under its fingerprint; those of another machine are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ... import places
from ...errors import DataError, MachineError, RecperfError
from ...files import write_json, writing
from ...jsonfile import Problem, fit, sealed
from ...jsonfile import load as load_json
from ...machine import host_facts, machine_facts
from .other_work import DISTURBED, QUIET
from .records import Peaks, Rates

SCHEMA = 2

FIX = "recperf peaks"


def path_of(facts: dict[str, Any]) -> Path:
    """Where the ceilings of a machine are stored."""
    return places.home() / "machines" / f"{facts['fingerprint']}.json"


def save(peaks: Peaks) -> Path:
    """Write the ceilings under the fingerprint of their machine, replacing older ones that are no better.

    What those have for other numbers of threads is added to `peaks`.
    """
    path = path_of(peaks.machine)
    stored = _stored(peaks.machine)
    if stored is not None and _stays(stored, peaks):
        return path
    if stored is not None:
        before = {
            threads: replace(figures, other_work=figures.other_work or stored.other_work)
            for threads, figures in stored.other_threads.items()
            if threads != str(peaks.threads)
        }
        peaks.other_threads = {**before, **peaks.other_threads}
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, sealed(peaks))
    except MachineError as error:
        fix = "free some space there, or set RECPERF_HOME to a folder you may write"
        raise MachineError(error.what, where={"file": path}, fix=fix) from error
    return path


def disturbed(figures: Rates, most: float) -> bool:
    """Whether other work took more than this share of the cores while figures were measured."""
    return (figures.other_work or 0.0) > most


def better_stored(peaks: Peaks) -> Peaks | None:
    """The stored ceilings that these must not replace."""
    stored = _stored(peaks.machine)
    return stored if stored is not None and _stays(stored, peaks) else None


def _stored(facts: dict[str, Any]) -> Peaks | None:
    try:
        return load(facts)
    except RecperfError:
        return None


def _stays(stored: Peaks, new: Peaks) -> bool:
    """Whether stored ceilings are better than new ones: measured beside less other work, or in full and undisturbed."""
    if new.quick and not stored.quick and not disturbed(stored, DISTURBED):
        return True
    return disturbed(new, max(QUIET, stored.other_work or 0.0))


def load(facts: dict[str, Any] | None = None, *, say: Callable[[str], None] = lambda _: None) -> Peaks | None:
    """The ceilings of this machine; None if they were never measured, or by an older recperf."""
    facts = machine_facts() if facts is None else facts
    path = path_of(facts)
    if not os.path.lexists(path):
        return None
    peaks = _content(path)
    if peaks is None or peaks.update is None:
        say("the stored ceilings were measured by an older recperf and are not used")
        return None
    require_own(peaks, facts, file=path)
    return peaks


def find() -> Peaks | None:
    """The ceilings of this machine, found without torch: the newest stored ones of a machine that is equal but perhaps
    for its GPUs. None if they were never measured."""
    facts = host_facts()
    measured = []
    for path in sorted((places.home() / "machines").glob("*.json")):
        try:
            peaks = read_file(path)
        except DataError:
            # It is not known whose file it is; recperf peaks replaces that of this machine.
            continue
        if all(peaks.machine.get(name) == fact for name, fact in facts.items()):
            measured.append(peaks)
    return max(measured, key=lambda peaks: peaks.measured, default=None)


def read_file(path: Path) -> Peaks:
    """The ceilings of any machine, from a file that recperf peaks wrote, or printed."""
    peaks = _content(path, printed=True)
    if peaks is None:
        raise DataError("the ceilings were measured by an older recperf", where={"file": path}, fix=FIX)
    return peaks


def _content(path: Path, *, printed: bool = False) -> Peaks | None:
    """The checked content of a file, which has no seal where it was `printed`; None if an older recperf wrote it."""
    try:
        content = load_json(path, linked=not printed, named=printed)
    except OSError as error:
        what = f"the file of ceilings cannot be read: {error.strerror or error}"
        if printed:
            raise DataError(what, where={"file": path}, fix="recperf peaks writes one") from None
        raise MachineError(what, where={"file": path}, fix="make it readable, or remove it") from None
    except ValueError as error:
        raise DataError(f"the file of ceilings is damaged: {error}", where={"file": path}, fix=FIX) from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if isinstance(schema, int) and 1 <= schema < SCHEMA:
        return None
    if schema is not None and schema != SCHEMA:
        what = f"the file of ceilings has schema {schema!r}; this recperf reads {SCHEMA}"
        raise DataError(what, where={"file": path}, fix=FIX)
    peaks, seal = fit(content, Peaks), content.pop("seal", None) if schema else None
    wrong = str(peaks) if isinstance(peaks, Problem) else ""
    if not wrong and seal not in (None, sealed(content)["seal"]):
        wrong = "it was changed after it was written"
    if isinstance(peaks, Problem) or wrong:
        raise DataError(f"the file of ceilings is damaged: {wrong}", where={"file": path}, fix=FIX)
    return peaks if seal or printed else None


def require_own(peaks: Peaks, facts: dict[str, Any], *, file: Path | None = None) -> None:
    """Refuse ceilings of another machine: a share of its peak says nothing about this one."""
    theirs, ours = peaks.machine["fingerprint"], facts["fingerprint"]
    if theirs != ours:
        location = {"file": file} if file else {}
        raise DataError(
            f"these ceilings belong to another machine: measured on {theirs}, this is {ours}",
            where={**location, "measured on": _describe(peaks.machine), "this machine": _describe(facts)},
            fix=FIX,
        )


def _describe(facts: dict[str, Any]) -> str:
    gpus = ", ".join(gpu["name"] for gpu in facts.get("gpus") or []) or "no GPU"
    return f"{facts.get('cpu')}, {facts.get('cores')} cores, {gpus}, torch {facts.get('torch')}"
