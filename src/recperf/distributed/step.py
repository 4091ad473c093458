"""A training step on several ranks: each works on its own samples, then gradients are added up.

Shapes: G numbers that travel: all dense gradients, one a parameter that has one, the loss, two signals.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.device_clock import step_clock
from ..measure.spans import span
from ..train.loop import Model, Optimizer
from .notes import note
from .world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Reduction:
    """Adds up the dense gradients, the loss and the wish to stop: one buffer, one message."""

    def __init__(self, parameters: list[nn.Parameter], world: World) -> None:
        self.parameters, self.world = parameters, world
        count = sum(parameter.numel() for parameter in parameters)
        self.buffer_G = torch.zeros(count + len(parameters) + 1 + len(SIGNALS), device=parameters[0].device)

    def __call__(self, loss: Tensor) -> Tensor:
        """The loss of the whole batch. Gradients become views of the buffer, the same bits on every rank."""
        parameters, world = self.parameters, self.world
        rest_R = self.buffer_G[-len(parameters) - 1 - len(SIGNALS) :]
        heard = world.stop_flag.received if world.stop_flag else None
        has = [float(parameter.grad is not None) for parameter in parameters]
        rest_R.copy_(torch.tensor([*has, 0.0, *(float(heard == number) for number in SIGNALS)]))
        rest_R[len(parameters)] = loss
        views = self._views()
        for parameter, view in zip(parameters, views):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        world.sum_(self.buffer_G)
        told: list[float] = rest_R.tolist()
        for parameter, view, owners in zip(parameters, views, told):
            parameter.grad = view if owners else None
        for number, asked in zip(SIGNALS, told[len(parameters) + 1 :]):
            if asked and world.signal is None:
                world.signal = number
        return rest_R[len(parameters)].clone()

    def _views(self) -> list[Tensor]:
        found, start = [], 0
        for parameter in self.parameters:
            found.append(self.buffer_G[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
        return found


class RankStep:
    """Takes a step in one piece, as the training loop can be asked to."""

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
        """Is told the rate before anything is looked up."""

    def __call__(self, batches: Iterator[Any], rate: float) -> tuple[Tensor, int]:
        note("waiting for a batch")
        with span("data"):
            batch = next(batches)
        self.before(rate)
        note(f"step {batch.step + 1}: forward and backward pass")
        loss = self.model.loss(batch)
        with span("backward"):
            loss.backward()
        note(f"step {batch.step + 1}: adding up gradients")
        with span("reduce"):
            value = self.reduction(loss.detach())
        note(f"step {batch.step + 1}: update")
        with span("update"):
            self.optimizer.step(rate)
        note(f"step {batch.step + 1}: done")
        return value, len(batch)

    def clocked(self, batches: Iterator[Any], rate: float) -> tuple[int, dict[str, int]]:
        clock = step_clock(self.sync)
        clock.begin()
        self(batches, rate)
        return clock.end()
