"""What an STU layer's output does around its matrix products, on a GPU: one kernel in each direction.

Forward, a kernel reads the attention and u once and writes z: [silu(u) ; attention ; silu(u) * norm(attention)] after
dropout. Backward, a kernel turns the gradient of z into those of the attention and of u; it has at hand all that z is
made of, so it also writes z again, over its gradient: the product for the weight's gradient needs it, and only two
numbers per row are saved from the forward pass. Which elements dropout keeps is computed again too.

On NVIDIA GPUs the kernels of gate.cu serve half-precision rows of 256 or 512: there a warp loads its next row while it
computes this one, which Triton does not do where rows are overwritten.

Shapes: T tokens, D model width, E attention width, 3E the concatenation, P programs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import cuda
from ..dropout import Dropout
from ..dropout import triton as dropping
from ..dropout.triton import factors, row_words
from ..layer_norm import triton as norm
from ..layer_norm.triton import before_standard, standardised
from ..operators import operator

FORWARD, BACKWARD = (512, 512), (256, 256)
"""Columns of a row that one warp takes, and elements of a tensor that it holds: as many as its registers allow."""
SOURCE, WARPS, PROGRAMS = Path(__file__).with_name("gate.cu"), 4, 4096
"""Of gate.cu: warps of a program, and most programs, each of which has a share of the parameters' gradients."""


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype, columns: int, drop: bool) -> dict[str, cuda.Kernel] | None:
    """Those of gate.cu, where they serve."""
    if device.type != "cuda" or torch.version.hip is not None or columns not in (256, 512):
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    options = [f"-DCOLUMNS={columns}", *["-DDROP"] * drop, *["-DFLOAT16"] * (dtype == torch.float16)]
    entries = {
        "gate": cuda.Entry("PPPPPPqqqfPIIIf", 32 * WARPS),
        "gate_backward": cuda.Entry("PPPPPPPPPqqqqPIIIf", 32 * WARPS),
    }
    instead = "gates use kernels that are slower on this GPU"
    return cuda.load(SOURCE, device, *options, entries=entries, instead=instead)


def _kernel(name: str, dropout: Dropout, *rows: Tensor) -> cuda.Kernel | None:
    """A kernel of gate.cu if it can read and write all of these."""
    aligned = all(one.stride(0) % 8 == 0 and one.data_ptr() % 16 == 0 and one.dtype == rows[0].dtype for one in rows)
    loaded = _kernels(rows[0].device, rows[0].dtype, rows[0].shape[1], dropout.rate > 0.0) if aligned else None
    return loaded[name] if loaded else None


def _dropping(dropout: Dropout) -> tuple[Tensor | float | None, ...]:
    return (dropout.rows_T, *(dropout.keys if dropout.rate else (0, 0)), dropout.threshold, dropout.scale)


@triton.jit(do_not_specialize=["T", "first", "second", "threshold"])
def _gate(
    attention, u, weight, bias, z, stats, T, E, attention_stride, u_stride, eps,
    numbers, first, second, threshold, scale,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DROP: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < T)[:, None] & (column < E)[None, :]
    value = tl.load(attention + row[:, None] * attention_stride + column[None, :], mask=inside, other=0.0)
    raw = tl.load(u + row[:, None] * u_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < E, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=column < E, other=0.0).to(tl.float32)
    value = value.to(tl.float32)
    standard, mean, spread = standardised(value, inside, eps, E)
    gate = raw * tl.sigmoid(raw)
    gated = gate * (standard * w[None, :] + b[None, :])
    if DROP:
        one, two = row_words(row, numbers, row < T, first, second, LISTED)
        gate *= factors(column, one, two, threshold, scale)
        value *= factors(column + E, one, two, threshold, scale)
        gated *= factors(column + 2 * E, one, two, threshold, scale)
    place = z + row[:, None] * (3 * E) + column[None, :]
    tl.store(place, gate, mask=inside)
    tl.store(place + E, value, mask=inside)
    tl.store(place + 2 * E, gated, mask=inside)
    tl.store(stats + row, mean, mask=row < T)
    tl.store(stats + T + row, spread, mask=row < T)


