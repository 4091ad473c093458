"""Measures the ceilings of this machine, what it can do at best, and stores them under its fingerprint.

    peaks = measure(quick=False, say=print)
    save(peaks)
    load()              # anywhere later, on the same machine
    require(2, print)   # the same with two threads; measured quickly and stored where it is missing

docs/limits.md describes the figures. Importing this needs no torch; measuring does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import asdict

from ...errors import DataError, MachineError
from ...machine import machine_facts, usable_cores
from .other_work import DISTURBED, QUIET, OtherWork
from .records import Peaks, Rates
from .store import SCHEMA, better_stored, disturbed, load, path_of, require_own, save

if TYPE_CHECKING:
    from .sampling import Effort

__all__ = [
    "SCHEMA",
    "Peaks",
    "better_stored",
    "load",
    "measure",
    "path_of",
    "quiet_now",
    "require",
    "require_own",
    "save",
    "with_threads",
]

R = TypeVar("R", bound=Rates)
Say = Callable[[str], None]


def require(threads: int | None, say: Say) -> Peaks:
    """The ceilings of this machine with this number of threads; None: with the default one.

    Those that are not stored yet, or are damaged, are measured quickly and stored.
    """
    try:
        stored = load(say=say)
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
    sleep(0.2)
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
    from .sampling import Sampler, at_least, noisy

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
    unstable = [*noisy(figures), *noisy(gpus, "gpu")]
    if unstable:
        shown = ", ".join(unstable[:6]) + (f" and {len(unstable) - 6} more" if len(unstable) > 6 else "")
        note(f"readings vary widely: {shown}")
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


def huge_pages() -> str | None:
    """The policy for transparent huge pages, which decides what random access costs beyond the TLB."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None
