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


class Event(Struct, kw_only=True):
    """The fields that every event has. Events about one training name its seed."""

    kind: str
    seed: int | None = None
    step: int = 0
    """Steps done at the time."""


class Step(Event, kw_only=True):
    """A training step; the loss and the norm are None if they were not finite."""

    seed: int
    step: int
    loss: Number | None
    gradient_norm: Number | None = None
    """Of the dense gradient, over all ranks and before clipping; in some steps only, with the learning rate."""
    learning_rate: Number | None = None


class Scores(Event, kw_only=True):
    """An evaluation, or the metrics of the training batches since the one before; in the log the metrics are fields of
    the event itself."""

    seed: int
    step: int
    metrics: dict[str, Any]
    epoch: int | None = None
    split: str | None = None


class Timing(Event, kw_only=True):
    """The wall time of a stretch of training, or of an evaluation or a save, which have no steps."""

    seed: int
    step: int
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


class ChangeEvent(Event, kw_only=True):
    """A config field that differs from then on; `step` is the last step before."""

    seed: int
    step: int
    field: str
    was: Any
    now: Any


KINDS: dict[str, type[Event]] = {
    "step": Step, "metric": Scores, "training": Scores, "timing": Timing, "change": ChangeEvent
}  # fmt: skip
ABOUT = ("kind", "t", "seed", "step", "epoch", "split")
"""Fields of `Scores` in the log that say where and when; the others are metrics."""


def event_of(value: Any) -> Event | Problem:
    """A parsed line of the log, validated by its kind."""
    kind = value.get("kind") if isinstance(value, dict) else None
    declared = KINDS.get(kind, Event) if isinstance(kind, str) else Event
    if declared is Scores:
        metrics = {name: value.pop(name) for name in list(value) if name not in ABOUT}
        value["metrics"] = metrics
    return fit(value, declared)


def parse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Every line of a log, validated by its kind."""
    for number, line in enumerate(lines, 1):
        try:
            event = event_of(decode(line))
        except ValueError as error:
            raise BadEvent(number, error) from None
        if isinstance(event, Problem):
            raise BadEvent(number, event)
        yield event
