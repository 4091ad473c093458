"""The training step of a small DLRM in one call of C: torch's operators take longer to call than to compute.

Shapes: N samples, B samples of a batch, F features, R rows of all tables, D width of a row.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from ...errors import ArgumentError
from ...measure.native_calls import operator
from ..arguments import ANY, address, unknown_id
from ..compile import I64, POINTER, native_library, usable
from . import reference
from .reference import MOST_LAYERS, Network, TrainingRows

PARTS = (
    "data", "bottom", "embedding", "interaction", "top", "loss", "top_backward", "interaction_backward",
    "embedding_backward", "bottom_backward", "update",
)  # fmt: skip
"""The spans whose times C reports, in its order."""
ADAMW_FLOPS = 12
"""Of an element: two moments, a square root, a division, the decay and the update."""
LOSSES = 1024
"""Losses of the latest steps that are kept: far more than wait to be logged at any time."""
F64 = ctypes.c_double


class _Training(ctypes.Structure):
    """The arguments that all steps have in common."""

    _fields_ = (
        *[(name, POINTER) for name in ("sizes", "tensors", "scratch", "steps")],
        *[(name, POINTER) for name in ("dense_ND", "labels_N", "ids", "order_N")],
        *[(name, I64) for name in ("by_feature", "by_sample")],
        *[(name, F64) for name in ("decay", "table_decay", "beta1", "beta2", "eps")],
    )  # fmt: skip


library = native_library(
    __file__,
    {
        "scratch_floats": [POINTER],
        "dlrm_step": [POINTER, I64, I64, F64, POINTER, POINTER, POINTER],
    },
    {"scratch_floats": I64, "dlrm_step": I64},
)
"""Returns the compiled library, or the reason why it cannot be used."""


def problem(network: Network) -> str | None:
    """What C cannot do of a network; None if it serves it."""
    tensors = [*network.parameters, *network.means, *network.squares, network.steps]
    if any(not tensor.is_cpu or tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in tensors):
        return "a tensor is not contiguous float32 in CPU memory"
    if max(len(network.bottom), len(network.top)) > 2 * MOST_LAYERS:
        return f"an MLP has more than {MOST_LAYERS} layers"
    return None


class Step:
    """The addresses of all tensors are checked once: nothing may replace them afterwards."""

    def __init__(self, network: Network, samples: TrainingRows, order_N: Tensor) -> None:
        if (lack := problem(network)) is not None:
            raise ArgumentError(lack)
        self.network, self.samples, self.order_N = network, samples, order_N
        count, features, ids_FN = samples.labels_N.numel(), len(network.rows), samples.ids_FN
        bottom, top, dim = widths(network.bottom), widths(network.top), network.table_RD.shape[1]
        _require_shapes(network, bottom, top)
        if not ids_FN.is_cpu or ids_FN.dtype != torch.int64 or ids_FN.shape != (features, count):
            raise ArgumentError(f"ids_FN must be int64 of shape ({features}, {count}) in CPU memory")
        order = address("order_N", order_N, torch.int64, (ANY,))
        if order_N.numel() and not 0 <= int(order_N.min()) <= int(order_N.max()) < count:
            raise ArgumentError(f"order_N has a number outside of the {count} samples")
        numbers = features, dim, len(bottom) - 1, len(top) - 1, int(network.dot), int(network.diagonal)
        self._sizes = _array(I64, *numbers, *bottom, *top, *network.rows)
        states = zip(network.parameters, network.means, network.squares, strict=True)
        *layers, table = ([address("parameter", one, torch.float32, all_[0].shape) for one in all_] for all_ in states)
        self._tensors = _array(POINTER, *table, *(place for three in layers for place in three))
        body = usable(library())
        floats = body.scratch_floats(self._sizes)
        if floats < 0:
            raise ArgumentError(f"C has no room for MLPs of {len(bottom) - 1} and {len(top) - 1} layers")
        self._call, self._scratch = body.dlrm_step, torch.zeros(floats)
        self.table_gradient = self._scratch[: network.table_RD.numel()]
        self._fixed = _Training(
            ctypes.addressof(self._sizes), ctypes.addressof(self._tensors), self._scratch.data_ptr(),
            address("steps", network.steps, torch.float32, ()),
            address("dense_ND", samples.dense_ND, torch.float32, (count, bottom[0])),
            address("labels_N", samples.labels_N, torch.float32, (count,)),
            ids_FN.data_ptr(), order, *ids_FN.stride(), *network.decays, *network.betas, network.eps,
        )  # fmt: skip
        self._at = ctypes.addressof(self._fixed)
        # Torch takes longer to make a tensor than Python to find one.
        losses_N = torch.zeros(LOSSES)
        self._losses = list(zip(losses_N.unbind(), range(losses_N.data_ptr(), losses_N.data_ptr() + 4 * LOSSES, 4)))
        self._step_count = 0

    def __call__(
        self, first: int, last: int, *, rate: float, norm: bool = False, times: dict[str, int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Train on the samples first..last of the order: returns the loss and, if asked, the gradient's norm.

        The loss is overwritten after as many steps as `LOSSES`. The times of the step's parts, in ns, are added to
        `times`.
        """
        return _step(self, first, last, rate, norm, times)

    def run(
        self, first: int, last: int, rate: float, norm: bool, times: dict[str, int] | None
    ) -> tuple[Tensor, Tensor | None]:
        if not 0 <= first < last <= self.order_N.numel():
            raise ArgumentError(f"samples {first} to {last} are not in an order of {self.order_N.numel()}")
        loss, to_loss = self._losses[self._step_count % LOSSES]
        length = torch.empty(()) if norm else None
        to_norm = None if length is None else length.data_ptr()
        clock: Any = None if times is None else (I64 * (len(PARTS) + 1))()
        fault = self._call(self._at, first, last, rate, to_loss, to_norm, clock)
        if fault != -1:
            place, feature = divmod(fault, len(self.network.rows))
            row = int(self.order_N[first + place])
            value, rows = int(self.samples.ids_FN[feature, row]), self.network.rows[feature]
            raise unknown_id(f"ids_FN[{feature}]", row, value, rows)
        self._step_count += 1
        if times is not None:
            times.update((part, times.get(part, 0) + ns) for part, ns in zip(PARTS, clock))
        return loss, length


