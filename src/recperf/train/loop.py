"""The training loop. Timing, logging, evaluating and saving are done by a `Watch` that the loop calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..measure.spans import span
from ..stop import poll

State = dict[str, Any]
"""A tree of numbers, texts and tensors, as a checkpoint holds it."""
RecordNorm = Callable[[Tensor], None]
"""Receives the norm of a step's dense gradient, on its device."""


class Order(Protocol):
    def __len__(self) -> int: ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]: ...


class Loss(Protocol):
    """A tensor, or an object with these three methods of one."""

    def __mul__(self, scale: float) -> Loss: ...

    def backward(self) -> None: ...

    def detach(self) -> Tensor: ...


class Model(Protocol):
    def train(self, mode: bool = True) -> Any: ...

    def loss(self, batch: Any) -> Loss: ...


class Optimizer(Protocol):
    def step(self, learning_rate: float | Tensor) -> None: ...

    def gradient_norm(self) -> Tensor:
        """Norm of the dense gradient before `step`, not clipped. Rows of a table that is updated sparsely have no
        dense gradient and are not counted."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class WholeStep(Protocol):
    def __call__(
        self, batches: Iterator[Any], rate: float, record_norm: RecordNorm | None = None
    ) -> tuple[Tensor, int]: ...


@dataclass(frozen=True)
class Position:
    """How far training is; with the seed it determines every batch that follows."""

    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that are done."""
    step: int = 0
    """Steps done in all."""


class Watch(Protocol):
    """Is called as training proceeds, and may raise to stop it. After a resume from the last step of an epoch,
    `after_epoch` is called again."""

    def before_epoch(self) -> None: ...

    def before_step(self, step: int) -> RecordNorm | None:
        """Is called with the number of the step that begins; returns who wants to know its gradient's norm."""

    def after_step(self, position: Position, loss: Tensor, samples: int) -> None: ...

    def after_epoch(self, position: Position) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that one training needs."""

    model: Model
    optimizer: Optimizer
    order: Order
    learning_rate: Callable[[int], float]
    epochs: int
    max_steps: int = 0
    micro_batches: int = 1
    """Parts that a batch is split into; their gradients add up to the batch's."""
    evaluate_after: Callable[[Position], bool] = lambda at: False
    """Whether to evaluate now, in addition to the config's `evaluate_steps`."""
    save_after: Callable[[Position], bool] = lambda at: False
    """Whether to save now, in addition to the config's `checkpoint_steps`."""
    events_after: Callable[[Position], list[dict[str, Any]]] = lambda at: []
    """Events for the log at this position."""
    evaluation_facts: Callable[[Position], dict[str, Any]] = lambda at: {}
    """What an evaluation at this position scores, where that varies."""
    training_metrics: Callable[[], dict[str, float] | None] = lambda: None
    """Metrics of the training batches since the last call; none where they are not collected."""
    validation_loss: Callable[[], float] | None = None
    """Computes the log loss of rows inside the training time, by which the epoch is chosen; None: the last counts."""
    patience: int = 0
    """Evaluations without a lower such loss after which training ends; 0: never."""
    evaluate_epochs: int = 1
    """Evaluate after every this many epochs, and after the last."""
    whole_step: WholeStep | None = None
    """Executes a whole step, as a CUDA graph does, in place of the body of `take_step`."""

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        planned = self.epochs * len(self.order)
        return min(planned, self.max_steps) if self.max_steps else planned


def take_step(
    recipe: Recipe, batches: Iterator[Any], step: int, record_norm: RecordNorm | None = None
) -> tuple[Tensor, int]:
    """One training step on the next batch: returns its loss and its number of samples."""
    poll()
    if recipe.whole_step:
        return recipe.whole_step(batches, recipe.learning_rate(step), record_norm)
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
        if record_norm:
            record_norm(recipe.optimizer.gradient_norm())
        recipe.optimizer.step(recipe.learning_rate(step))
    return (losses[0] if len(losses) == 1 else torch.stack(losses).sum()), len(batch)


def slices(batch: Any, count: int) -> list[Any]:
    """Split a batch into `count` parts of nearly equal size; fewer where it has fewer samples."""
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
        # The state was saved after the last step: only the end of that epoch is left.
        at = next_epoch_if_done(at, len(order))
        watch.after_epoch(at)
    while at.step < total:
        recipe.model.train()
        watch.before_epoch()
        batches = order.batches(at.epoch, at.batch)
        while at.batch < len(order) and at.step < total:
            record_norm = watch.before_step(at.step + 1)
            loss, samples = take_step(recipe, batches, at.step, record_norm)
            at = replace(at, batch=at.batch + 1, step=at.step + 1)
            watch.after_step(at, loss, samples)
        at = next_epoch_if_done(at, len(order))
        watch.after_epoch(at)
    return at


def next_epoch_if_done(at: Position, batches: int) -> Position:
    """The first position of the next epoch when all batches are done, else the position itself.

    A run that was resumed with larger batches may have done more of them than an epoch now has.
    """
    return Position(at.epoch + 1, 0, at.step) if at.batch >= batches else at
