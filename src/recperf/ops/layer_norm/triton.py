"""Layer normalisation on a GPU: rows are read once in each direction.

A warp, or a few where rows are wide, takes whole rows, so that their sums need no second pass. In the backward pass a
program walks over a stretch of rows and keeps its share of the parameters' gradients in registers; the shares are added
in order, so that a repeat gives the same bits. How rows are shared out depends on shapes alone, not on the machine.

Shapes: T rows, D or F columns, P programs, S stretches of rows; stats_2T holds the mean and 1 / standard deviation of
every row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator

PROGRAMS = 8192
"""Most programs of a backward pass: several times what a GPU runs at once, so that the last to finish matter little."""
WIDEST = 4096
FORWARD, BACKWARD = (512, 1024), (512, 512)
"""Columns of a row that one warp takes, and elements of a tensor that it holds: as many as its registers allow."""
ROWS, COLUMNS, STRETCHES = 16, 256, 1024
"""The tile that a program of the column sum takes at a time, and most stretches of rows."""


def tile(columns: int, of_a_warp: tuple[int, int]) -> tuple[int, int, int]:
    """Columns padded, rows side by side and warps of a program."""
    share, elements = of_a_warp
    if columns > WIDEST:
        raise ValueError(f"rows of {columns} are too wide for the kernels, which take {WIDEST}")
    width = triton.next_power_of_2(columns)
    warps = max(1, min(8, width // share))
    return width, max(1, min(32, elements * warps // width)), warps


def stretches(tokens: int, rows: int) -> tuple[int, int]:
    """Programs and the rows that each walks over, a multiple of those it takes at a time."""
    stretch = rows * max(1, triton.cdiv(tokens, rows * PROGRAMS))
    return triton.cdiv(tokens, stretch), stretch


def dense_rows(x_TD: Tensor) -> Tensor:
    """As it is where the numbers of a row lie together."""
    return x_TD if x_TD.stride(-1) == 1 or x_TD.shape[-1] <= 1 else x_TD.contiguous()


def _dense(weight_D: Tensor | None) -> Tensor | None:
    return None if weight_D is None else weight_D.contiguous()


@triton.jit
def standardised(value, inside, eps, D):
    """Rows of mean 0 and variance 1, the mean, and 1 / standard deviation; 0 outside."""
    mean = tl.sum(value, 1) / D
    centred = tl.where(inside, value - mean[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
    return centred * spread[:, None], mean, spread


@triton.jit
def before_standard(grad, standard, spread, D):
    """The gradient before the standardisation from the one after it."""
    mean = tl.sum(grad, 1) / D
    along = tl.sum(grad * standard, 1) / D
    return (grad - mean[:, None] - standard * along[:, None]) * spread[:, None]


@triton.jit(do_not_specialize=["T"])
def _forward(
    x, weight, bias, out, stats, T, D, x_stride, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SWISH: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < T)[:, None] & (column < D)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    normed, mean, spread = standardised(value, inside, eps, D)
    if WEIGHTED:
        w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        b = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
        normed = normed * w[None, :] + b[None, :]
    if SWISH:
        normed = value * tl.sigmoid(normed)
    tl.store(out + row[:, None] * D + column[None, :], normed, mask=inside)
    tl.store(stats + row, mean, mask=row < T)
    tl.store(stats + T + row, spread, mask=row < T)


@operator("layer_norm_forward")
def forward(
    x_TD: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float, *, swish: bool = False,
    kind: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The normed rows, or x * sigmoid(of them), and the statistics that the backward pass wants."""
    x_TD = dense_rows(x_TD)
    tokens, columns = x_TD.shape
    out_TD = torch.empty(tokens, columns, dtype=kind or x_TD.dtype, device=x_TD.device)
    stats_2T = torch.empty(2, tokens, dtype=torch.float32, device=x_TD.device)
    if tokens:
        width, rows, warps = tile(columns, FORWARD)
        _forward[(triton.cdiv(tokens, rows),)](
            x_TD, _dense(weight_D), _dense(bias_D), out_TD, stats_2T, tokens, columns, x_TD.stride(0), eps,
            ROWS=rows, WIDTH=width, SWISH=swish, WEIGHTED=weight_D is not None, num_warps=warps,
        )  # fmt: skip
    return out_TD, stats_2T


