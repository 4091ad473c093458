"""Embedding bags in C: every row of a large table is a cache miss, which prefetching hides.

Shapes: V ids, B bags, R table rows, D width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..arguments import address, unknown_id
from ..compile import F32, I64, POINTER, even_cuts, native_library, share, usable
from ..hashing import require_rows, stream
from ..operators import operator
from ..table_rules import RULES, RuleName

SMALL = 2048
"""With fewer ids a second thread costs more than it saves."""
MOST_IDS = (1 << 31) - 1
"""The sorted order holds places as int32."""

HUGE_PAGE = 2 << 20
"""Reading a random row of a large table misses the TLB too, and with 4 KiB pages the page table itself misses the
caches."""
MADV_HUGEPAGE = 14

_ALL_KNOWN, _BAD_OFFSETS, _BAD_STARTS = -1, -2, -3
"""What `stack_rows` of native.c returns; otherwise the place of an id that is outside its table."""


_FUNCTIONS = {
    "hash_rows": [POINTER] * 2 + [I64] * 2 + [ctypes.c_uint64] * 2,
    "stack_rows": [POINTER] * 4 + [I64] * 6,
    "bag_sum": [POINTER] * 4 + [I64] * 3,
    "sort_rows": [POINTER] + [I64] * 2 + [POINTER] * 2,
    "cut_rows": [POINTER] * 2 + [I64] * 2 + [POINTER],
    "update_rows": [POINTER] * 6 + [I64] * 5 + [POINTER] + [F32] * 3 + [POINTER],
    "squared_norm": [POINTER] * 4 + [I64] * 3 + [POINTER],
}
library = native_library(__file__, _FUNCTIONS, {"stack_rows": I64, "squared_norm": ctypes.c_double})
"""Returns the compiled library, or the reason why it cannot be used."""


def _threads(ids: int) -> int:
    return torch.get_num_threads() if ids >= SMALL else 1


@operator("hash_rows")
def hash_rows(ids_V: Tensor, seed: int, rows: int) -> Tensor:
    require_rows(rows)
    ids_V = ids_V.contiguous()
    rows_V, count = torch.empty_like(ids_V), ids_V.numel()
    places = [address(name, tensor, torch.int64, (count,)) for name, tensor in (("ids_V", ids_V), ("rows_V", rows_V))]
    hash_, key = usable(library()).hash_rows, stream(seed)

    def work(first: int, last: int) -> None:
        hash_(*places, first, last, key, rows)

    share(work, even_cuts(count, _threads(count)))
    return rows_V


def checked_rows(
    ids_V: Tensor,
    offsets_B1: Tensor,
    rows: int,
    starts_F: Tensor | None,
    then: Callable[[int, int, int], None] | None = None,
) -> Tensor:
    """The row of the stacked tables that each id means; an id outside its table is an error.

    `then` is called on each thread as soon as its bags are known to be right: with the address of the rows, and the
    first and last bag.
    """
    count, bags = ids_V.numel(), offsets_B1.numel() - 1
    features = 1 if starts_F is None else starts_F.numel()
    if bags < 0 or features < 1 or bags % features:
        raise ArgumentError(f"offsets_B1 describes {bags} bags, which {features} features cannot share evenly")
    ids = address("ids_V", ids_V, torch.int64, (count,))
    offsets = address("offsets_B1", offsets_B1, torch.int64, (bags + 1,))
    rows_V = ids_V if starts_F is None else torch.empty_like(ids_V)
    starts = None if starts_F is None else address("starts_F", starts_F, torch.int64, (features,))
    stack, place, faults = usable(library()).stack_rows, rows_V.data_ptr(), []

    def work(first: int, last: int) -> None:
        faults.append(fault := stack(ids, offsets, starts, place, first, last, bags, features, rows, count))
        if then is not None and fault == _ALL_KNOWN:
            then(place, first, last)

    share(work, even_cuts(bags, _threads(count)))
    if min(faults) == _BAD_STARTS:
        raise ArgumentError(f"starts_F is {starts_F}; the tables must follow one another within {rows} rows")
    if min(faults) == _BAD_OFFSETS:
        raise ArgumentError(f"offsets_B1 does not divide the ids into bags: it must rise from 0 to {count}")
    if max(faults) >= 0:
        raise _unknown(max(faults), ids_V, offsets_B1, rows, starts_F)
    return rows_V


def checked_slots(slots_U: Tensor, count: int) -> Tensor:
    if slots_U.numel() and not 0 <= int(slots_U.min()) <= int(slots_U.max()) < count:
        raise ArgumentError(f"slots_U goes from {int(slots_U.min())} to {int(slots_U.max())}; there are {count} slots")
    return slots_U


def _unknown(place: int, ids_V: Tensor, offsets_B1: Tensor, rows: int, starts_F: Tensor | None) -> ArgumentError:
    if starts_F is not None:
        bag = int(torch.searchsorted(offsets_B1, place, right=True)) - 1
        feature = bag * starts_F.numel() // (offsets_B1.numel() - 1)
        rows = [*starts_F.tolist(), rows][feature + 1] - int(starts_F[feature])
    return unknown_id("ids_V", place, int(ids_V[place]), rows)


@operator(
    "bag_sum",
    rows=lambda table_RD, ids_V, offsets_B1, starts_F=None: (
        table_RD,
        checked_rows(ids_V, offsets_B1, table_RD.shape[0], starts_F),
    ),
)
def bag_sum(table_RD: Tensor, ids_V: Tensor, offsets_B1: Tensor, starts_F: Tensor | None = None) -> Tensor:
    rows, dim = table_RD.shape
    table = address("table_RD", table_RD, torch.float32, (rows, dim))
    out_BD = torch.empty(max(0, offsets_B1.numel() - 1), dim)
    call = usable(library()).bag_sum

    def work(rows_V: int, first: int, last: int) -> None:
        call(table, rows_V, offsets_B1.data_ptr(), out_BD.data_ptr(), first, last, dim)

    checked_rows(ids_V, offsets_B1, rows, starts_F, work)
    return out_BD


class Grouped:
    """The ids of a batch in order of their rows, and the bag each id belongs to."""

    @operator("sort_rows")
    def __init__(self, ids_V: Tensor, offsets_B1: Tensor, rows: int, starts_F: Tensor | None = None) -> None:
        count = ids_V.numel()
        if count > MOST_IDS:
            raise ArgumentError(f"ids_V has {count} ids; at most {MOST_IDS} can be sorted at a time")
        self.rows, self.bags = rows, offsets_B1.numel() - 1
        self.rows_V = rows_V = checked_rows(ids_V, offsets_B1, rows, starts_F)
        self.order_V = torch.empty(count, dtype=torch.int32)
        scratch_V = torch.empty(count, dtype=torch.int32)
        usable(library()).sort_rows(rows_V.data_ptr(), count, rows - 1, self.order_V.data_ptr(), scratch_V.data_ptr())
        bags = torch.arange(offsets_B1.numel() - 1, dtype=torch.int32)
        self.bags_V = bags.repeat_interleave(offsets_B1.diff(), output_size=count)
        self.cuts = self._cuts(_threads(count))

    def moved(self, slots_U: Tensor, count: int) -> Grouped:
        """The same groups, of rows that lie elsewhere."""
        self.rows, self.rows_V = count, checked_slots(slots_U, count).index_select(0, self.rows_V)
        return self

    def _cuts(self, threads: int) -> list[int]:
        """Cuts of the sorted order for the threads, never between two occurrences of one row."""
        cuts = torch.empty(threads + 1, dtype=torch.int64)
        order = self.rows_V.data_ptr(), self.order_V.data_ptr(), self.order_V.numel()
        usable(library()).cut_rows(*order, threads, cuts.data_ptr())
        return list(cuts.tolist())

    def addresses(self) -> tuple[int, int, int]:
        """Addresses of the rows, their order and the bag of each id, which this class made and checked."""
        return self.rows_V.data_ptr(), self.order_V.data_ptr(), self.bags_V.data_ptr()

    @property
    def unique(self) -> int:
        return int(torch.unique_consecutive(self.rows_V[self.order_V.long()]).numel())


@operator(
    "update_rows",
    updates=True,
    rows=lambda table_RD, state, grouped, *_, **__: (table_RD, torch.unique(grouped.rows_V)),
    reads=lambda table_RD, state, grouped, gradient_BD, **_: (gradient_BD, grouped.rows_V, grouped.order_V),
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
    dim, chosen = table_RD.shape[1], RULES[rule]
    table = address("table_RD", table_RD, torch.float32, (grouped.rows, dim))
    shape = chosen.state_shape(grouped.rows, dim)
    states = None
    if shape is not None:
        assert state is not None, f"{rule} needs a state"
        states = address("state", state, torch.float32, shape)
    gradient = address("gradient_BD", gradient_BD, torch.float32, (grouped.bags, dim))
    values = [float(number) for number in chosen.numbers(float(rate), float(count))]
    numbers = (F32 * len(values))(*values)
    call, groups = usable(library()).update_rows, grouped.addresses()

    def work(first: int, last: int) -> None:
        sum_D = torch.empty(dim)
        sizes = first, last, dim, chosen.state_width(dim)
        call(table, states, *groups, gradient, *sizes, chosen.code, numbers, eps, decay, scale, sum_D.data_ptr())

    share(work, grouped.cuts)


@operator("squared_norm")
def squared_norm(grouped: Grouped, gradient_BD: Tensor) -> float:
    dim, parts = gradient_BD.shape[1], []
    gradient = address("gradient_BD", gradient_BD, torch.float32, (grouped.bags, dim))
    call, groups = usable(library()).squared_norm, grouped.addresses()

    def work(first: int, last: int) -> None:
        sum_D = torch.empty(dim)
        parts.append((first, call(*groups, gradient, first, last, dim, sum_D.data_ptr())))

    share(work, grouped.cuts)
    # Added in the order of the rows, not in the order in which the threads finish.
    return float(sum(part for _, part in sorted(parts)))


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Ask the kernel to back a tensor that was not written yet with 2 MiB pages; return whether it agreed."""
    if tensor.device.type != "cpu" or tensor.nbytes < 4 * HUGE_PAGE:
        return False
    begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = tensor.data_ptr() + tensor.nbytes - begin
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(begin, length, MADV_HUGEPAGE) == 0)
