"""The parts of a training step with their phase and share, in the order in which a step runs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...measure.spans import PHASES, phase_of


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
