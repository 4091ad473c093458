"""Measures the ceilings of this machine, what it can do at best, and stores them under its fingerprint.

    peaks = measure(quick=False, say=print)
    save(peaks)
    load()              # anywhere later, on the same machine
    require(2, print)   # the same with two threads; measured quickly and stored where it is missing

docs/limits.md describes the figures. Ceilings of another machine are refused. Importing this needs no torch; measuring
does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import asdict, replace

from ... import locations
from ...errors import DataError, MachineError, RecperfError
from ...files import write_json, writing
from ...jsonfile import Problem, fit, sealed
from ...jsonfile import load as load_json
from ...machine import host_facts, machine_facts, usable_cores
from ..program_facts import huge_pages
from .other_work import DISTURBED, QUIET, OtherWork
from .records import Peaks, Rates

if TYPE_CHECKING:
    from .sampling import Effort

SCHEMA = 2
LOOK_S = 1.0
"""Seconds for which other work is watched before ceilings that were disturbed are measured again."""
FIX = "recperf peaks"
R = TypeVar("R", bound=Rates)
Say = Callable[[str], None]


def require(threads: int | None, say: Say) -> Peaks:
    """The ceilings of this machine with this number of threads; None: with the default one.

    Those that are not stored yet, or are damaged, are measured quickly and stored.
    """
    try:
        stored = load()
    except DataError as error:
        say(f"{error.what}; the ceilings are measured again")
        stored = None
    if stored is not None and disturbed(stored, QUIET if stored.quick else DISTURBED) and quiet_now():
        say("the stored ceilings were measured while other processes were busy; they are not now")
        stored = None
    if stored is None:
        say("measuring the ceilings of this machine quickly, once; recperf peaks measures them more carefully")
        measured = measure(quick=True, say=lambda _: None)
        stored = better_stored(measured) or measured
        _store(stored, say)
    with_threads(stored, threads, say)
    return stored


def with_threads(peaks: Peaks, threads: int | None, say: Say) -> None:
    """Measure quickly what the ceilings lack for this number of threads, and store it."""
    if threads is None or has_threads(peaks, threads):
        return
    say(f"measuring the ceilings for {threads} threads quickly, once")
    add_threads(peaks, threads)
    _store(peaks, say)


def _store(peaks: Peaks, say: Say) -> None:
    try:
        save(peaks)
    except MachineError as error:
        say(f"the ceilings are not stored: {error.what}")


def quiet_now() -> bool:
    """Whether other processes leave the cores alone at the moment."""
    other_work = OtherWork()
    sleep(LOOK_S)
    return (other_work.share() or 0.0) <= QUIET


def has_threads(peaks: Peaks, threads: int | None) -> bool:
    """Whether the rates with this number of threads need no measurement; disturbed ones do on a quiet machine."""
    if threads in (None, peaks.threads):
        return True
    figures = peaks.other_threads.get(str(threads))
    return figures is not None and not (disturbed(figures, DISTURBED) and quiet_now())


def measure(*, quick: bool, say: Say) -> Peaks:
    """Measure every ceiling of this machine; writes no file."""
    from .sampling import FULL, QUICK

    return measure_with(QUICK if quick else FULL, quick=quick, say=say)


def measure_with(effort: Effort, *, quick: bool, say: Say) -> Peaks:
    """`measure` with any sizes."""
    began = monotonic()
    import torch

    from . import cpu, gpu
    from .sampling import Sampler, at_least

    facts = machine_facts()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(f"note: {text}")

    threads = min(torch.get_num_threads(), usable_cores())
    with cpu.using_threads(threads):
        sampler = Sampler(effort)
        figures, others = _undisturbed(
            lambda say, note: cpu.measure(sampler, facts, {1} - {threads}, say, note), effort.repeat_seconds, say, note
        )
    if others and others > QUIET:
        figures = at_least(figures, figures.other_threads.values())
    cpu.derive_knee(figures.knee)
    gpus = gpu.measure(Sampler(effort), say, note) if torch.cuda.is_available() else None
    figures.other_work = others
    return Peaks(
        **asdict(figures),
        schema=SCHEMA,
        machine=facts,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=quick,
        seconds=round(monotonic() - began, 1),
        threads=threads,
        gpu=gpus,
        huge_pages=huge_pages(),
        notes=notes,
    )


def add_threads(peaks: Peaks, threads: int) -> None:
    """Measure quickly what depends on the number of threads, and add it to the ceilings."""
    from . import cpu
    from .sampling import QUICK

    def once(say: Say, note: Say) -> Rates:
        return cpu.measure_threads(QUICK, peaks.machine, peaks.knee.bytes, threads, note)

    notes: list[str] = []
    figures, others = _undisturbed(once, QUICK.repeat_seconds, lambda _: None, notes.append)
    before = peaks.other_threads.get(str(threads))
    if before is not None and (before.other_work or 0.0) <= (others or 0.0):
        return
    peaks.notes += [f"with {threads} threads: {text}" for text in notes]
    figures.other_work = others
    peaks.other_threads[str(threads)] = figures


def _undisturbed(once: Callable[[Say, Say], R], seconds: float, say: Say, note: Say) -> tuple[R, float | None]:
    """The better of repeated figures, and the share of the cores that others took during the quietest measurement.

    Beside some other work everything is measured twice; beside much, again and again for up to `seconds`.
    """
    from .sampling import better

    began = monotonic()
    other_work = OtherWork()
    figures = once(say, note)
    others = other_work.share()
    repeats = 0
    while ((others is None or others > QUIET) and not repeats) or (others or 0.0) > DISTURBED:
        if repeats and monotonic() - began > seconds:
            break
        say("other processes are busy: measuring again" if others else "measuring again")
        other_work = OtherWork()
        figures = better(figures, once(lambda _: None, lambda _: None))
        again, repeats = other_work.share(), repeats + 1
        others = again if others is None or again is None else min(others, again)
    if others and others > QUIET:
        note(f"other processes used {others:.0%} of the cores meanwhile: ceilings may be too low")
    return figures, others


def path_of(facts: dict[str, Any]) -> Path:
    """Where the ceilings of a machine are stored."""
    return locations.home() / "machines" / f"{facts['fingerprint']}.json"


def save(peaks: Peaks) -> Path:
    """Write the ceilings under the fingerprint of their machine, replacing older ones that are no better.

    What those have for other numbers of threads is added to `peaks`.
    """
    path = path_of(peaks.machine)
    if better_stored(peaks) is not None:
        return path
    if (stored := _stored(peaks.machine)) is not None:
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


def better_stored(new: Peaks) -> Peaks | None:
    """The stored ceilings that these must not replace: measured beside less other work, or in full and undisturbed."""
    stored = _stored(new.machine)
    if stored is None:
        return None
    in_full = new.quick and not stored.quick and not disturbed(stored, DISTURBED)
    return stored if in_full or disturbed(new, max(QUIET, stored.other_work or 0.0)) else None


def _stored(facts: dict[str, Any]) -> Peaks | None:
    try:
        return load(facts)
    except RecperfError:
        return None


def load(facts: dict[str, Any] | None = None) -> Peaks | None:
    """The ceilings of this machine; None if they were never measured."""
    facts = machine_facts() if facts is None else facts
    path = path_of(facts)
    if not os.path.lexists(path):
        return None
    peaks = _content(path)
    require_own(peaks, facts, file=path)
    return peaks


def find() -> Peaks | None:
    """The ceilings of this machine, found without torch: the newest stored ones of a machine that is equal but perhaps
    for its GPUs. None if they were never measured."""
    facts = host_facts()
    measured = []
    for path in sorted((locations.home() / "machines").glob("*.json")):
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
    return _content(path, printed=True)


def _content(path: Path, *, printed: bool = False) -> Peaks:
    """The checked content of a file, which has no seal where it was `printed`."""
    try:
        content = load_json(path, follow_links=not printed, named=printed)
    except OSError as error:
        what = f"the file of ceilings cannot be read: {error.strerror or error}"
        if printed:
            raise DataError(what, where={"file": path}, fix="recperf peaks writes one") from None
        raise MachineError(what, where={"file": path}, fix="make it readable, or remove it") from None
    except ValueError as error:
        raise DataError(f"the file of ceilings is damaged: {error}", where={"file": path}, fix=FIX) from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema is not None and schema != SCHEMA:
        what = f"the file of ceilings has schema {schema!r}; this recperf reads {SCHEMA}"
        raise DataError(what, where={"file": path}, fix=FIX)
    peaks, seal = fit(content, Peaks), content.pop("seal", None) if schema else None
    wrong = str(peaks) if isinstance(peaks, Problem) else ""
    if not wrong and seal != sealed(content)["seal"] and (seal or not printed):
        wrong = "it was changed after it was written"
    if isinstance(peaks, Problem) or wrong:
        raise DataError(f"the file of ceilings is damaged: {wrong}", where={"file": path}, fix=FIX)
    return peaks


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
