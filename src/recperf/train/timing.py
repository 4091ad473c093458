"""Times a training as stretches between two moments at which the device has finished all of its work.

On a GPU a step returns when its kernels are queued, so the host's clock says nothing about a single step. It is read
only where a stretch begins and ends; in between, marks in the queue of the device tell when each step was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

from ..measure.device_clock import StepMarks, timing_event
from ..measure.peaks.other_work import OtherWork
from .loop import Position


class Emit(Protocol):
    def __call__(self, kind: str, **fields: Any) -> None: ...


@dataclass
class StepTimer:
    """Logs a `timing` event for every stretch of training, evaluation and save; `runs/speed.py` adds them up.

    A stretch of training begins with the shuffling of an epoch, at the end of the warm-up or after an evaluation or
    save, and ends with the next of these.
    """

    emit: Emit
    seed: int
    sync: Callable[[], None] | None = None
    warmup: int = 20
    marks: StepMarks = field(default_factory=StepMarks)
    alone: bool = True
    """Whether no other rank works on this machine, whose work is not other work."""
    steps: int = 0
    """Steps of this process."""
    _began: int = 0
    """When the open stretch began; 0: there is none."""
    _epoch: int = 0
    """When the epoch began whose first step has not begun yet."""
    _shuffle: int = 0
    _samples: int = 0
    _batch: int = 0
    _first: int = 0
    """`steps` when the stretch began."""
    _others: OtherWork = field(default_factory=OtherWork)

    @classmethod
    def for_training(
        cls, steps: int, *, emit: Emit, seed: int, sync: Callable[[], None] | None, alone: bool = True
    ) -> StepTimer:
        """For so many steps to come, of which the first 20, or a fifth, are warm-up."""
        marks = StepMarks(timing_event if sync else None)
        return cls(emit=emit, seed=seed, sync=sync, warmup=min(20, steps // 5), marks=marks, alone=alone)

    def before_epoch(self) -> None:
        if not self._began:
            self._begin()
        self._epoch = perf_counter_ns()

    def before_step(self) -> None:
        if self._epoch:
            self._shuffle += perf_counter_ns() - self._epoch
            self._epoch = 0
            self.marks.begin()

    def after_step(self, position: Position, samples: int) -> None:
        self.marks.end_step()
        self.steps += 1
        self._samples += samples
        self._batch = max(self._batch, samples)
        if self.steps == self.warmup:
            self._end(position, "warmup")
            self._begin()

    @contextmanager
    def aside(self, part: str, position: Position) -> Iterator[None]:
        """Ends the stretch of training, times what is done instead, and begins the next stretch."""
        began = self._end(position, "warmup" if self.steps < self.warmup else "steady")
        yield
        self._begin()
        self.emit(
            "timing", seed=self.seed, step=position.step, part=part, seconds=round((self._began - began) / 1e9, 9)
        )

    def _begin(self) -> None:
        if self.alone:
            self._others = OtherWork()
        if self.sync:
            self.sync()
        self._began, self._first = perf_counter_ns(), self.steps
        self._shuffle = self._samples = self._batch = 0
        self.marks.begin()

    def _end(self, position: Position, part: str) -> int:
        """Log the stretch of training and return the moment at which it ended."""
        if self.sync:
            self.sync()
        ended = perf_counter_ns()
        times, steps = self.marks.read(), self.steps - self._first
        if steps:
            self.emit(
                "timing", seed=self.seed, step=position.step, part=part, seconds=round((ended - self._began) / 1e9, 9),
                steps=steps, samples=self._samples, batch=self._batch, shuffle_s=round(self._shuffle / 1e9, 9),
                other_work=self._others.share() if self.alone else None,
                step_ms=[round(ns / 1e6, 4) for ns in times] if part == "steady" else [],
            )  # fmt: skip
        return ended
