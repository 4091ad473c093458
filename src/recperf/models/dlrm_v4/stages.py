"""A forward pass cut into named parts, so that each part of the backward pass has a name and a span too.

Autograd walks the whole graph at once, and branches of it in an order of its own. Here each part's graph ends where the
part does, and they are walked one after the other, the last first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...measure.spans import span

Run = Callable[..., Any]
"""Calls a part: its name, a function of tensors, and those. A part without a name has spans of its own inside."""


def spanned(name: str, part: Callable[..., Any], *inputs: Any) -> Any:
    """A part of a forward pass that autograd sees whole."""
    if not name:
        return part(*inputs)
    with span(name):
        return part(*inputs)


@dataclass(frozen=True, eq=False)
class _Stage:
    name: str
    inputs: tuple[Tensor, ...]
    cut: tuple[Tensor, ...]
    """The inputs as this part's graph knows them: leaves."""
    outputs: tuple[Tensor, ...]


class Stages:
    def __init__(self) -> None:
        self._stages: list[_Stage] = []

    def run(self, name: str, part: Callable[..., Any], *inputs: Tensor) -> Any:
        cut = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs)
        found = spanned(name, part, *cut)
        outputs = (found,) if isinstance(found, Tensor) else tuple(found)
        self._stages.append(_Stage(name, inputs, cut, outputs))
        return found

    def backward(self, scale: float) -> None:
        """Add the gradients of the last part's output, times the scale, to all leaves; the parts are let go of."""
        last = self._stages[-1].outputs[0]
        waiting: dict[int, Tensor] = {id(last): torch.full_like(last, scale)}
        while self._stages:
            stage = self._stages.pop()
            pairs = [(out, waiting.pop(id(out))) for out in stage.outputs if id(out) in waiting]
            if not pairs:
                continue
            spanned(f"{stage.name}_backward" if stage.name else "", self._walk, stage, pairs, waiting)

    @staticmethod
    def _walk(stage: _Stage, pairs: list[tuple[Tensor, Tensor]], waiting: dict[int, Tensor]) -> None:
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
        for given, cut in zip(stage.inputs, stage.cut):
            if cut.grad is None:
                continue
            if given.is_leaf:
                given.grad = cut.grad if given.grad is None else given.grad.add_(cut.grad)
            else:
                waiting[id(given)] = waiting[id(given)] + cut.grad if id(given) in waiting else cut.grad
            cut.grad = None


class StagedLoss:
    """A loss with such a backward pass; to a training loop it is like a tensor."""

    def __init__(self, stages: Stages, value: Tensor, logits_B: Tensor, scale: float = 1.0) -> None:
        self._stages, self._value, self.logits_B, self.scale = stages, value.detach(), logits_B, scale

    def __mul__(self, scale: float) -> StagedLoss:
        """The loss times a number, as of a part of a batch; its gradients are scaled with it."""
        return StagedLoss(self._stages, self._value * scale, self.logits_B, self.scale * scale)

    def detach(self) -> Tensor:
        return self._value

    def item(self) -> float:
        """Waits for the device."""
        return float(self._value)

    def backward(self) -> None:
        """Add the gradient of every leaf to its `grad`. Once."""
        self._stages.backward(self.scale)
