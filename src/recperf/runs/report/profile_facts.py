"""What several sections need from a profile: verdict, missing sections, cells of components, parts of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...measure.spans import PHASES, phase_of
from . import formats as fmt
from .blocks import Block, Cell, Table, cells
from .formats import NONE, component
from .svg import family

Profile = dict[str, Any]

TOP = 12
"""Rows of a long table that are always visible."""
ABSENT = "this profile has no such section; recperf profile WORKLOAD measures it"


def why_missing(profile: Profile, key: str) -> str | None:
    """Why a section was not measured; None if it was."""
    part = profile.get(key)
    if part is None:
        return ABSENT
    if isinstance(part, dict) and "missing" in part:
        return fmt.printable(part["missing"])
    return None


def verdict_of(profile: Profile) -> dict[str, Any] | None:
    """The verdict; the profile that a run takes of itself has the regime instead, without a confidence."""
    verdict = profile.get("verdict") or profile.get("regime")
    return dict(verdict) if verdict else None


def evidence_table(verdict: dict[str, Any]) -> list[Block]:
    """The measured values behind a verdict, each with its threshold."""
    rows = [
        cells(
            item["what"],
            fmt.evidence_value(item["value"], item.get("unit")),
            item.get("threshold") or NONE,
            Cell(item.get("says") or NONE, "strong"),
        )
        for item in verdict.get("evidence") or []
    ]
    note = f"Verdict: {verdict['name']}. A value on the other side of its threshold would change the result."
    return [Table(("evidence", "measured", "threshold", "result"), rows, note, left=(2, 3))] if rows else []


def keyed(name: str, text: str = "") -> Cell:
    """The name of a component with the colour that it has in figures."""
    hue, faint = family(name)
    return Cell(text or component(name), swatch=hue, faint=faint, width=30)


@dataclass(frozen=True)
class StepPart:
    name: str
    phase: str
    share: float
    """Share of the step."""
    ms: dict[str, float] | None
    """p20, p50 and p80; None if only the share is known."""


def from_profile(profile: dict[str, Any]) -> list[StepPart]:
    return in_order(StepPart(p["name"], p["phase"], p["share"], p["ms"]) for p in profile["components"])


def from_training(budget: dict[str, float]) -> list[StepPart]:
    """The parts that were timed during training."""
    # Backward and update spans have one part each, so an undeclared part is a forward span of a model not loaded here.
    return in_order(StepPart(name, phase_of(name, default="forward"), share, None) for name, share in budget.items())


def in_order(parts: Iterable[StepPart]) -> list[StepPart]:
    """The parts by phase; within a phase, as they were measured."""
    return sorted(parts, key=lambda part: PHASES.index(part.phase) if part.phase in PHASES else len(PHASES))