@triton.jit(do_not_specialize=["T", "stretch"])
def _backward(
    grad, x, weight, bias, stats, residual, dx, shares, T, D, stretch, grad_stride, x_stride, residual_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SWISH: tl.constexpr, RESIDUAL: tl.constexpr, AGAIN: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * stretch
    column = tl.arange(0, WIDTH)
    w = tl.full([WIDTH], 1.0, dtype=tl.float32)
    b = tl.zeros([WIDTH], dtype=tl.float32)
    if WEIGHTED:
        w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        b = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    dweight = tl.zeros([WIDTH], dtype=tl.float32)
    dbias = tl.zeros([WIDTH], dtype=tl.float32)
    for turn in range(0, stretch, ROWS):
        row = begin + turn + tl.arange(0, ROWS)
        inside = (row < T)[:, None] & (column < D)[None, :]
        place = grad + row[:, None] * grad_stride + column[None, :]
        slope = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        direct = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        if RESIDUAL:
            at = residual + row[:, None] * residual_stride + column[None, :]
            direct = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(stats + row, mask=row < T, other=0.0)
        spread = tl.load(stats + T + row, mask=row < T, other=0.0)
        standard = tl.where(inside, (value - mean[:, None]) * spread[:, None], 0.0)
        normed = standard * w[None, :] + b[None, :]
        if SWISH:
            gate = tl.sigmoid(normed)
            direct += slope * gate
            slope = slope * value * gate * (1.0 - gate)
        if WEIGHTED:
            dweight += tl.sum(slope * standard, 0)
            dbias += tl.sum(slope, 0)
        before = before_standard(slope * w[None, :], standard, spread, D) + direct
        tl.store(dx + row[:, None] * D + column[None, :], before, mask=inside)
        if AGAIN:
            # Every gradient of these rows has been read by now, by whichever thread.
            tl.debug_barrier()
            tl.store(place, normed, mask=inside)
    if WEIGHTED:
        share = shares + tl.program_id(0).to(tl.int64) * 2 * D + column
        tl.store(share, dweight, mask=column < D)
        tl.store(share + D, dbias, mask=column < D)


@operator("layer_norm_backward")
def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    stats_2T: Tensor,
    *,
    swish: bool = False,
    residual_TD: Tensor | None = None,
    again: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x (with the residual's added), and of weight and bias if there are any. With `again`, which is eps,
    the normed rows overwrite the gradient."""
    x_TD = dense_rows(x_TD)
    assert again is None or (grad_TD.stride(-1) == 1 and grad_TD.dtype == x_TD.dtype), (
        "the normed rows need their place"
    )
    grad_TD = dense_rows(grad_TD)
    residual_TD = residual_TD if residual_TD is None else dense_rows(residual_TD)
    tokens, columns = x_TD.shape
    dx_TD = torch.empty(tokens, columns, dtype=x_TD.dtype, device=x_TD.device)
    width, rows, warps = tile(columns, BACKWARD)
    programs, stretch = stretches(tokens, rows)
    weighted = weight_D is not None
    shares_P2D = torch.empty(programs if weighted else 0, 2, columns, dtype=torch.float32, device=x_TD.device)
    if tokens:
        _backward[(programs,)](
            grad_TD, x_TD, _dense(weight_D), _dense(bias_D), stats_2T, residual_TD, dx_TD, shares_P2D,
            tokens, columns, stretch, grad_TD.stride(0), x_TD.stride(0),
            0 if residual_TD is None else residual_TD.stride(0),
            ROWS=rows, WIDTH=width, SWISH=swish, RESIDUAL=residual_TD is not None, AGAIN=again is not None,
            WEIGHTED=weighted, num_warps=warps,
        )  # fmt: skip
    if not weighted:
        return dx_TD, None, None
    sums_2D = shares_P2D.sum(0)
    return dx_TD, sums_2D[0], sums_2D[1]


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
    x_TF = dense_rows(x_TF)
    tokens, columns = x_TF.shape
    stretch = ROWS * max(1, triton.cdiv(tokens, ROWS * STRETCHES))
    stretches = triton.cdiv(tokens, stretch)
    shares_SF = torch.empty(stretches, columns, dtype=torch.float32, device=x_TF.device)
    if tokens:
        _column_sums[(triton.cdiv(columns, COLUMNS), stretches)](
            x_TF, shares_SF, tokens, columns, stretch, x_TF.stride(0), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )
    return shares_SF.sum(0)
