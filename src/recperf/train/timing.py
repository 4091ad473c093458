"""Percentiles, throughput and the budget of a step from the times of a StepTimer."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..measure.spans import budget_part
from .watch import StepTimer

FEWEST = 5
"""Timed steps below which nothing is reported."""


def performance(timers: list[StepTimer]) -> dict[str, Any]:
    """The speed of all trainings together, as result.json has it."""
    # A training so short that every step had a clock has no other times.
    steps = [ns / 1e6 for t in timers for ns in (t.step_ns or [wall for wall, _ in t.parts])]
    samples, seconds = sum(t.samples for t in timers), sum(t.train_ns for t in timers) / 1e9
    clocked = [part for timer in timers for part in timer.parts]
    return {
        "step_ms": (
            {f"p{share}": float(np.percentile(steps, share)) for share in (20, 50, 80)}
            if len(steps) >= FEWEST
            else None
        ),
        "steps_timed": len(steps),
        "samples_per_s": samples / seconds if seconds else None,
        "budget": budget(timers) if len(clocked) >= FEWEST else None,
        "steps_in_budget": len(clocked),
    }


def budget(timers: list[StepTimer]) -> dict[str, float]:
    """Share of each part in a step; what an epoch spends on shuffling is spread over its steps as data."""
    clocked = [parts for timer in timers for _, parts in timer.parts]
    steps = sum(timer.steps for timer in timers)
    mean = {"data": sum(timer.setup_ns for timer in timers) / max(1, steps), "other": 0.0}
    for parts in clocked:
        for name, ns in parts.items():
            part = budget_part(name)
            mean[part] = mean.get(part, 0.0) + ns / len(clocked)
    whole = sum(mean.values())
    return {name: ns / whole for name, ns in mean.items()}
