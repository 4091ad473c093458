"""A training step on several ranks: each works on its own samples, then gradients are summed.

Shapes: G numbers that are summed: all dense gradients, one flag per parameter that has a gradient, the loss, one flag
per signal and one for a save that rank 0 finds due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..measure.device_clock import step_clock
from ..measure.spans import span
from ..stop import SIGNALS
from ..train.loop import Model, Optimizer, RecordNorm
from .progress import note, note_step
from .world import World

T = TypeVar("T")


class Reduction:
    """Sums the dense gradients, the loss, received signals and whether a save is due: one buffer, one message."""

    def __init__(self, parameters: list[nn.Parameter], world: World) -> None:
        self.parameters, self.world = parameters, world
        count = sum(parameter.numel() for parameter in parameters)
        self.buffer_G = torch.zeros(count + len(parameters) + len(SIGNALS) + 2, device=parameters[0].device)

    def __call__(self, loss: Tensor) -> Tensor:
        """The loss of the whole batch. Gradients become views of the buffer, with the same bits on every rank."""
        parameters, world = self.parameters, self.world
        rest_R = self.buffer_G[-len(parameters) - len(SIGNALS) - 2 :]
        received = world.stop_flag.received if world.stop_flag else None
        has_gradient = [float(parameter.grad is not None) for parameter in parameters]
        flags = [float(received == number) for number in SIGNALS]
        due = float(world.is_leader and world.due_on_leader(None))
        rest_R.copy_(torch.tensor([*has_gradient, 0.0, *flags, due]))
        rest_R[len(parameters)] = loss
        views = self._views()
        for parameter, view in zip(parameters, views):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        world.sum_(self.buffer_G)
        rest: list[float] = rest_R.tolist()
        for parameter, view, owners in zip(parameters, views, rest):
            parameter.grad = view if owners else None
        for number, ranks in zip(SIGNALS, rest[len(parameters) + 1 :]):
            if ranks and world.signal is None:
                world.signal = number
        world.due = bool(rest[-1])
        return rest_R[len(parameters)].clone()

    def _views(self) -> list[Tensor]:
        views, start = [], 0
        for parameter in self.parameters:
            views.append(self.buffer_G[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
        return views


class RankStep:
    """A whole training step, which the training loop calls instead of its own."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        reduction: Reduction,
        *,
        before: Callable[[float], None],
        sync: Callable[[], None] | None,
    ) -> None:
        self.model, self.optimizer, self.reduction, self.sync = model, optimizer, reduction, sync
        self.before = before
        """Receives the learning rate before anything is looked up."""

    def __call__(
        self, batches: Iterator[Any], rate: float, record_norm: RecordNorm | None = None
    ) -> tuple[Tensor, int]:
        note("waiting for a batch")
        with span("data"):
            batch = next(batches)
        self.before(rate)
        began = perf_counter()
        note(f"step {batch.step + 1}: forward and backward pass")
        loss = self.model.loss(batch)
        with span("backward"):
            loss.backward()
        note(f"step {batch.step + 1}: summing gradients")
        with span("reduce"):
            value = self.reduction(loss.detach())
        note(f"step {batch.step + 1}: update")
        with span("update"):
            if record_norm:
                record_norm(self.optimizer.gradient_norm())
            self.optimizer.step(rate)
        note_step(batch.step + 1, perf_counter() - began)
        return value, len(batch)

    def clocked(self, batches: Iterator[Any], rate: float) -> tuple[int, dict[str, int]]:
        clock = step_clock(self.sync)
        clock.begin()
        self(batches, rate)
        return clock.end()


def with_next(batches: Iterator[T], may_read_ahead: Callable[[T], bool]) -> Iterator[tuple[T, T | None]]:
    """Each batch with the one after it, or None where the next one must not be read yet."""
    current = next(batches, None)
    while current is not None:
        following = next(batches, None) if may_read_ahead(current) else None
        yield current, following
        current = next(batches, None) if following is None else following
