"""Embedding bags on a GPU: all tables in one launch, and an update that never writes a gradient of the table.

The update sorts the ids of a batch by row (sort.py) and cuts the sorted ids into chunks, for a warp or a few. A row of
ids in one chunk is updated there; partial sums of a row that continues in the next chunk are written to memory and
joined by a second kernel. Sums follow the sorted order, so that a repeat gives the same bits.

Ids from `offsets_B1[-1]` on are ignored: a captured graph has fixed shapes, whatever the number of ids.

Shapes: V ids, B bags, F features, R table rows, D width, C ids a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import ArgumentError
from ..arguments import ANY, flag, require_tensor
from ..hashing import rows_torch
from ..operators import operator
from ..table_rules import RULES, Numbers, RuleName
from . import reference, sort
from .update_kernels import join_chunks, update_chunks

JOINED = 8
"""Chunks of a long row that are summed at a time."""
LOOKED_AT = 32
"""Chunks that a warp searches for rows that continue in the next: most have none."""


@operator("hash_rows")
def hash_rows(ids_V: Tensor, seed: int, rows: int) -> Tensor:
    return rows_torch(ids_V, seed, rows)


@triton.jit
def report(flag, strange, rows):
    """Leave an id outside its table in the flag. `strange` holds such an id or 0, which every table has."""
    most, least = tl.max(strange, 0), tl.min(strange, 0)
    worst = tl.where(most > 0, most, least)
    if worst != 0:
        tl.store(flag, worst)
        tl.store(flag + 1, tl.max(tl.where(strange == worst, rows, 0), 0))


@triton.jit
def table_of(starts, bag, features, bags_a_feature, rows, inside):
    """Where the table of a bag begins in the stack, and how many rows it has."""
    feature = bag // bags_a_feature
    start = tl.load(starts + feature, mask=inside, other=0)
    return start, tl.load(starts + feature + 1, mask=inside & (feature + 1 < features), other=rows) - start


@triton.jit
def _sum_bags(
    table, ids, offsets, starts, out, flag, features, bags_a_feature, rows, D,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0)
    begin, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
    columns = tl.arange(0, WIDTH)
    wide = columns < D
    lanes = tl.arange(0, ROWS)
    own = tl.zeros([1], dtype=tl.int64) + rows
    if STACKED:
        this = bag + tl.arange(0, 1)
        start, own = table_of(starts, this, features, bags_a_feature, rows, this >= 0)
        table += tl.sum(start, 0) * D
    total = tl.zeros([WIDTH], dtype=tl.float32)
    strange = tl.zeros([ROWS], dtype=tl.int64)
    for first in range(begin, end, ROWS):
        here = first + lanes
        inside = here < end
        row = tl.load(ids + here, mask=inside, other=0).to(tl.int64)
        known = (row >= 0) & (row < own)
        strange = tl.where(known, strange, row)
        mask = (inside & known)[:, None] & wide[None, :]
        tile = tl.load(table + row[:, None] * D + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        total += tl.sum(tile, 0)
    report(flag, strange, own + strange * 0)
    tl.store(out + bag.to(tl.int64) * D + columns, total, mask=wide)


@triton.jit
def _sum_short_bags(
    table, ids, offsets, starts, out, flag, bags, features, bags_a_feature, rows, D,
    WIDTH: tl.constexpr, BAGS: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """Several bags at once, one id of each at a time: a single short bag has too few loads in flight."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    there = bag < bags
    begin = tl.load(offsets + bag, mask=there, other=0)
    end = tl.load(offsets + bag + 1, mask=there, other=0)
    columns = tl.arange(0, WIDTH)
    wide = columns < D
    start = tl.zeros([BAGS], dtype=tl.int64)
    own = start + rows
    if STACKED:
        start, own = table_of(starts, bag, features, bags_a_feature, rows, there)
    total = tl.zeros([BAGS, WIDTH], dtype=tl.float32)
    strange = tl.zeros([BAGS], dtype=tl.int64)
    for turn in range(tl.max(end - begin, 0)):
        here = begin + turn
        inside = here < end
        id_ = tl.load(ids + here, mask=inside, other=0).to(tl.int64)
        known = (id_ >= 0) & (id_ < own)
        strange = tl.where(known | (inside == 0), strange, id_)
        mask = (inside & known)[:, None] & wide[None, :]
        total += tl.load(table + (start + id_)[:, None] * D + columns[None, :], mask=mask, other=0.0)
    report(flag, strange, own)
    tl.store(out + bag[:, None] * D + columns[None, :], total, mask=there[:, None] & wide[None, :])


