"""Measures the ceilings of this machine, what it can do at best, and stores them under its fingerprint.

    peaks = measure(quick=False, say=print)
    save(peaks)
    load()          # anywhere later, on the same machine

docs/peaks.md describes the figures. Importing this needs no torch; measuring does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ...machine import machine_facts
from .store import SCHEMA, faults, load, path_of, require_own, save

if TYPE_CHECKING:
    from .sampling import Effort

__all__ = ["SCHEMA", "faults", "load", "measure", "path_of", "require_own", "save"]

QUIET = 0.05
"""Share of the cores that other processes may use before everything is measured a second time."""


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every ceiling of this machine; writes no file."""
    from .sampling import FULL, QUICK

    return measure_with(QUICK if quick else FULL, quick=quick, say=say)


def measure_with(effort: Effort, *, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """`measure` with any sizes."""
    began = monotonic()
    import torch

    from . import cpu, gpu
    from .other_work import OtherWork
    from .sampling import Sampler, better, noisy

    facts = machine_facts()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(f"note: {text}")

    sampler, other_work = Sampler(effort), OtherWork()
    figures = cpu.measure(sampler, facts, say, note)
    others = other_work.share()
    if others is None or others > QUIET:
        say("other processes are busy: measuring again" if others else "measuring again")
        figures = better(figures, cpu.measure(sampler, facts, lambda _: None, lambda _: None))
        others = other_work.share()
    if others and others > QUIET:
        note(f"other processes used {others:.0%} of the cores meanwhile: ceilings may be too low")
    figures["gpu"] = gpu.measure(Sampler(effort), say, note) if torch.cuda.is_available() else None
    unstable = noisy(figures)
    if unstable:
        shown = ", ".join(unstable[:6]) + (f" and {len(unstable) - 6} more" if len(unstable) > 6 else "")
        note(f"readings vary widely: {shown}")
    return {
        "schema": SCHEMA,
        "machine": facts,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "seconds": round(monotonic() - began, 1),
        "threads": torch.get_num_threads(),
        "other_work": others,
        "huge_pages": huge_pages(),
        "notes": notes,
        **figures,
    }


def huge_pages() -> str | None:
    """The policy for transparent huge pages, which decides what random access costs beyond the TLB."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None
