"""A loss whose backward pass has named parts.

The forward pass is cut into named parts, so that each part of the backward pass has a name and a span too: autograd
runs a whole graph at once, its branches in an unspecified order. Here each part has its own graph, and the graphs run
one after the other, the last first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...measure.spans import span

Run = Callable[..., Any]
"""Calls a part: its name, a function of tensors, and the tensors. A part without a name sets its own spans."""


def spanned(name: str, part: Callable[..., Any], *inputs: Any) -> Any:
    """Run a part in a span; autograd sees one graph for all parts."""
    if not name:
        return part(*inputs)
    with span(name):
        return part(*inputs)


@dataclass(frozen=True, eq=False)
class _Stage:
    name: str
    inputs: tuple[Tensor, ...]
    cut: tuple[Tensor, ...]
    """The inputs as leaves of this part's graph."""
    outputs: tuple[Tensor, ...]


class _End(torch.autograd.Function):
    """A number whose gradients with respect to the outputs of a part are those passed."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


class Stages:
    def __init__(self) -> None:
        self._stages: list[_Stage] = []

    def run(self, name: str, part: Callable[..., Any], *inputs: Tensor) -> Any:
        cut = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs)
        output = spanned(name, part, *cut)
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        self._stages.append(_Stage(name, inputs, cut, outputs))
        return output

    def backward(self, scale: float) -> None:
        """Add the gradients of the last part's output, times the scale, to all leaves, and drop the parts."""
        last = self._stages[-1].outputs[0]
        waiting: dict[int, Tensor] = {id(last): torch.full_like(last, scale)}
        while self._stages:
            stage = self._stages.pop()
            pairs = [(out, waiting.pop(id(out))) for out in stage.outputs if id(out) in waiting]
            if not pairs:
                continue
            spanned(f"{stage.name}_backward" if stage.name else "", self._run_backward, stage, pairs, waiting)

    @staticmethod
    def _run_backward(stage: _Stage, pairs: list[tuple[Tensor, Tensor]], waiting: dict[int, Tensor]) -> None:
        # Torch imports a second's worth of symbolic algebra to compare shapes of gradients that it is passed.
        _End.apply([gradient for _, gradient in pairs], *(out for out, _ in pairs)).backward()  # type: ignore[no-untyped-call]
        for tensor, cut in zip(stage.inputs, stage.cut):
            if cut.grad is None:
                continue
            if tensor.is_leaf:
                tensor.grad = cut.grad if tensor.grad is None else tensor.grad.add_(cut.grad)
            else:
                waiting[id(tensor)] = waiting[id(tensor)] + cut.grad if id(tensor) in waiting else cut.grad
            cut.grad = None


class StagedLoss:
    """A loss with such a backward pass; a training loop uses it like a tensor."""

    def __init__(self, stages: Stages, value: Tensor, logits_B: Tensor, scale: float = 1.0) -> None:
        self._stages, self._value, self.logits_B, self.scale = stages, value.detach(), logits_B, scale

    def __mul__(self, scale: float) -> StagedLoss:
        """Scale the loss and its gradients, as for a part of a batch."""
        return StagedLoss(self._stages, self._value * scale, self.logits_B, self.scale * scale)

    def detach(self) -> Tensor:
        return self._value

    def item(self) -> float:
        """Read the value; waits for the device."""
        return float(self._value)

    def backward(self) -> None:
        """Add the gradient of every leaf to its `grad`. Can be called once."""
        self._stages.backward(self.scale)
