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
from torch.nn import functional as F

from .gradients import add_gradient
from .mlp import MLP, mlp_backward, mlp_forward
from .streams import SideStreams

EVEN = 8
"""Widths that are no multiple of this take a product's slow kernels on a GPU."""


class Arithmetic:
    """The plain way; what the fast way must equal."""

    lanes = SideStreams()

    def width(self, features: int) -> int:
        """As wide as the input of a layer with so many features is best."""
        return features

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
    """Fewer kernels; `low` is the type products are taken in, `relu` one of `ops.relu`'s bodies.

    With `copies` the products read copies of the weights that suit them, made anew every step: the first layer's width
    filled up with zeros to a multiple of 8, and in tf32, whose fast kernels read both factors along the sum only,
    transposed ones for the way back.
    """

    def __init__(
        self,
        *,
        relu: ModuleType,
        low: torch.dtype = torch.float32,
        copies: bool = False,
        lanes: SideStreams | None = None,
    ) -> None:
        self.relu, self.low, self.copies = relu, low, copies
        self.lanes = lanes or SideStreams()
        self._forth: dict[int, list[Tensor]] = {}
        self._back: dict[int, list[Tensor]] = {}

    def width(self, features: int) -> int:
        """Of a layer's input, as the products want it."""
        return -(-features // EVEN) * EVEN if self.copies else features

    def begin(self, mlps: Sequence[MLP]) -> None:
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        turned: list[tuple[Tensor, Tensor]] = []
        for mlp in mlps:
            if id(mlp) not in self._forth:
                self._make(mlp)
            for parameter, copied, back in zip(mlp.flat, self._forth[id(mlp)], self._back[id(mlp)]):
                if copied.shape != parameter.shape:
                    # Apart from the others: among them it would keep all from being copied by one kernel.
                    copied[:, : parameter.shape[1]].copy_(parameter)
                elif copied is not parameter:
                    ours.append(copied)
                    theirs.append(parameter)
                if back is not copied:
                    turned.append((back[: parameter.shape[1]], parameter))
        if ours:
            torch._foreach_copy_(ours, theirs)
        with self.lanes.aside("copies"):
            for way_back, weight in turned:
                way_back.copy_(weight.t())

    def _make(self, mlp: MLP) -> None:
        """Room for what the products read: the parameters themselves where those do."""
        forth: list[Tensor] = []
        back: list[Tensor] = []
        for index, parameter in enumerate(mlp.flat):
            shape = tuple(parameter.shape)
            if index == 0:
                shape = (shape[0], self.width(shape[1]))
            as_it_is = self.low == torch.float32 and shape == tuple(parameter.shape)
            read: Tensor = parameter
            if not as_it_is:
                read = torch.zeros(shape, dtype=self.low, device=parameter.device)
            turn = self.copies and self.low == torch.float32 and parameter.dim() == 2 and parameter.shape[0] > 1
            forth.append(read)
            back.append(torch.zeros(shape[::-1], device=parameter.device) if turn else read)
        self._forth[id(mlp)], self._back[id(mlp)] = forth, back

    def forward(self, mlp: MLP, x_BI: Tensor) -> list[Tensor]:
        parameters = self._forth[id(mlp)]
        x_BI = x_BI.to(self.low)
        if x_BI.shape[1] != parameters[0].shape[1]:
            x_BI = F.pad(x_BI, (0, parameters[0].shape[1] - x_BI.shape[1]))
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
        self.lanes.join("copies")
        forth = self._forth[id(mlp)]
        gradient_BO, bias_SO = gradient_BO.to(self.low), None
        for index in range(len(forth) - 2, -1, -2):
            layer = index // 2
            if bias_SO is None and (index < len(forth) - 2 or mlp.last_relu):
                gradient_BO, bias_SO = self.relu.backward(gradient_BO, activations[layer + 1])
            with self.lanes.aside("weights", gradient_BO, activations[layer], *([] if bias_SO is None else [bias_SO])):
                self._keep(mlp, index, gradient_BO, activations[layer], bias_SO)
            bias_SO = None
            if index == 0 and not input_gradient:
                return None
            if index and forth[index].shape[0] == 1:
                # A product over one number is a multiplication: done where the ReLU below it is.
                gradient_BO, bias_SO = self.relu.outer_backward(gradient_BO, forth[index], activations[layer])
            else:
                gradient_BO = self._input_gradient(mlp, index, gradient_BO)
        # Without the columns that filled the input up.
        return gradient_BO[:, : mlp.flat[0].shape[1]]

    def _keep(self, mlp: MLP, index: int, gradient_BO: Tensor, input_BI: Tensor, bias_SO: Tensor | None) -> None:
        """Add the gradients of a layer's weight and bias to theirs."""
        weight, bias = mlp.flat[index], mlp.flat[index + 1]
        gradient_OI = weight_gradient(gradient_BO, input_BI)
        add_gradient(weight, gradient_OI[:, : weight.shape[1]].contiguous())
        add_gradient(bias, gradient_BO.sum(0, dtype=torch.float32) if bias_SO is None else bias_SO.sum(0))

    def _input_gradient(self, mlp: MLP, index: int, gradient_BO: Tensor) -> Tensor:
        forth, back = self._forth[id(mlp)][index], self._back[id(mlp)][index]
        return gradient_BO.mm(forth) if back is forth else gradient_BO.mm(back.t())


def weight_gradient(gradient_BO: Tensor, input_BI: Tensor) -> Tensor:
    """O x I in float32, whatever the operands are: a sum over the batch loses too much in bfloat16."""
    if gradient_BO.dtype == torch.float32:
        return gradient_BO.t().mm(input_BI)
    if gradient_BO.is_cuda:
        return torch.mm(gradient_BO.t(), input_BI, out_dtype=torch.float32)
    return gradient_BO.t().float().mm(input_BI.float())
