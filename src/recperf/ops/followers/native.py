"""What follows items, in C: a few nanoseconds for each pair.

Shapes: E events, P events that others follow, R rows, D distances, W entries.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ArgumentError
from ..arguments import address, unknown_id
from ..compile import I64, POINTER, even_cuts, native_library, share, usable
from .reference import Floats, Followed, Longs, ranges

_NO_MEMORY = 1
SMALL = 1 << 18
"""With fewer sums a second thread costs more than it saves."""
_POINTERS = ("items", "after", "events", "begins", "ends", "weights", "places")
_SIZES = ("distances", "count", "all", "followed")


class _Call(ctypes.Structure):
    """The struct `call` of native.c."""

    _fields_ = (*((name, POINTER) for name in _POINTERS), *((name, I64) for name in _SIZES))


library = native_library(
    __file__,
    {"followers_count": [POINTER, I64, I64, *[POINTER] * 3], "followers_add": [*[POINTER] * 5, *[I64] * 5, POINTER]},
    {"followers_count": ctypes.c_int, "followers_add": I64},
)
"""Returns the compiled library, or the reason why it cannot be used."""


def count(
    events: Followed, begins_R: Longs, ends_R: Longs, weights_D: Floats, *, pairs: int
) -> tuple[Longs, NDArray[np.int32], Floats]:
    """Rows have the items of the catalogue as columns at most, so that the output has room for as many."""
    room_R = np.minimum(len(weights_D) * (ends_R - begins_R), events.items)
    places_R = np.cumsum(room_R) - room_R
    rows, many = len(begins_R), int(room_R.sum())
    columns_W, sums_W, lengths_R = np.empty(many, np.int32), np.empty(many), np.zeros(rows, np.int64)
    arrays = (
        events.items_E, events.after_E, events.events_P, np.ascontiguousarray(begins_R),
        np.ascontiguousarray(ends_R), np.ascontiguousarray(weights_D), places_R,
    )  # fmt: skip
    kinds = (np.int32, np.uint8, np.int32, np.int64, np.int64, np.float64, np.int64)
    places = {name: address(name, array, kind, array.shape) for name, array, kind in zip(_POINTERS, arrays, kinds)}
    sizes = len(weights_D), events.items, len(events.items_E), len(events.events_P)
    call = _Call(**places, **dict(zip(_SIZES, sizes)))
    outputs = columns_W.ctypes.data, sums_W.ctypes.data, lengths_R.ctypes.data
    work, failures = usable(library()).followers_count, list[int]()

    def some(first: int, last: int) -> None:
        failures.append(work(ctypes.byref(call), first, last, *outputs))

    # Rows whose work is about the same for each thread.
    threads = max(1, min(torch.get_num_threads(), many // pairs + 1))
    upto_R = np.cumsum(ends_R - begins_R)
    total = int(upto_R[-1]) if rows else 0
    cuts = np.searchsorted(upto_R, [total * thread // threads for thread in range(1, threads)]).tolist()
    share(some, [0, *cuts, rows])
    if any(failures):
        if _NO_MEMORY in failures:
            raise MemoryError("not enough memory for the counts of an item")
        raise ArgumentError("an event is outside the sequences, or its item outside the catalogue")
    rows_W, entries_W = ranges(places_R, lengths_R)
    return rows_W, columns_W[entries_W], sums_W[entries_W]


def add_rows(
    offsets_I1: Tensor, columns_W: Tensor, values_W: Tensor, history_BL: Tensor, weights_L: Tensor, items: int
) -> Tensor:
    (rows, length), entries = history_BL.shape, (len(values_W),)
    sums_BI, history_BL, failures = torch.empty(rows, items), history_BL.contiguous(), list[int]()
    places = (
        address("offsets_I1", offsets_I1, torch.int64, (items + 1,)),
        address("columns_W", columns_W, torch.int32, entries),
        address("values_W", values_W, torch.float32, entries),
        address("history_BL", history_BL, torch.int64, (rows, length)),
        address("weights_L", weights_L, torch.float32, (length,)),
    )
    call = usable(library()).followers_add

    def some(first: int, last: int) -> None:
        failures.append(call(*places, length, items, *entries, first, last, sums_BI.data_ptr()))

    share(some, even_cuts(rows, 1 if rows * items < SMALL else max(1, min(rows, torch.get_num_threads()))))
    if (place := max(failures)) >= 0:
        item = int(history_BL.flatten()[place])
        if 0 <= item <= items:
            raise ArgumentError(f"the counts of item {item} are outside the columns, which are 0 to {items - 1}")
        raise unknown_id("history_BL", place, item, items + 1)
    return sums_BI
