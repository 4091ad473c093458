"""The training loop. Everything that is not training (timing, logging, evaluating, saving) watches from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..measure.spans import span


class Order(Protocol):
    def __len__(self) -> int: ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]: ...


class Loss(Protocol):
    """A tensor, or what can be asked the same three things."""

    def __mul__(self, scale: float) -> Loss: ...

    def backward(self) -> None: ...

    def detach(self) -> Tensor: ...


class Model(Protocol):
    def train(self, mode: bool = True) -> Any: ...

    def loss(self, batch: Any) -> Loss: ...


class Optimizer(Protocol):
    def step(self, learning_rate: float | Tensor) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class WholeStep(Protocol):
    def __call__(self, batches: Iterator[Any], rate: float) -> tuple[Tensor, int]: ...

    def clocked(self, batches: Iterator[Any], rate: float) -> tuple[int, dict[str, int]]:
        """The same with a clock inside: the step's time and its parts, in ns."""
        ...


@dataclass(frozen=True)
class Position:
    """How far training is; with the seed it determines every batch that follows."""

    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that are done."""
    step: int = 0
    """Steps done in all."""


class Watch(Protocol):
    """Is told what happens; may raise to stop. The end of an epoch that was saved in its last step is told again."""

    def before_epoch(self) -> None: ...

    def before_step(self, step: int) -> None: ...

    def after_step(self, position: Position, loss: Tensor, samples: int) -> None: ...

    def after_epoch(self, position: Position) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What one training is made of."""

    model: Model
    optimizer: Optimizer
    order: Order
    learning_rate: Callable[[int], float]
    epochs: int
    max_steps: int = 0
    micro_batches: int = 1
    """Slices a batch is taken in; their gradients add up to the batch's."""
    evaluate_after: Callable[[Position], bool] = lambda at: False
    """Whether to score now, beside what the config asks for in steps."""
    save_after: Callable[[Position], bool] = lambda at: False
    """Whether to save now, likewise."""
    events_after: Callable[[Position], list[dict[str, Any]]] = lambda at: []
    """What the log should say now that so much is done."""
    about_score: Callable[[Position], dict[str, Any]] = lambda at: {}
    """What is scored that far into training, where that varies."""
    ahead: Callable[[Position], None] = lambda at: None
    """Is told where training goes on, so that the next evaluation can be prepared."""
    seen: Callable[[], dict[str, float] | None] = lambda: None
    """How good predictions were when they were trained on, since this was last asked; none where nobody counts."""
    whole_step: WholeStep | None = None
    """Takes a step in one piece, as a CUDA graph does; none: part by part, as `take_step` has it."""

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        planned = self.epochs * len(self.order)
        return min(planned, self.max_steps) if self.max_steps else planned


def take_step(recipe: Recipe, batches: Iterator[Any], step: int) -> tuple[Tensor, int]:
    """One training step on the next batch: its loss and how many samples it had."""
    if recipe.whole_step:
        return recipe.whole_step(batches, recipe.learning_rate(step))
    with span("data"):
        batch = next(batches)
        parts = slices(batch, recipe.micro_batches)
    losses = []
    for part in parts:
        loss = recipe.model.loss(part) * (len(part) / len(batch))
        with span("backward"):
            loss.backward()
        losses.append(loss.detach())
    with span("update"):
        recipe.optimizer.step(recipe.learning_rate(step))
    return (losses[0] if len(losses) == 1 else torch.stack(losses).sum()), len(batch)


def slices(batch: Any, count: int) -> list[Any]:
    """A batch in so many parts, as even as it goes; fewer where it has fewer samples."""
    if count == 1:
        return [batch]
    count = min(count, len(batch))
    edges = [len(batch) * index // count for index in range(count + 1)]
    return [batch.slice(start, stop) for start, stop in zip(edges, edges[1:])]


def train(recipe: Recipe, start: Position, watch: Watch) -> Position:
    """Train from a position to the end."""
    order, total = recipe.order, recipe.steps
    at = start
    if at.step >= total:
        # Saved in its last step: all that is missing is the end of that epoch.
        at = turned(at, len(order))
        watch.after_epoch(at)
    while at.step < total:
        recipe.model.train()
        watch.before_epoch()
        batches = order.batches(at.epoch, at.batch)
        while at.batch < len(order) and at.step < total:
            watch.before_step(at.step)
            loss, samples = take_step(recipe, batches, at.step)
            at = replace(at, batch=at.batch + 1, step=at.step + 1)
            watch.after_step(at, loss, samples)
        at = turned(at, len(order))
        watch.after_epoch(at)
    return at


def turned(at: Position, batches: int) -> Position:
    """The position itself, or the next epoch's first when all batches are done."""
    return Position(at.epoch + 1, 0, at.step) if at.batch == batches else at
