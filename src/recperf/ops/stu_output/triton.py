"""The output of an STU layer on a GPU: torch's matrix products and one kernel for all the rest in each direction.

Forward, a kernel reads the attention and u once and writes z: [silu(u) ; attention ; silu(u) * norm(attention)] after
dropout. Backward, a kernel turns the gradient of z into those of the attention and of u; it has at hand all that z is
made of, so it also writes z again, over its gradient: the product for the weight's gradient needs it, and only two
numbers per row are saved from the forward pass. Which elements dropout keeps is computed again too.

Shapes: T tokens, D model width, E attention width, 3E the concatenation, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...measure.native_calls import operator
from ..dropout import Dropout
from ..dropout import triton as dropping
from ..dropout.triton import factors, row_words
from ..layer_norm import triton as norm
from ..layer_norm.triton import before_standard, standardised
from ..products import product, weight_gradient

FORWARD, BACKWARD = (512, 512), (256, 256)
"""Columns of a row that one warp takes, and elements of a tensor that it holds: as many as its registers allow."""


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
    if tokens:
        width, rows, warps = norm.tile(columns, FORWARD)
        _gate[(triton.cdiv(tokens, rows),)](
            attention_TE, u_TE, norm_weight_E.contiguous(), norm_bias_E.contiguous(), z_T3E, stats_2T, tokens, columns,
            attention_TE.stride(0), u_TE.stride(0), eps,
            ROWS=rows, WIDTH=width, num_warps=warps, **dropping.arguments(dropout),
        )  # fmt: skip
    return z_T3E, stats_2T


def forward(
    attention_TE: Tensor,
    u_TE: Tensor,
    x_TD: Tensor,
    norm_weight_E: Tensor,
    norm_bias_E: Tensor,
    weight_3ED: Tensor,
    eps: float,
    dropout: Dropout,
) -> tuple[Tensor, Tensor]:
    """The residual plus the map of what was gated, in the type of x, and the statistics for the backward pass."""
    z_T3E, stats_2T = gated(attention_TE, u_TE, norm_weight_E, norm_bias_E, eps, dropout)
    return product(z_T3E.to(x_TD.dtype), weight_3ED, x_TD), stats_2T


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
        tl.store(du + row[:, None] * du_stride + column[None, :], draw, mask=inside)
    share = shares + tl.program_id(0).to(tl.int64) * 2 * E + column
    tl.store(share, dweight, mask=column < E)
    tl.store(share + E, dbias, mask=column < E)


def backward(
    grad_TD: Tensor,
    attention_TE: Tensor,
    u_TE: Tensor,
    norm_weight_E: Tensor,
    norm_bias_E: Tensor,
    weight_3ED: Tensor,
    stats_2T: Tensor,
    eps: float,
    dropout: Dropout,
    *,
    into_u: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the attention, of u (written into `into_u` if set), of the norm's weight and bias, of the map.

    That of x is `grad_TD` itself.
    """
    attention_TE, u_TE = norm.dense_rows(attention_TE), norm.dense_rows(u_TE)
    tokens, columns = attention_TE.shape
    dattention_TE = torch.empty(tokens, columns, dtype=attention_TE.dtype, device=attention_TE.device)
    du_TE = into_u if into_u is not None else torch.empty(tokens, columns, dtype=u_TE.dtype, device=u_TE.device)
    assert du_TE.stride(-1) == 1, "the gradient of u is written row by row"
    dz_T3E = product(grad_TD, weight_3ED.t())
    width, rows, warps = norm.tile(columns, BACKWARD)
    programs, stretch = norm.stretches(tokens, rows)
    shares_P2E = torch.empty(programs, 2, columns, dtype=torch.float32, device=attention_TE.device)
    if tokens:
        _backward[(programs,)](
            dz_T3E, attention_TE, u_TE, norm_weight_E.contiguous(), norm_bias_E.contiguous(), stats_2T, dattention_TE,
            du_TE, shares_P2E, tokens, columns, stretch, attention_TE.stride(0), u_TE.stride(0), du_TE.stride(0),
            ROWS=rows, WIDTH=width, num_warps=warps, **dropping.arguments(dropout),
        )  # fmt: skip
    z_T3E = dz_T3E
    sums_2E = shares_P2E.sum(0)
    return dattention_TE, du_TE, sums_2E[0], sums_2E[1], weight_gradient(z_T3E, grad_TD)
