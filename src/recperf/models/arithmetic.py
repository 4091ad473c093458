"""How the MLPs of a written-out step are computed: plainly, or with fewer and faster kernels.

The plain way is `mlp_forward` and `mlp_backward`. The fast way puts bias and ReLU into the product's own kernel, takes
the bias gradient in the same pass as the ReLU's, may work in bfloat16 with float32 weights and float32 weight
gradients, and may compute weight gradients beside the chain of input gradients.

Shapes: B samples, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .gradients import add_gradient
from .lanes import Lanes
from .mlp import MLP, mlp_backward, mlp_forward


class Arithmetic:
    """The plain way; what the fast way must equal."""

    lanes = Lanes()

    def begin(self, mlps: Sequence[MLP]) -> None:
        """Called before a step's first layer."""

    def forward(self, mlp: MLP, x_BI: Tensor) -> list[Tensor]:
        """The input and every layer's output."""
        return mlp_forward(x_BI, mlp.flat, last_relu=mlp.last_relu)

    def backward(
        self, mlp: MLP, gradient_BO: Tensor, activations: list[Tensor], *, input_gradient: bool
    ) -> Tensor | None:
        """Add to the parameters' gradients; the gradient of the input where it is wanted."""
        given, gradients = mlp_backward(
            gradient_BO, activations, mlp.flat, last_relu=mlp.last_relu, input_gradient=input_gradient
        )
        for parameter, gradient in zip(mlp.flat, gradients):
            add_gradient(parameter, gradient)
        return given


class FastArithmetic(Arithmetic):
    """Fewer kernels; `low` is the type products are taken in, `relu` one of `ops.relu`'s bodies."""

    def __init__(self, *, relu: ModuleType, low: torch.dtype = torch.float32, lanes: Lanes | None = None) -> None:
        self.relu, self.low = relu, low
        self.lanes = lanes or Lanes()
        self._copies: dict[int, list[Tensor]] = {}

    def begin(self, mlps: Sequence[MLP]) -> None:
        if self.low == torch.float32:
            return
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        for mlp in mlps:
            if id(mlp) not in self._copies:
                self._copies[id(mlp)] = [torch.empty_like(p, dtype=self.low, requires_grad=False) for p in mlp.flat]
            ours += self._copies[id(mlp)]
            theirs += mlp.flat
        torch._foreach_copy_(ours, theirs)

    def _parameters(self, mlp: MLP) -> Sequence[Tensor]:
        return mlp.flat if self.low == torch.float32 else self._copies[id(mlp)]

    def forward(self, mlp: MLP, x_BI: Tensor) -> list[Tensor]:
        parameters = self._parameters(mlp)
        x_BI = x_BI.to(self.low)
        activations = [x_BI]
        last = len(parameters) - 2
        for index in range(0, len(parameters), 2):
            weight_OI, bias_O = parameters[index], parameters[index + 1]
            if index < last or mlp.last_relu:
                x_BI = torch._addmm_activation(bias_O, x_BI, weight_OI.t(), use_gelu=False)
            else:
                x_BI = torch.addmm(bias_O, x_BI, weight_OI.t())
            activations.append(x_BI)
        return activations

    def backward(
        self, mlp: MLP, gradient_BO: Tensor, activations: list[Tensor], *, input_gradient: bool
    ) -> Tensor | None:
        parameters = self._parameters(mlp)
        gradient_BO = gradient_BO.to(self.low)
        last = len(parameters) - 2
        for index in range(last, -1, -2):
            layer = index // 2
            if index < last or mlp.last_relu:
                gradient_BO, bias_O = self.relu.backward(gradient_BO, activations[layer + 1])
            else:
                bias_O = gradient_BO.sum(0, dtype=torch.float32)
            add_gradient(mlp.flat[index + 1], bias_O)
            with self.lanes.aside("weights", gradient_BO, activations[layer]):
                add_gradient(mlp.flat[index], weight_gradient(gradient_BO, activations[layer]))
            if index == 0 and not input_gradient:
                return None
            gradient_BO = gradient_BO.mm(parameters[index])
        return gradient_BO


def weight_gradient(gradient_BO: Tensor, input_BI: Tensor) -> Tensor:
    """O x I in float32, whatever the operands are: a sum over the batch loses too much in bfloat16."""
    if gradient_BO.dtype == torch.float32:
        return gradient_BO.t().mm(input_BI)
    if gradient_BO.is_cuda:
        return torch.mm(gradient_BO.t(), input_BI, out_dtype=torch.float32)
    return gradient_BO.t().float().mm(input_BI.float())
