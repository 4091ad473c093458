"""Reads events.jsonl, the log of a run: one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..jsonfile import Number, Problem, Struct, decode, fit


class BadEvent(Exception):
    """A line that is not an event."""

    def __init__(self, line: int, problem: object) -> None:
        super().__init__(f"events.jsonl line {line} is not an event: {problem}")
        self.line = line


class Event(Struct):
    """The fields that every event has. Events about one training name its seed."""

    kind: str
    seed: int | None = None


class Step(Struct):
    """A training step; the loss and the norm are None if they were not finite."""

    seed: int
    step: int
    loss: Number | None
    gradient_norm: Number | None = None
    """Of the dense gradient, over all ranks and before clipping; in some steps only, with the learning rate."""
    learning_rate: Number | None = None


class Metric(Struct):
    """An evaluation; its metrics are further fields of the event."""

    seed: int
    step: int


class Timing(Struct):
    """The wall time of a stretch of training, or of an evaluation or a save, which have no steps."""

    seed: int
    step: int
    """Steps done when it ended."""
    part: str
    """warmup, steady, evaluation or save."""
    seconds: Number
    steps: int = 0
    samples: int = 0
    batch: int = 0
    """Samples of the largest batch."""
    shuffle_s: Number = 0.0
    """Seconds before the first step of epochs."""
    other_work: Number | None = None
    """Share of the cores that others took meanwhile."""
    step_ms: tuple[Number, ...] = ()
    """The time of every step, without the warm-up."""


class ChangeEvent(Struct):
    """A config field that differs from then on; `step` is the last step before."""

    seed: int
    step: int
    field: str
    was: Any
    now: Any


KINDS: dict[str, type] = {"step": Step, "metric": Metric, "timing": Timing, "change": ChangeEvent}
ABOUT = ("kind", "t", "seed", "step", "epoch", "split")
"""Fields of an evaluation that say where and when it happened; the others are its metrics."""


def parse_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Every line of a log as an object, validated by its kind."""
    return (_event(number, line) for number, line in enumerate(lines, 1))


def _event(number: int, line: bytes) -> dict[str, Any]:
    try:
        value = decode(line)
    except ValueError as error:
        raise BadEvent(number, error) from None
    event: Event | Problem = fit(value, Event)
    if isinstance(event, Problem):
        raise BadEvent(number, event)
    details = fit(value, KINDS.get(event.kind, Event))
    if isinstance(details, Problem):
        raise BadEvent(number, details)
    return dict(value)


def metrics_of(event: dict[str, Any]) -> dict[str, float] | Problem:
    """The metrics of an evaluation: every field that does not say where and when it happened."""
    rest = {name: value for name, value in event.items() if name not in ABOUT}
    return fit(rest, dict[str, Number])
