"""A stack of linear layers and the loss of its output, with the forward and backward pass of a written-out training
step: plain, or with fewer and faster kernels.

The fast variant fuses bias and ReLU into the matrix product, computes the bias gradient together with the ReLU's, may
work in bfloat16 with float32 weights and weight gradients, and may compute weight gradients on another stream.

Shapes: B samples, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError
from ..ops.mlp import body
from ..ops.mlp.reference import WIDEST, End
from ..ops.products import weight_gradient
from .init import normal_
from .streams import SideStreams

EQUAL = (1.0, 1.0)
"""Weights of negatives and positives that change nothing."""
EVEN = 8
"""On a GPU, products whose width is not a multiple of this take slow kernels."""


class MLP(nn.Module):
    """Linear layers with ReLU between; `last_relu` adds one after the last layer. `widths` begin with the input's."""

    def __init__(self, widths: tuple[int, ...], *, last_relu: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in zip(widths, widths[1:]))
        self.last_relu = last_relu

    @property
    def flat(self) -> list[nn.Parameter]:
        """Weights and biases in turn. Read from the layers every time, so that a replaced parameter is seen, and from
        their dictionaries: walking the module tree takes longer than a small layer."""
        parameters: list[dict[str, Any]] = [layer._parameters for layer in self.layers._modules.values() if layer]
        return [by_name[name] for by_name in parameters for name in ("weight", "bias")]

    def linears(self) -> Iterator[nn.Linear]:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            yield layer

    def reset(self, seed: int, name: str) -> None:
        """Draw weights from N(0, 2 / (in + out)) and biases from N(0, 1 / out), each from (seed, its name).

        An output without ReLU is a logit: its bias starts at 0, so that an untrained model predicts one half.
        """
        for index, layer in enumerate(self.linears()):
            normal_(layer.weight, math.sqrt(2 / (layer.in_features + layer.out_features)), seed, f"{name}.{index}.w")
            normal_(layer.bias, math.sqrt(1 / layer.out_features), seed, f"{name}.{index}.b")
        if not self.last_relu:
            nn.init.zeros_(layer.bias)

    def forward(self, x_BI: Tensor) -> Tensor:
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x_BI = layer(x_BI)
            if index < last or self.last_relu:
                x_BI = F.relu(x_BI)
        return x_BI


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient as autograd does, and call its hooks; a frozen parameter gets none.

    The first gradient is stored without a copy, so no other code may write to it.
    """
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    if (hooks := parameter._post_accumulate_grad_hooks) is not None:
        for hook in hooks.values():
            hook(parameter)


@dataclass(frozen=True)
class ClickLoss:
    """The mean over samples of the binary cross entropy of logits, which keeps the gradient of large ones, or of the
    squared error of the probability, the default of the public DLRM. A kernel that computes it too reads the fields."""

    kind: Literal["bce", "mse"] = "bce"
    weights: tuple[float, float] = EQUAL
    """Of negatives and of positives, with bce; the mean is over samples, not over weights."""

    def value(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        if self.kind == "mse":
            return F.mse_loss(logits_B.sigmoid(), labels_B)
        return F.binary_cross_entropy_with_logits(logits_B, labels_B, weight=self._weights_of(labels_B))

    def slope(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        """The gradient of `value` with respect to the logits, written out."""
        p_B = logits_B.sigmoid()
        if self.kind == "mse":
            return (p_B - labels_B).mul_(p_B).mul_(1 - p_B).mul_(2 / labels_B.shape[0])
        slope_B, weights_B = p_B.sub_(labels_B).div_(labels_B.shape[0]), self._weights_of(labels_B)
        return slope_B if weights_B is None else slope_B.mul_(weights_B)

    def _weights_of(self, labels_B: Tensor) -> Tensor | None:
        if self.weights == EQUAL:
            return None
        negative, positive = self.weights
        return torch.where(labels_B > 0.5, positive, negative).to(labels_B.dtype)


def make_loss(name: str, weights: tuple[float, float] = EQUAL) -> ClickLoss:
    """Create a loss by name; `weights` of negatives and positives apply to wbce."""
    return ClickLoss("mse" if name == "mse" else "bce", weights if name == "wbce" else EQUAL)


class Arithmetic:
    """The passes of an MLP: the plain variant, which the fast one must equal."""

    streams = SideStreams()

    def width(self, features: int) -> int:
        """The best width for a layer's input of this many features."""
        return features

    def begin(self, mlps: Sequence[MLP], x_BI: Tensor | None = None) -> Tensor | None:
        """Prepare for a step, before its first layer; returns the input of the first MLP as it is to be passed on."""
        return x_BI

    def ends(self, mlp: MLP, loss: ClickLoss | None) -> bool:
        """Whether one kernel computes the last layer, its loss and their gradients: `end`, not `forward`."""
        return False

    def end(self, mlp: MLP, activations: list[Tensor], loss: ClickLoss, labels_B: Tensor) -> End | None:
        """The last layer with its loss and their gradients, if one kernel computes them."""
        return None

    def forward(self, mlp: MLP, x_BI: Tensor, *, loss: ClickLoss | None = None) -> list[Tensor]:
        """Return the input and every layer's output; if `loss` follows, perhaps without the last layer's."""
        activations, parameters = [x_BI], mlp.flat
        last = len(parameters) - 2
        for index in range(0, len(parameters), 2):
            x_BI = torch.addmm(parameters[index + 1], x_BI, parameters[index].t())
            if index < last or mlp.last_relu:
                x_BI.relu_()
            activations.append(x_BI)
        return activations

    def backward(
        self, mlp: MLP, gradient: Tensor | End, activations: list[Tensor], *, input_gradient: bool
    ) -> Tensor | None:
        """Add to the parameters' gradients; return the input's gradient if requested."""
        assert isinstance(gradient, Tensor)
        gradient_BO, parameters = gradient, mlp.flat
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
    """Fewer kernels; `low` is the type of the products, `relu` one of the implementations in `ops.mlp`, and `last`, if
    any, that of the last layer.

    With `copies` the products read copies of the weights in a suitable layout, made at every step: the first layer
    padded with zeros to a width that is a multiple of 8, and in tf32, whose fast kernels read both factors along the
    summed dimension only, transposed copies for the backward pass. `rounded`: see `weight_gradient`.
    """

    def __init__(
        self,
        *,
        relu: ModuleType,
        last: ModuleType | None = None,
        low: torch.dtype = torch.float32,
        copies: bool = False,
        rounded: bool = False,
        streams: SideStreams | None = None,
    ) -> None:
        self.relu, self.last, self.low, self.copies, self.rounded = relu, last, low, copies, rounded
        self.streams = streams or SideStreams()
        self._copies: dict[tuple[MLP, torch.device], list[Copies]] = {}
        self._read: dict[MLP, list[Tensor]] = {}
        """What the forward pass of this step reads: parameters or their copies."""
        self._transposed: dict[MLP, list[Tensor | None]] = {}
        self._first: MLP | None = None
        """The MLP that does not wait for the copies of the others."""

    def width(self, features: int) -> int:
        return -(-features // EVEN) * EVEN if self.copies else features

    def begin(self, mlps: Sequence[MLP], x_BI: Tensor | None = None) -> Tensor | None:
        x_BI = self._begin(mlps[0], x_BI)
        # The first MLP begins while the copies of the others are made.
        with self.streams.run_on("copies"):
            for mlp in mlps[1:]:
                self._begin(mlp)
            for mlp in mlps:
                for turned, weight in zip(self._transposed[mlp], mlp.flat):
                    if turned is not None:
                        turned[: weight.shape[1]].copy_(weight.t())
        self._first = mlps[0]
        return x_BI

    def _begin(self, mlp: MLP, x_BI: Tensor | None = None) -> Tensor | None:
        """Copy the parameters of an MLP, and an input that needs another type and no padding."""
        parameters = mlp.flat
        copies = self._copies_of(mlp, parameters)
        pairs: list[tuple[Tensor, Tensor]] = []
        pairs += [(copied, parameter) for parameter, (copied, _) in zip(parameters, copies) if copied is not None]
        if x_BI is not None and x_BI.dtype != self.low and x_BI.shape[1] == self.width(x_BI.shape[1]):
            low_BI = torch.empty_like(x_BI, dtype=self.low)
            pairs.append((low_BI, x_BI))
            x_BI = low_BI
        if pairs:
            body(parameters[0].device).copy([target for target, _ in pairs], [source for _, source in pairs])
        self._read[mlp] = [p if copied is None else copied for p, (copied, _) in zip(parameters, copies)]
        self._transposed[mlp] = [turned for _, turned in copies]
        return x_BI

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

    def ends(self, mlp: MLP, loss: ClickLoss | None) -> bool:
        if self.last is None or loss is None or mlp.last_relu or len(mlp.layers) < 2:
            return False
        outputs, inputs = mlp.flat[-2].shape
        return outputs == 1 and inputs <= WIDEST

    def end(self, mlp: MLP, activations: list[Tensor], loss: ClickLoss, labels_B: Tensor) -> End | None:
        if not self.ends(mlp, loss):
            return None
        assert self.last is not None
        weight_1N, bias_1 = self._read[mlp][-2:]
        end: End = self.last.forward_backward(activations[-1], weight_1N, bias_1, labels_B, loss.kind, loss.weights)
        return end

    def forward(self, mlp: MLP, x_BI: Tensor, *, loss: ClickLoss | None = None) -> list[Tensor]:
        if mlp is not self._first:
            self.streams.join("copies")
        parameters = self._read[mlp]
        x_BI = x_BI.to(self.low)
        if x_BI.shape[1] != parameters[0].shape[1]:
            x_BI = F.pad(x_BI, (0, parameters[0].shape[1] - x_BI.shape[1]))
        activations = [x_BI]
        last = len(parameters) - 2
        for index in range(0, last if self.ends(mlp, loss) else len(parameters), 2):
            weight_OI, bias_O = parameters[index], parameters[index + 1]
            if index < last or mlp.last_relu:
                x_BI = torch._addmm_activation(bias_O, x_BI, weight_OI.t(), use_gelu=False)
            else:
                x_BI = torch.addmm(bias_O, x_BI, weight_OI.t())
            activations.append(x_BI)
        return activations

    def backward(
        self, mlp: MLP, gradient: Tensor | End, activations: list[Tensor], *, input_gradient: bool
    ) -> Tensor | None:
        self.streams.join("copies")
        parameters, read = mlp.flat, self._read[mlp]
        first = len(read) - 2
        gradient_BO, bias_SO = self._below_end(parameters, gradient)
        if bias_SO is not None:
            first -= 2
        for index in range(first, -1, -2):
            layer = index // 2
            if bias_SO is None and (index < len(read) - 2 or mlp.last_relu):
                gradient_BO, bias_SO = self.relu.backward(gradient_BO, activations[layer + 1])
            with self.streams.run_on("biases", gradient_BO if bias_SO is None else bias_SO):
                bias_O = gradient_BO.sum(0, dtype=torch.float32) if bias_SO is None else bias_SO.sum(0)
                add_gradient(parameters[index + 1], bias_O)
            bias_SO, ends = None, index == 0 and not input_gradient
            # The last one has nothing to run beside, and needs no stream of its own.
            with nullcontext() if ends else self.streams.run_on("weights", gradient_BO, activations[layer]):
                gradient_OI = weight_gradient(gradient_BO, activations[layer], rounded=self.rounded)
                add_gradient(parameters[index], gradient_OI[:, : parameters[index].shape[1]].contiguous())
            if ends:
                return None
            turned = self._transposed[mlp][index]
            if index and read[index].shape[0] == 1:
                # A product over one number is a multiplication, which the kernel of the ReLU below does too.
                gradient_BO, bias_SO = self.relu.outer_backward(gradient_BO, read[index], activations[layer])
            elif index and turned is None:
                gradient_BO, bias_SO = self.relu.product_backward(gradient_BO, read[index], activations[layer])
            else:
                gradient_BO = gradient_BO.mm(read[index] if turned is None else turned.t())
        # Without the columns that pad the input.
        return gradient_BO[:, : parameters[0].shape[1]]

    def _below_end(self, parameters: Sequence[Tensor], gradient: Tensor | End) -> tuple[Tensor, Tensor | None]:
        """The gradient that goes down and, below a last layer whose gradients are known, that of the next bias."""
        if isinstance(gradient, Tensor):
            return gradient.to(self.low), None
        with self.streams.run_on("biases", gradient.to_weight_SN, gradient.to_bias_S):
            add_gradient(parameters[-2], gradient.to_weight_SN.sum(0, keepdim=True))
            add_gradient(parameters[-1], gradient.to_bias_S.sum().view(1))
        return gradient.to_input_BN, gradient.to_input_bias_SN