def widths(layers: list[Tensor]) -> list[int]:
    """The widths of an MLP from its weights and biases, the input first."""
    return [layers[0].shape[1], *(bias.numel() for bias in layers[1::2])]


def _require_shapes(network: Network, bottom: list[int], top: list[int]) -> None:
    """Fail unless the parameters are those of a DLRM."""
    features, dim = len(network.rows), network.table_RD.shape[1]
    for mlp, layers in ((bottom, network.bottom), (top, network.top)):
        shapes = [shape for i, o in zip(mlp, mlp[1:]) for shape in ((o, i), (o,))]
        if [tuple(layer.shape) for layer in layers] != shapes:
            raise ArgumentError("weights and biases of an MLP do not fit each other")
    pairs = features * (features + 1) // 2 + (features + 1 if network.diagonal else 0)
    needed = dim + pairs if network.dot else bottom[-1] + features * dim
    if top[0] != needed or top[-1] != 1 or (network.dot and bottom[-1] != dim):
        raise ArgumentError(f"the top MLP goes from {top[0]} to {top[-1]}; it must go from {needed} to 1")
    if network.table_RD.shape[0] != sum(network.rows):
        raise ArgumentError(f"table_RD has {network.table_RD.shape[0]} rows; its tables have {sum(network.rows)}")


def _array(kind: Any, *values: Any) -> Any:
    return (kind * len(values))(*values)


def _rows(step: Step, first: int, last: int, *_: Any) -> tuple[Tensor, Tensor]:
    """The table, and the rows of it that a batch uses."""
    starts_F1 = torch.tensor([sum(step.network.rows[:feature]) for feature in range(len(step.network.rows))])[:, None]
    return step.network.table_RD, (step.samples.ids_FN[:, step.order_N[first:last]] + starts_F1).reshape(-1)


def _changed(step: Step, *_: Any) -> tuple[Any, ...]:
    """What AdamW reads and writes as a whole, whatever the batch: also the table's gradient, which it clears."""
    network = step.network
    return network.parameters, network.means, network.squares, step.table_gradient


def _flops(step: Step, first: int, last: int, *_: Any) -> int:
    """Products of the forward and backward pass (the first layer has no input gradient), and AdamW's arithmetic."""
    network = step.network
    weights = [*network.bottom[::2], *network.top[::2]]
    products = 2 * (last - first) * (3 * sum(weight.numel() for weight in weights) - weights[0].numel())
    return products + ADAMW_FLOPS * sum(parameter.numel() for parameter in network.parameters)


@operator(
    "dlrm_step",
    rows=_rows,
    reads=lambda *_: (),
    changes=_changed,
    flops=_flops,
    special=lambda step, first, last, *_: 2 * (last - first),
    updates=True,
)
def _step(
    step: Step, first: int, last: int, rate: float, norm: bool, times: dict[str, int] | None
) -> tuple[Tensor, Tensor | None]:
    return step.run(first, last, rate, norm, times)


def self_check() -> None:
    """Take two steps of a tiny network; raises where a result differs from the reference."""
    samples = TrainingRows(
        dense_ND=torch.linspace(-1, 1, 15).view(5, 3), ids_FN=torch.tensor([[0, 1, 1, 0, 1], [2, 0, 1, 2, 2]]),
        labels_N=torch.tensor([0.0, 1, 1, 0, 1]),
    )  # fmt: skip
    results = []
    for body in (Step, reference.Step):
        sizes = ((2, 3), (2,)), ((3, 6), (3,), (1, 3), (1,))
        bottom, top = ([torch.linspace(-1, 1, 18)[: math.prod(s)].view(s).clone() for s in mlp] for mlp in sizes)
        table_RD = torch.linspace(-1, 2, 10).view(5, 2)
        parameters = [*bottom, *top, table_RD]
        network = Network(
            rows=(2, 3), bottom=bottom, top=top, table_RD=table_RD, steps=torch.zeros(()), decays=(0.1, 0.2),
            means=[torch.zeros_like(one) for one in parameters], squares=[torch.zeros_like(one) for one in parameters],
        )  # fmt: skip
        step = body(network, samples, torch.tensor([2, 4, 0, 1, 3]))
        results.append(([step(1, 5, rate=0.1, norm=True) for _ in range(2)], parameters))
    assert_close(*results)
