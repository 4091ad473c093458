"""The input of an STU layer on a GPU: torch's matrix products and one kernel for the norm in each direction.

The backward kernel reads x anyway, so it also writes the normed rows again, over the gradient that it has just used:
the product for the weight's gradient needs them, and nothing else is saved from the forward pass.

Shapes: T tokens, D model width, F outputs of the map, S stretches of tokens; stats_2T holds the mean and 1 / standard
deviation of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_norm import triton as norm
from ..operators import operator
from ..products import product, weight_gradient

ROWS, COLUMNS, STRETCHES = 16, 256, 1024
"""The tile that a program of the column sum takes at a time, and most stretches of rows."""


def forward(
    x_TD: Tensor, norm_weight_D: Tensor, norm_bias_D: Tensor, weight_DF: Tensor, bias_F: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The mapped rows, in the type of x, and the statistics that the backward pass needs."""
    normed_TD, stats_2T = norm.forward(x_TD, norm_weight_D, norm_bias_D, eps)
    return product(normed_TD, weight_DF, bias_F), stats_2T


def backward(
    grad_TF: Tensor,
    x_TD: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    weight_DF: Tensor,
    stats_2T: Tensor,
    eps: float,
    *,
    residual_TD: Tensor | None = None,
    dbias_F: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (with the residual's added), of the norm's weight and bias, and of the map's.

    That of the map's bias is `dbias_F` where the caller has it already: it saves reading the gradient once more.
    """
    grad_TF = grad_TF.to(x_TD.dtype)
    dnormed_TD = product(grad_TF, weight_DF.t())
    dx_TD, dnorm_weight_D, dnorm_bias_D = norm.backward(
        dnormed_TD, x_TD, norm_weight_D, norm_bias_D, stats_2T, residual_TD=residual_TD, again=True
    )
    normed_TD = dnormed_TD
    dbias_F = column_sums(grad_TF) if dbias_F is None else dbias_F
    return dx_TD, dnorm_weight_D, dnorm_bias_D, weight_gradient(normed_TD, grad_TF), dbias_F


@triton.jit(do_not_specialize=["T", "stretch"])
def _column_sums(x, shares, T, F, stretch, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    begin = tl.program_id(1).to(tl.int64) * stretch
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for turn in range(0, stretch, ROWS):
        row = begin + turn + tl.arange(0, ROWS)
        inside = (row < T)[:, None] & (column < F)[None, :]
        total += tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    place = shares + tl.program_id(1).to(tl.int64) * F + column
    tl.store(place, tl.sum(total, 0), mask=column < F)


@operator("column_sums")
def column_sums(x_TF: Tensor) -> Tensor:
    """Of every column, in float32 and in a fixed order."""
    x_TF = norm.dense_rows(x_TF)
    tokens, columns = x_TF.shape
    stretch = ROWS * max(1, triton.cdiv(tokens, ROWS * STRETCHES))
    stretches = triton.cdiv(tokens, stretch)
    shares_SF = torch.empty(stretches, columns, dtype=torch.float32, device=x_TF.device)
    if tokens:
        _column_sums[(triton.cdiv(columns, COLUMNS), stretches)](
            x_TF, shares_SF, tokens, columns, stretch, x_TF.stride(0), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )
    return shares_SF.sum(0)
