"""Rows of a table, the sum of gradients that meet in a row, and the update of rows, on a GPU.

The sum cuts the ordered gradients into chunks of equal length, so that a row that half of the batch uses does not
delay the rest: every program adds the part of one row that lies in one chunk. Partial sums are written to memory and
joined by a second kernel. A chunk has at most one row that came in from before and one that begins in it and goes on,
so two places a chunk are enough. The order of every addition is fixed: a repeat gives the same bits.

Shapes: R table rows, D width, N looked-up rows, U distinct rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import ANY, flag, require_tensor
from ..bag.triton import on_device, report
from ..bag.update_kernels import apply_update, load_rows
from ..operators import operator
from ..table_rules import RULES, RuleName

TILE = 4096
"""Elements that a program of four warps holds at a time."""
CHUNK = 128
"""Gradients that one program adds."""
JOINED = 8
"""Parts of a long row that are summed at a time."""


def tile(dim: int, most: int = 32) -> tuple[int, int]:
    """Rows and columns of a tile."""
    width = triton.next_power_of_2(dim)
    return max(1, min(most, TILE // width)), width


@triton.jit
def _gather(table, rows, out, flag, count, known_rows, stride, D, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    row = tl.load(rows + at, mask=at < count, other=0).to(tl.int64)
    known = (row >= 0) & (row < known_rows)
    report(flag, tl.where(known, 0, row), row * 0 + known_rows)
    mask = ((at < count) & known)[:, None] & (columns < D)[None, :]
    tl.store(
        out + at[:, None] * D + columns[None, :],
        tl.load(table + row[:, None] * stride + columns[None, :], mask=mask, other=0.0),
        mask=(at < count)[:, None] & (columns < D)[None, :],
    )


def _require_places(name: str, rows: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    kind = torch.int32 if rows.dtype == torch.int32 else torch.int64
    require_tensor(name, rows.contiguous(), kind, shape, device)


@operator("gather_rows", rows=lambda table_RD, rows_N: (table_RD, rows_N))
def gather(table_RD: Tensor, rows_N: Tensor) -> Tensor:
    _require_places("rows_N", rows_N, (ANY,), table_RD.device)
    table_RD = table_RD if table_RD.stride(1) == 1 else table_RD.contiguous()
    count, dim = rows_N.numel(), table_RD.shape[1]
    out_ND = torch.empty(count, dim, dtype=table_RD.dtype, device=table_RD.device)
    if count and dim:
        rows, width = tile(dim)
        _gather[(triton.cdiv(count, rows),)](
            table_RD, rows_N.contiguous(), out_ND, flag(table_RD.device), count, table_RD.shape[0], table_RD.stride(0),
            dim, ROWS=rows, WIDTH=width, num_warps=4,
        )  # fmt: skip
    return out_ND


@triton.jit
def _list_parts(starts, owner, parts, U, BITS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """The row that each part is of. Row u has the parts `starts[u] // C + u` and on: one a chunk it may touch."""
    part = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], dtype=tl.int64)
    high = low + U - 1
    for _ in range(BITS):
        middle = (low + high + 1) // 2
        reached = tl.load(starts + middle) // C + middle <= part
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    tl.store(owner + part, low.to(tl.int32), mask=part < parts)


@triton.jit
def _sum_parts(
    grad, order, starts, owner, out, heads, tails, D, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    row = tl.load(owner + part).to(tl.int64)
    start, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    chunk = part - row
    first, last = start // C, tl.maximum(end - 1, start) // C
    if chunk <= last:
        columns = tl.arange(0, WIDTH)
        wide = columns < D
        total = tl.zeros([ROWS, WIDTH], dtype=out.dtype.element_ty)
        upto = tl.minimum(end, (chunk + 1) * C)
        for begin in range(tl.maximum(start, chunk * C), upto, ROWS):
            at = begin + tl.arange(0, ROWS)
            where = tl.load(order + at, mask=at < upto, other=0).to(tl.int64)
            mask = (at < upto)[:, None] & wide[None, :]
            total += tl.load(grad + where[:, None] * D + columns[None, :], mask=mask, other=0.0).to(total.dtype)
        summed = tl.sum(total, 0)
        if first == last:
            tl.store(out + row * D + columns, summed, mask=wide)
        elif chunk == first:
            tl.store(tails + chunk * D + columns, summed, mask=wide)
        else:
            tl.store(heads + chunk * D + columns, summed, mask=wide)


@triton.jit
def _join_parts(
    starts, out, heads, tails, D, C: tl.constexpr, J: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    first, last = start // C, tl.maximum(end - 1, start) // C
    if first < last:
        columns = tl.arange(0, WIDTH)
        wide = columns < D
        total = tl.zeros([J, WIDTH], dtype=out.dtype.element_ty)
        for begin in range(first + 1, last + 1, J):
            chunk = begin + tl.arange(0, J)
            mask = (chunk <= last)[:, None] & wide[None, :]
            total += tl.load(heads + chunk[:, None] * D + columns[None, :], mask=mask, other=0.0)
        opening = tl.load(tails + first * D + columns, mask=wide, other=0.0)
        tl.store(out + row * D + columns, opening + tl.sum(total, 0), mask=wide)


@operator("segment_sum")
def segment_sum(grad_ND: Tensor, order_N: Tensor, starts_U1: Tensor) -> Tensor:
    """Sum of `grad_ND[order_N[starts_U1[u]:starts_U1[u + 1]]]` for each u, in a fixed order; at least float32."""
    kind = torch.promote_types(grad_ND.dtype, torch.float32)
    count, dim, segments = order_N.numel(), grad_ND.shape[1], starts_U1.numel() - 1
    out_UD = torch.empty(segments, dim, dtype=kind, device=grad_ND.device)
    if not count or not out_UD.numel():
        return out_UD.zero_()
    parts, chunks = count // CHUNK + segments, triton.cdiv(count, CHUNK)
    owner = torch.empty(parts, dtype=torch.int32, device=grad_ND.device)
    aside = torch.empty(2, chunks, dim, dtype=kind, device=grad_ND.device)
    _list_parts[(triton.cdiv(parts, 256),)](
        starts_U1, owner, parts, segments, BITS=segments.bit_length(), C=CHUNK, BLOCK=256, num_warps=4
    )
    rows, width = tile(dim)
    _sum_parts[(parts,)](
        grad_ND.contiguous(), order_N, starts_U1, owner, out_UD, aside[0], aside[1], dim,
        C=CHUNK, ROWS=rows, WIDTH=width, num_warps=4,
    )  # fmt: skip
    if chunks > 1:
        _join_parts[(segments,)](
            starts_U1, out_UD, aside[0], aside[1], dim, C=CHUNK, J=JOINED, WIDTH=width, num_warps=4
        )
    return out_UD


@triton.jit
def _update(
    table, state, rows, grad, numbers, flag, count, known_rows, eps, D,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    key = tl.load(rows + at, mask=at < count, other=0).to(tl.int64)
    known = (key >= 0) & (key < known_rows)
    report(flag, tl.where(known, 0, key), key * 0 + known_rows)
    here = (at < count) & known
    columns = tl.arange(0, WIDTH)
    wide = columns < D
    mask = here[:, None] & wide[None, :]
    grads = tl.load(grad + at[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    row, old, old2 = load_rows(table, state, key, here, D, columns, wide, RULE)
    apply_update(table, state, numbers, key, row, old, old2, grads, here, eps, 0.0, D, columns, wide, RULE)


@operator(
    "update_rows",
    updates=True,
    rows=lambda table_RD, state, rows_U, *_, **__: (table_RD, rows_U),
    reads=lambda table_RD, state, rows_U, grad_UD, **_: (rows_U, grad_UD),
)
def update_rows_(
    table_RD: Tensor,
    state: Tensor | None,
    rows_U: Tensor,
    grad_UD: Tensor,
    *,
    rule: RuleName,
    rate: float | Tensor,
    eps: float,
    count: float | Tensor = 1,
) -> None:
    (used, dim), shape = grad_UD.shape, RULES[rule].state_shape(table_RD.shape[0], grad_UD.shape[1])
    # A table that is not contiguous is refused: the update of a copy would be lost.
    require_tensor("table_RD", table_RD, table_RD.dtype, (ANY, dim), table_RD.device)
    if shape is not None:
        assert state is not None, f"{rule} needs a state"
        require_tensor("state", state, state.dtype, shape, table_RD.device)
    _require_places("rows_U", rows_U, (used,), table_RD.device)
    if used and dim:
        rows, width = tile(dim)
        _update[(triton.cdiv(used, rows),)](
            table_RD, state, rows_U.contiguous(), grad_UD.contiguous(),
            on_device(RULES[rule].numbers(rate, count), table_RD), flag(table_RD.device), used, table_RD.shape[0],
            eps, dim, ROWS=rows, WIDTH=width, RULE=rule, num_warps=4,
        )  # fmt: skip
