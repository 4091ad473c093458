"""Times the steps of a training: percentiles, throughput and the budget of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from ..measure.device_clock import EventClock, step_clock
from ..measure.spans import StepClock, budget_part
from .loop import Position

FEWEST = 5
"""Timed steps below which nothing is reported."""


class Emit(Protocol):
    def __call__(self, kind: str, **fields: Any) -> None: ...


@dataclass
class StepTimer:
    """Measures the wall time of every step, and in some steps each span. Warm-up steps do not count."""

    emit: Emit
    seed: int
    sync: Callable[[], None] | None = None
    every: int = 16
    warmup: int = 20
    step_ns: list[int] = field(default_factory=list)
    parts: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    samples: int = 0
    train_ns: int = 0
    setup_ns: int = 0
    """Time before the first step of epochs: shuffling."""
    steps: int = 0
    _began: int = 0
    _epoch: int = 0
    _clock: StepClock | EventClock | None = None

    @classmethod
    def for_training(cls, steps: int, *, emit: Emit, seed: int, sync: Callable[[], None] | None) -> StepTimer:
        """Times spans in every 16th step, more often in a short training; the warm-up is 20 steps, or a fifth."""
        return cls(emit=emit, seed=seed, sync=sync, every=max(1, min(16, steps // 20)), warmup=min(20, steps // 5))

    def before_epoch(self) -> None:
        self._epoch = perf_counter_ns()

    def before_step(self, step: int) -> None:
        now = perf_counter_ns()
        if self._epoch:
            self.setup_ns += now - self._epoch
            self.train_ns += now - self._epoch
            self._epoch = 0
        # On a GPU a step returns before its work is done, so only steps with a clock are timed there.
        if self.steps >= self.warmup and step % self.every == 0:
            self._clock = step_clock(self.sync)
            self._clock.begin()
        self._began = perf_counter_ns()

    def after_step(self, position: Position, samples: int) -> None:
        if self._clock:
            wall, parts = self._clock.end()
            self._clock = None
            self.parts.append((wall, parts))
            self.emit(
                "span",
                seed=self.seed,
                step=position.step,
                ms={name: round(ns / 1e6, 6) for name, ns in {"step": wall, **parts}.items()},
            )
            if self.sync:
                self.step_ns.append(wall)
            self.train_ns += wall
        else:
            wall = perf_counter_ns() - self._began
            if self.steps >= self.warmup and not self.sync:
                self.step_ns.append(wall)
            self.train_ns += wall
        self.samples += samples
        self.steps += 1

    def wait_for_device(self) -> None:
        """Wait for queued kernels, so that they count as training time."""
        if self.sync:
            began = perf_counter_ns()
            self.sync()
            self.train_ns += perf_counter_ns() - began


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