SHORT = 6
"""Bags of fewer ids on average are summed several at once."""


@operator("bag_sum", rows=lambda table_RD, ids_V, *_: (table_RD, ids_V))
def bag_sum(table_RD: Tensor, ids_V: Tensor, offsets_B1: Tensor, starts_F: Tensor | None = None) -> Tensor:
    bags, (rows, dim) = _checked(table_RD, ids_V, offsets_B1, starts_F), table_RD.shape
    out = torch.empty(bags, dim, device=table_RD.device)
    width = triton.next_power_of_2(dim)
    if bags and ids_V.numel() < SHORT * bags:
        together = max(1, min(32, 2048 // width))
        _sum_short_bags[(triton.cdiv(bags, together),)](
            table_RD, ids_V, offsets_B1, starts_F, out, flag(table_RD.device), bags,
            *_features(bags, starts_F), rows, dim,
            WIDTH=width, BAGS=together, STACKED=starts_F is not None, num_warps=1,
        )  # fmt: skip
    elif bags:
        _sum_bags[(bags,)](
            table_RD, ids_V, offsets_B1, starts_F, out, flag(table_RD.device), *_features(bags, starts_F), rows, dim,
            WIDTH=width, ROWS=max(1, min(16, 1024 // width)), STACKED=starts_F is not None,
            num_warps=max(1, width // 512),
        )  # fmt: skip
    return out


@triton.jit
def _list_rows(
    ids, offsets, starts, keys, bags, used, flag, count, features, bags_a_feature, rows,
    BAGS: tl.constexpr, BLOCK: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """The row and the bag of every id, several bags at once, and the number of ids in bags."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    there = bag < count
    if tl.program_id(0) == 0:
        tl.store(used, tl.load(offsets + count))
    begin = tl.load(offsets + bag, mask=there, other=0)
    end = tl.load(offsets + bag + 1, mask=there, other=0)
    start = tl.zeros([BAGS], dtype=tl.int64)
    own = start + rows
    if STACKED:
        start, own = table_of(starts, bag, features, bags_a_feature, rows, there)
    strange = tl.zeros([BAGS, BLOCK], dtype=tl.int64)
    for first in range(0, tl.max(end - begin, 0), BLOCK):
        here = begin[:, None] + first + tl.arange(0, BLOCK)[None, :]
        inside = here < end[:, None]
        id_ = tl.load(ids + here, mask=inside, other=0)
        known = (id_ >= 0) & (id_ < own[:, None])
        strange = tl.where(known | (inside == 0), strange, id_)
        row = tl.where(known, id_ + start[:, None], rows)
        tl.store(keys + here, row.to(keys.dtype.element_ty), mask=inside)
        tl.store(bags + here, (bag[:, None] + here * 0).to(tl.int32), mask=inside)
    most = tl.max(strange, 1)
    report(flag, tl.where(most > 0, most, tl.min(strange, 1)), own)


@triton.jit
def _list_short_rows(
    ids, offsets, starts, keys, bags, used, flag, count, features, bags_a_feature, rows,
    BAGS: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """The same for short bags: several at once, one id of each at a time."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    there = bag < count
    if tl.program_id(0) == 0:
        tl.store(used, tl.load(offsets + count))
    begin = tl.load(offsets + bag, mask=there, other=0)
    end = tl.load(offsets + bag + 1, mask=there, other=0)
    start = tl.zeros([BAGS], dtype=tl.int64)
    own = start + rows
    if STACKED:
        start, own = table_of(starts, bag, features, bags_a_feature, rows, there)
    strange = tl.zeros([BAGS], dtype=tl.int64)
    for turn in range(tl.max(end - begin, 0)):
        here = begin + turn
        inside = here < end
        id_ = tl.load(ids + here, mask=inside, other=0)
        known = (id_ >= 0) & (id_ < own)
        strange = tl.where(known | (inside == 0), strange, id_)
        row = tl.where(known, id_ + start, rows)
        tl.store(keys + here, row.to(keys.dtype.element_ty), mask=inside)
        tl.store(bags + here, bag.to(tl.int32), mask=inside)
    report(flag, strange, own)


class Grouped:
    """The ids of a batch in order of their rows, and the bag each id belongs to."""

    @operator("sort_rows")
    def __init__(self, ids_V: Tensor, offsets_B1: Tensor, rows: int, starts_F: Tensor | None = None) -> None:
        self.ids_V, self.offsets_B1, self.rows, self.starts_F = ids_V, offsets_B1, rows, starts_F
        bags, device = _checked(None, ids_V, offsets_B1, starts_F), ids_V.device
        few_bits = sort.serves(ids_V.numel(), rows, device)
        # Ids outside their table get a row number that no table has, which sorts last; so do ids after the last bag,
        # which torch sorts too.
        if few_bits and bags:
            keys_V, bags_V = (torch.empty_like(ids_V, dtype=torch.int32) for _ in range(2))
            self.used_1 = torch.empty_like(offsets_B1[:1])
        else:
            keys_V = torch.full_like(ids_V, rows, dtype=torch.int32 if few_bits else _narrowest(rows))
            bags_V, self.used_1 = torch.zeros_like(ids_V, dtype=torch.int32), torch.zeros_like(offsets_B1[:1])
        """The number of ids in bags: a captured graph may draw the next batch's offsets before the update."""
        more = (
            ids_V, offsets_B1, starts_F, keys_V, bags_V, self.used_1, flag(device), bags, *_features(bags, starts_F),
            rows,
        )  # fmt: skip
        if bags and ids_V.numel() < SHORT * bags:
            _list_short_rows[(triton.cdiv(bags, 128),)](*more, BAGS=128, STACKED=starts_F is not None, num_warps=4)
        elif bags:
            _list_rows[(triton.cdiv(bags, 16),)](*more, BAGS=16, BLOCK=32, STACKED=starts_F is not None, num_warps=4)
        if few_bits:
            self.sorted_V, self.bags_V = sort.sort_rows(keys_V, bags_V, self.used_1, rows)
        else:
            self.sorted_V, order_V = torch.sort(keys_V, stable=True)
            self.bags_V = bags_V.index_select(0, order_V)
        """The bag of each id, in the order of the sorted rows."""

    def moved(self, slots_U: Tensor, count: int) -> Grouped:
        """The same groups, of rows that lie elsewhere; no id may be after the last bag or outside its table."""
        self.rows, self.sorted_V = count, slots_U.index_select(0, self.sorted_V.long())
        return self

    @property
    def unique(self) -> int:
        """The number of distinct rows; waits for the device."""
        return int(torch.unique_consecutive(self.rows_used()).numel())

    def rows_used(self) -> Tensor:
        """The sorted rows of the ids in bags; waits for the device."""
        return self.sorted_V[: int(self.used_1)]


def _narrowest(rows: int) -> torch.dtype:
    """The narrowest type for row numbers and one past the last: each byte is a pass of the sort."""
    if rows < 1 << 15:
        return torch.int16
    return torch.int32 if rows < 1 << 31 else torch.int64


def chunk_size(width: int) -> tuple[int, int]:
    """Ids of a chunk and its warps: as many as registers can hold gradients and table rows for."""
    return (min(32, 2048 // width), 1) if width < 128 else (8, min(8, width // 128))


@operator(
    "update_rows",
    updates=True,
    rows=lambda table_RD, state, grouped, *_, **__: (table_RD, torch.unique(grouped.rows_used())),
    reads=lambda table_RD, state, grouped, gradient_BD, **_: (gradient_BD, grouped.sorted_V, grouped.bags_V),
)
def update(
    table_RD: Tensor,
    state: Tensor | None,
    grouped: Grouped,
    gradient_BD: Tensor,
    *,
    rule: RuleName,
    rate: float | Tensor,
    eps: float,
    decay: float,
    scale: float,
    count: float | Tensor = 1,
) -> None:
    """Update the used rows and their state in place by a rule; `count` is the number of updates including this one."""
    ids, dim, device = grouped.sorted_V.numel(), table_RD.shape[1], table_RD.device
    require_tensor("table_RD", table_RD, torch.float32, (grouped.rows, dim), device)
    shape = RULES[rule].state_shape(grouped.rows, dim)
    if shape is not None:
        assert state is not None, f"{rule} needs a state"
        require_tensor("state", state, torch.float32, shape, device)
    gradient_BD = gradient_BD.contiguous()
    require_tensor("gradient_BD", gradient_BD, torch.float32, (grouped.offsets_B1.numel() - 1, dim), device)
    if not ids:
        return
    width = triton.next_power_of_2(dim)
    chunk, warps = chunk_size(width)
    chunks = triton.cdiv(ids, chunk)
    aside = torch.empty(2, chunks, dim, device=table_RD.device)
    numbers = on_device(RULES[rule].numbers(rate, count), table_RD)
    shapes: dict[str, Any] = {"WIDTH": width, "C": chunk, "RULE": rule}
    update_chunks[(chunks,)](
        table_RD, state, grouped.sorted_V, grouped.bags_V, gradient_BD, aside[0], aside[1], numbers,
        grouped.used_1, grouped.rows, eps, decay, scale, dim, num_warps=warps, **shapes,
    )  # fmt: skip
    join_chunks[(triton.cdiv(chunks, LOOKED_AT),)](
        table_RD, state, grouped.sorted_V, aside[0], aside[1], numbers, grouped.used_1, grouped.rows, eps, decay, dim,
        J=JOINED, LOOK=LOOKED_AT, num_warps=1, **shapes,
    )  # fmt: skip


def squared_norm(grouped: Grouped, gradient_BD: Tensor) -> float:
    """The squared norm of the summed gradient of the distinct rows, by the reference: only clipping needs it."""
    used = grouped.ids_V[: int(grouped.offsets_B1[-1])]
    plain = reference.Grouped(used, grouped.offsets_B1, grouped.rows, grouped.starts_F)
    return reference.squared_norm(plain, gradient_BD)


def on_device(numbers: Numbers, table_RD: Tensor) -> Tensor:
    """The numbers of an update; those that are tensors may change between replays of a captured graph."""
    parts = [
        number.reshape(1).float() if isinstance(number, Tensor) else torch.full((1,), number, device=table_RD.device)
        for number in numbers
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _features(bags: int, starts_F: Tensor | None) -> tuple[int, int]:
    """The number of features and the bags of each."""
    features = 1 if starts_F is None else starts_F.numel()
    return features, bags // features


def _checked(table_RD: Tensor | None, ids_V: Tensor, offsets_B1: Tensor, starts_F: Tensor | None) -> int:
    """Refuse what the kernels would misread, without waiting for the device; returns the number of bags."""
    device = ids_V.device
    if table_RD is not None:
        require_tensor("table_RD", table_RD, torch.float32, (ANY, ANY), device)
    require_tensor("ids_V", ids_V, torch.int64, (ANY,), device)
    require_tensor("offsets_B1", offsets_B1, torch.int64, (ANY,), device)
    if starts_F is not None:
        require_tensor("starts_F", starts_F, torch.int64, (ANY,), device)
    bags, features = offsets_B1.numel() - 1, 1 if starts_F is None else starts_F.numel()
    if bags < 0 or features < 1 or bags % features:
        raise ArgumentError(f"offsets_B1 describes {bags} bags, which {features} features cannot share evenly")
    return bags
