"""A step's budget on a GPU, read from timestamps its own queue takes, without making it wait between parts.

At every boundary of a span an event is queued. Between two events lies the work that was queued between them and, where
the device had to wait for the host, that wait. The parts therefore sum to the step as the device lived through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .spans import Listener, StepClock, listen


class EventClock:
    """Books the time of a step to the spans inside it, by events in the current queue.

    With `captured` the events become part of a CUDA graph that is being captured, and `read` gives the times of its
    last replay.
    """

    def __init__(self, *, captured: bool = False) -> None:
        self._captured = captured
        self._stack: list[str] = []
        self._marks: list[tuple[str, Any]] = []
        self._before: Listener | None = None

    def begin(self) -> None:
        self._stack, self._marks = ["other"], []
        self._before = listen(self)
        self._mark()

    def end(self) -> tuple[int, dict[str, int]]:
        """The step's time on the device and its parts, in ns; waits for the device."""
        self.close()
        return self.read()

    def close(self) -> None:
        self._mark()
        listen(self._before)

    def read(self) -> tuple[int, dict[str, int]]:
        self._marks[-1][1].synchronize()
        parts: dict[str, int] = {}
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:]):
            parts[name] = parts.get(name, 0) + round(begin.elapsed_time(end) * 1e6)
        return sum(parts.values()), parts

    @property
    def inside(self) -> str:
        return self._stack[-1]

    def enter(self, name: str) -> None:
        self._stack.append(name)
        self._mark()

    def leave(self) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """What follows the event belongs to the innermost open span."""
        kinds = {"external": True} if self._captured else {}
        event = torch.cuda.Event(enable_timing=True, **kinds)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((self._stack[-1], event))


def step_clock(sync: Callable[[], None] | None) -> StepClock | EventClock:
    """The clock for a device: its own events where it has a queue to wait for."""
    return StepClock() if sync is None else EventClock()
