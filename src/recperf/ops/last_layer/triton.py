"""The last layer, its loss and their backward pass in one kernel: a program reads some rows of the input once.

Shapes: B samples, N inputs of the layer, S stripes of samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator
from .reference import End

ELEMENTS = 16_384
"""Numbers of the input that a program holds."""
MOST_ROWS = 16


@triton.jit
def _forward_backward(
    inputs, weight, bias, labels, logits, losses, to_input, to_input_bias, to_weight, to_bias, B, N, negative, positive,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MSE: tl.constexpr,
):  # fmt: skip
    stripe = tl.program_id(0).to(tl.int64)
    row, column = stripe * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < B)[:, None] & (column < N)[None, :]
    place = row[:, None] * N + column[None, :]
    value_in = tl.load(inputs + place, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    label = tl.load(labels + row, mask=row < B, other=0.0)
    logit = tl.sum(value_in * weights[None, :], 1) + tl.load(bias).to(tl.float32)
    probability = 1.0 / (1.0 + tl.exp(-logit))
    if MSE:
        value = (probability - label) * (probability - label)
        slope = 2.0 * (probability - label) * probability * (1.0 - probability)
    else:
        value = tl.maximum(logit, 0.0) - logit * label + tl.log(1.0 + tl.exp(-tl.abs(logit)))
        slope = probability - label
    factor = tl.where(row < B, tl.where(label > 0.5, positive, negative), 0.0) / B
    value, slope = tl.where(row < B, value * factor, 0.0), tl.where(row < B, slope * factor, 0.0)
    gradient = tl.where(value_in > 0, slope[:, None] * weights[None, :], 0.0).to(to_input.dtype.element_ty)
    tl.store(to_input + place, gradient, mask=inside)
    tl.store(logits + row, logit, mask=row < B)
    aside = stripe * N + column
    tl.store(to_input_bias + aside, tl.sum(gradient.to(tl.float32), 0), mask=column < N)
    tl.store(to_weight + aside, tl.sum(slope[:, None] * value_in, 0), mask=column < N)
    tl.store(losses + stripe, tl.sum(value, 0))
    tl.store(to_bias + stripe, tl.sum(slope, 0))


@operator("last_layer", flops=lambda input_BN, *_, **__: 6 * input_BN.numel())
def forward_backward(
    input_BN: Tensor,
    weight_1N: Tensor,
    bias_1: Tensor,
    labels_B: Tensor,
    kind: str,
    weights: tuple[float, float] = (1.0, 1.0),
) -> End:
    """`kind` is bce or mse; `weights` are those of a negative and of a positive sample."""
    batch, inputs = input_BN.shape
    columns = triton.next_power_of_2(inputs)
    rows = max(1, min(MOST_ROWS, ELEMENTS // columns))
    stripes, device = triton.cdiv(batch, rows), input_BN.device
    input_BN, labels_B = input_BN.contiguous(), labels_B.contiguous()
    end = End(
        logits_B=torch.empty(batch, device=device),
        loss_S=torch.empty(stripes, device=device),
        to_input_BN=torch.empty_like(input_BN),
        to_input_bias_SN=torch.empty(stripes, inputs, device=device),
        to_weight_SN=torch.empty(stripes, inputs, device=device),
        to_bias_S=torch.empty(stripes, device=device),
    )
    if batch:
        _forward_backward[(stripes,)](
            input_BN, weight_1N.contiguous(), bias_1, labels_B, end.logits_B, end.loss_S, end.to_input_BN,
            end.to_input_bias_SN, end.to_weight_SN, end.to_bias_S, batch, inputs, float(weights[0]), float(weights[1]),
            ROWS=rows, COLUMNS=columns, MSE=kind == "mse", num_warps=8,
        )  # fmt: skip
    return end
