"""The forward and backward pass of the MLPs in a written-out training step: plain, or with fewer and faster kernels.

The fast variant fuses bias and ReLU into the matrix product, computes the bias gradient together with the ReLU's, may
work in bfloat16 with float32 weights and weight gradients, and may compute weight gradients on another stream.

Shapes: B samples, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError
from ..ops.products import weight_gradient
from .mlp import MLP, add_gradient
from .streams import SideStreams

EVEN = 8
"""On a GPU, products whose width is not a multiple of this take slow kernels."""


class Arithmetic:
    """The plain variant, which the fast one must equal."""

    streams = SideStreams()

    def width(self, features: int) -> int:
        """The best width for a layer's input of this many features."""
        return features

    def begin(self, mlps: Sequence[MLP]) -> None:
        """Prepare for a step; called before its first layer."""

    def forward(self, mlp: MLP, x_BI: Tensor) -> list[Tensor]:
        """Return the input and every layer's output."""
        activations, parameters = [x_BI], mlp.flat
        last = len(parameters) - 2
        for index in range(0, len(parameters), 2):
            x_BI = torch.addmm(parameters[index + 1], x_BI, parameters[index].t())
            if index < last or mlp.last_relu:
                x_BI.relu_()
            activations.append(x_BI)
        return activations

    def backward(
        self, mlp: MLP, gradient_BO: Tensor, activations: list[Tensor], *, input_gradient: bool
    ) -> Tensor | None:
        """Add to the parameters' gradients; return the input's gradient if requested."""
        parameters = mlp.flat
        last = len(parameters) - 2
        for index in range(last, -1, -2):
            layer = index // 2
            if index < last or mlp.last_relu:
                gradient_BO = torch.ops.aten.threshold_backward(gradient_BO, activations[layer + 1], 0)
            add_gradient(parameters[index + 1], gradient_BO.sum(0))
            add_gradient(parameters[index], gradient_BO.t().mm(activations[layer]))
            if index == 0 and not input_gradient:
                return None
            gradient_BO = gradient_BO.mm(parameters[index])
        return gradient_BO


Copies = tuple[Tensor | None, Tensor | None]
"""A copy of a parameter for the forward pass and a transposed one for the backward pass; none: the parameter serves."""


class FastArithmetic(Arithmetic):
    """Fewer kernels; `low` is the type of the products, `relu` one of the implementations in `ops.relu`.

    With `copies` the products read copies of the weights in a suitable layout, made at every step: the first layer
    padded with zeros to a width that is a multiple of 8, and in tf32, whose fast kernels read both factors along the
    summed dimension only, transposed copies for the backward pass. `rounded`: see `weight_gradient`.
    """

    def __init__(
        self,
        *,
        relu: ModuleType,
        low: torch.dtype = torch.float32,
        copies: bool = False,
        rounded: bool = False,
        streams: SideStreams | None = None,
    ) -> None:
        self.relu, self.low, self.copies, self.rounded = relu, low, copies, rounded
        self.streams = streams or SideStreams()
        self._copies: dict[tuple[MLP, torch.device], list[Copies]] = {}
        self._read: dict[MLP, list[Tensor]] = {}
        """What the forward pass of this step reads: parameters or their copies."""
        self._transposed: dict[MLP, list[Tensor | None]] = {}

    def width(self, features: int) -> int:
        return -(-features // EVEN) * EVEN if self.copies else features

    def begin(self, mlps: Sequence[MLP]) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        transposed: list[tuple[Tensor, Tensor]] = []
        for mlp in mlps:
            parameters = mlp.flat
            copies = self._copies_of(mlp, parameters)
            for parameter, (copied, turned) in zip(parameters, copies):
                if copied is not None and copied.shape != parameter.shape:
                    # Apart from the others: among them it would prevent copying all by one kernel.
                    copied[:, : parameter.shape[1]].copy_(parameter)
                elif copied is not None:
                    targets.append(copied)
                    sources.append(parameter)
                if turned is not None:
                    transposed.append((turned[: parameter.shape[1]], parameter))
            self._read[mlp] = [p if copied is None else copied for p, (copied, _) in zip(parameters, copies)]
            self._transposed[mlp] = [turned for _, turned in copies]
        if targets:
            torch._foreach_copy_(targets, sources)
        with self.streams.run_on("copies"):
            for turned, weight in transposed:
                turned.copy_(weight.t())

    def _copies_of(self, mlp: MLP, parameters: Sequence[Tensor]) -> list[Copies]:
        """Memory for the copies, allocated at the first step on a device."""
        if parameters[0].dtype != torch.float32:
            raise ArgumentError(
                f"the fast MLP takes float32 parameters, not {parameters[0].dtype}", fix="use the plain Arithmetic"
            )
        key = (mlp, parameters[0].device)
        if key not in self._copies:
            self._copies[key] = [self._copy_of(parameter, first=not i) for i, parameter in enumerate(parameters)]
        return self._copies[key]

    def _copy_of(self, parameter: Tensor, *, first: bool) -> Copies:
        shape, float32 = tuple(parameter.shape), self.low == torch.float32
        if first:
            shape = (shape[0], self.width(shape[1]))
        copied = turned = None
        if not float32 or shape != tuple(parameter.shape):
            copied = torch.zeros(shape, dtype=self.low, device=parameter.device)
        if self.copies and float32 and parameter.dim() == 2 and parameter.shape[0] > 1:
            turned = torch.zeros(shape[::-1], device=parameter.device)
        return copied, turned

    def forward(self, mlp: MLP, x_BI: Tensor) -> list[Tensor]:
        parameters = self._read[mlp]
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
        self.streams.join("copies")
        parameters, read = mlp.flat, self._read[mlp]
        gradient_BO, bias_SO = gradient_BO.to(self.low), None
        for index in range(len(read) - 2, -1, -2):
            layer = index // 2
            if bias_SO is None and (index < len(read) - 2 or mlp.last_relu):
                gradient_BO, bias_SO = self.relu.backward(gradient_BO, activations[layer + 1])
            reads = [gradient_BO, activations[layer], *([] if bias_SO is None else [bias_SO])]
            with self.streams.run_on("weights", *reads):
                self._add_gradients(parameters[index : index + 2], gradient_BO, activations[layer], bias_SO)
            bias_SO = None
            if index == 0 and not input_gradient:
                return None
            if index and read[index].shape[0] == 1:
                # A product over one number is a multiplication, which the kernel of the ReLU below does too.
                gradient_BO, bias_SO = self.relu.outer_backward(gradient_BO, read[index], activations[layer])
            else:
                turned = self._transposed[mlp][index]
                gradient_BO = gradient_BO.mm(read[index] if turned is None else turned.t())
        # Without the columns that pad the input.
        return gradient_BO[:, : parameters[0].shape[1]]

    def _add_gradients(
        self, parameters: Sequence[Tensor], gradient_BO: Tensor, input_BI: Tensor, bias_SO: Tensor | None
    ) -> None:
        """Add the gradients of a layer's weight and bias."""
        weight, bias = parameters
        gradient_OI = weight_gradient(gradient_BO, input_BI, rounded=self.rounded)
        add_gradient(weight, gradient_OI[:, : weight.shape[1]].contiguous())
        add_gradient(bias, gradient_BO.sum(0, dtype=torch.float32) if bias_SO is None else bias_SO.sum(0))