@operator("gate_forward")
def gated(
    attention_TE: Tensor, u_TE: Tensor, norm_weight_E: Tensor, norm_bias_E: Tensor, eps: float, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """What the map is applied to, and the statistics of the attention's rows."""
    attention_TE, u_TE = norm.dense_rows(attention_TE), norm.dense_rows(u_TE)
    tokens, columns = attention_TE.shape
    z_T3E = torch.empty(tokens, 3 * columns, dtype=attention_TE.dtype, device=attention_TE.device)
    stats_2T = torch.empty(2, tokens, dtype=torch.float32, device=attention_TE.device)
    weight_E, bias_E = norm_weight_E.contiguous(), norm_bias_E.contiguous()
    if tokens and (kernel := _kernel("gate", dropout, attention_TE, u_TE, z_T3E)):
        kernel(
            min(PROGRAMS, triton.cdiv(tokens, WARPS)), attention_TE, u_TE, weight_E.float(), bias_E.float(), z_T3E,
            stats_2T, tokens, attention_TE.stride(0), u_TE.stride(0), eps, *_dropping(dropout),
        )  # fmt: skip
    elif tokens:
        width, rows, warps = norm.tile(columns, FORWARD)
        _gate[(triton.cdiv(tokens, rows),)](
            attention_TE, u_TE, weight_E, bias_E, z_T3E, stats_2T, tokens, columns,
            attention_TE.stride(0), u_TE.stride(0), eps,
            ROWS=rows, WIDTH=width, num_warps=warps, **dropping.arguments(dropout),
        )  # fmt: skip
    return z_T3E, stats_2T


@triton.jit(do_not_specialize=["T", "stretch", "first", "second", "threshold"])
def _backward(
    dz, attention, u, weight, bias, stats, dattention, du, shares, T, E, stretch,
    attention_stride, u_stride, du_stride, numbers, first, second, threshold, scale,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DROP: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * stretch
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, mask=column < E, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + column, mask=column < E, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([WIDTH], dtype=tl.float32)
    dbias = tl.zeros([WIDTH], dtype=tl.float32)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for turn in range(0, stretch, ROWS):
        row = begin + turn + tl.arange(0, ROWS)
        inside = (row < T)[:, None] & (column < E)[None, :]
        place = dz + row[:, None] * (3 * E) + column[None, :]
        dgate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        dvalue = tl.load(place + E, mask=inside, other=0.0).to(tl.float32)
        dgated = tl.load(place + 2 * E, mask=inside, other=0.0).to(tl.float32)
        at = attention + row[:, None] * attention_stride + column[None, :]
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        raw = tl.load(u + row[:, None] * u_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(stats + row, mask=row < T, other=0.0)
        spread = tl.load(stats + T + row, mask=row < T, other=0.0)
        standard = tl.where(inside, (value - mean[:, None]) * spread[:, None], 0.0)
        normed = standard * w + b
        sigmoid = tl.sigmoid(raw)
        gate = raw * sigmoid
        z_gate, z_value, z_gated = gate, value, gate * normed
        if DROP:
            one, two = row_words(row, numbers, row < T, first, second, LISTED)
            factor = factors(column, one, two, threshold, scale)
            z_gate, dgate = z_gate * factor, dgate * factor
            factor = factors(column + E, one, two, threshold, scale)
            z_value, dvalue = z_value * factor, dvalue * factor
            factor = factors(column + 2 * E, one, two, threshold, scale)
            z_gated, dgated = z_gated * factor, dgated * factor
        # Every gradient of these rows has been read by now, by whichever thread: z takes their place.
        tl.debug_barrier()
        tl.store(place, z_gate, mask=inside)
        tl.store(place + E, z_value, mask=inside)
        tl.store(place + 2 * E, z_gated, mask=inside)
        dgate += dgated * normed
        dnormed = dgated * gate
        dweight += tl.sum(dnormed * standard, 0)
        dbias += tl.sum(dnormed, 0)
        before = before_standard(dnormed * w, standard, spread, E) + dvalue
        tl.store(dattention + row[:, None] * E + column[None, :], before, mask=inside)
        draw = dgate * (sigmoid + gate * (1.0 - sigmoid))
        total += tl.sum(tl.where(inside, draw, 0.0), 0)
        tl.store(du + row[:, None] * du_stride + column[None, :], draw, mask=inside)
    share = shares + tl.program_id(0).to(tl.int64) * 3 * E + column
    tl.store(share, dweight, mask=column < E)
    tl.store(share + E, dbias, mask=column < E)
    tl.store(share + 2 * E, total, mask=column < E)


def gated_backward(
    dz_T3E: Tensor, attention_TE: Tensor, u_TE: Tensor, norm_weight_E: Tensor, norm_bias_E: Tensor, stats_2T: Tensor,
    eps: float, dropout: Dropout, *, into_u: Tensor | None, sum_E: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the attention, of u, and of the norm's weight and bias; what the map is applied to overwrites
    `dz_T3E`."""
    attention_TE, u_TE = norm.dense_rows(attention_TE), norm.dense_rows(u_TE)
    dattention_TE = torch.empty(attention_TE.shape, dtype=attention_TE.dtype, device=attention_TE.device)
    du_TE = into_u if into_u is not None else torch.empty(u_TE.shape, dtype=u_TE.dtype, device=u_TE.device)
    assert du_TE.stride(-1) == 1, "the gradient of u is written row by row"
    sums_3E = _gate_backward(
        dz_T3E, attention_TE, u_TE, norm_weight_E.contiguous(), norm_bias_E.contiguous(), stats_2T, dattention_TE,
        du_TE, dropout,
    ).sum(0)  # fmt: skip
    if sum_E is not None:
        sum_E.copy_(sums_3E[2])
    return dattention_TE, du_TE, sums_3E[0], sums_3E[1]


@operator("gate_backward")
def _gate_backward(
    dz_T3E: Tensor, attention_TE: Tensor, u_TE: Tensor, weight_E: Tensor, bias_E: Tensor, stats_2T: Tensor,
    dattention_TE: Tensor, du_TE: Tensor, dropout: Dropout,
) -> Tensor:  # fmt: skip
    """Shares of the gradients of the norm's weight and bias, and of the sum of u's; z overwrites its gradient."""
    tokens, columns = attention_TE.shape
    kernel = _kernel("gate_backward", dropout, attention_TE, u_TE, dz_T3E, dattention_TE, du_TE) if tokens else None
    width, rows, warps = norm.tile(columns, BACKWARD)
    programs, stretch = norm.stretches(tokens, rows)
    if kernel:
        programs = min(PROGRAMS, triton.cdiv(tokens, WARPS))
    shares_P3E = torch.empty(programs, 3, columns, dtype=torch.float32, device=attention_TE.device)
    strides = attention_TE.stride(0), u_TE.stride(0), du_TE.stride(0)
    if kernel:
        kernel(
            programs, dz_T3E, attention_TE, u_TE, weight_E.float(), bias_E.float(), stats_2T, dattention_TE, du_TE,
            shares_P3E, tokens, *strides, *_dropping(dropout),
        )  # fmt: skip
    elif tokens:
        _backward[(programs,)](
            dz_T3E, attention_TE, u_TE, weight_E, bias_E, stats_2T, dattention_TE, du_TE, shares_P3E, tokens, columns,
            stretch, *strides, ROWS=rows, WIDTH=width, num_warps=warps, **dropping.arguments(dropout),
        )  # fmt: skip
    return shares_P3E
