"""Embedding bags by a small C file, compiled once with the machine's own compiler and kept in the cache folder.

Shapes: V ids, B bags, R table rows, D width.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ..compile import even_cuts, load, share
from ..hashing import stream
from .reference import stacked_rows

SOURCE = Path(__file__).with_name("native.c")
AHEAD = 8
"""Rows asked for ahead of time; 4 to 16 do about the same on a Neoverse-N1."""
SMALL = 2048
"""Ids below which a second thread costs more than it brings."""

_I64, _F32, _PTR = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    loaded = load(SOURCE)
    if isinstance(loaded, str):
        return loaded
    loaded.hash_rows.argtypes = [_PTR, _PTR, _I64, _I64, ctypes.c_uint64, ctypes.c_uint64]
    loaded.bag_sum.argtypes = [_PTR] * 4 + [_I64] * 4
    loaded.sort_rows.argtypes = [_PTR, _I64, _I64, _PTR, _PTR]
    loaded.update_rows.argtypes = [_PTR] * 6 + [_I64] * 3 + [_F32] * 4 + [_I64] * 2 + [_PTR]
    loaded.squared_norm.argtypes = [_PTR] * 4 + [_I64] * 3 + [_PTR]
    loaded.squared_norm.restype = ctypes.c_double
    return loaded


def _loaded() -> ctypes.CDLL:
    found = library()
    assert not isinstance(found, str), found
    return found


def _threads(ids: int) -> int:
    return torch.get_num_threads() if ids >= SMALL else 1


def hash_rows(ids_V: Tensor, seed: int, rows: int) -> Tensor:
    ids_V = ids_V.contiguous()
    rows_V = torch.empty_like(ids_V)
    call, key, count = _loaded().hash_rows, stream(seed), ids_V.numel()

    def work(first: int, last: int) -> None:
        call(ids_V.data_ptr(), rows_V.data_ptr(), first, last, key, rows)

    share(work, even_cuts(count, _threads(count)))
    return rows_V


def bag_sum(table_RD: Tensor, ids_V: Tensor, offsets_B1: Tensor, starts_F: Tensor | None = None) -> Tensor:
    rows_V = stacked_rows(ids_V, offsets_B1, starts_F)
    bags, dim = offsets_B1.numel() - 1, table_RD.shape[1]
    out_BD = torch.empty(bags, dim)
    call = _loaded().bag_sum

    def work(first: int, last: int) -> None:
        call(table_RD.data_ptr(), rows_V.data_ptr(), offsets_B1.data_ptr(), out_BD.data_ptr(), first, last, dim, AHEAD)

    share(work, even_cuts(bags, _threads(rows_V.numel())))
    return out_BD


class Grouped:
    """The ids of a batch in order of their rows, and the bag each id belongs to."""

    def __init__(self, ids_V: Tensor, offsets_B1: Tensor, rows: int, starts_F: Tensor | None = None) -> None:
        rows_V = stacked_rows(ids_V, offsets_B1, starts_F)
        count = rows_V.numel()
        self.rows_V = rows_V
        self.order_V = torch.empty(count, dtype=torch.int32)
        scratch_V = torch.empty(count, dtype=torch.int32)
        _loaded().sort_rows(rows_V.data_ptr(), count, rows - 1, self.order_V.data_ptr(), scratch_V.data_ptr())
        bags = torch.arange(offsets_B1.numel() - 1, dtype=torch.int32)
        self.bags_V = bags.repeat_interleave(offsets_B1.diff(), output_size=count)
        self.cuts = self._cuts(_threads(count))

    def _cuts(self, threads: int) -> list[int]:
        """Where to divide the sorted order between threads: never between two occurrences of one row."""
        count = self.order_V.numel()
        cuts = [0]
        for index in range(1, threads):
            at = max(cuts[-1], count * index // threads)
            cuts.append(self._end_of_row(at - 1) if at else 0)
        return [*cuts, count]

    def _end_of_row(self, place: int) -> int:
        """The first place after this one with another row; halving, since one row may fill a whole batch."""
        row, low, high = self._row(place), place + 1, self.order_V.numel()
        while low < high:
            middle = (low + high) // 2
            if self._row(middle) == row:
                low = middle + 1
            else:
                high = middle
        return low

    def _row(self, place: int) -> int:
        return int(self.rows_V[self.order_V[place]])

    @property
    def unique(self) -> int:
        return int(torch.unique_consecutive(self.rows_V[self.order_V.long()]).numel())


def update(
    table_RD: Tensor,
    state_R: Tensor | None,
    grouped: Grouped,
    gradient_BD: Tensor,
    *,
    rate: float | Tensor,
    eps: float,
    decay: float,
    scale: float,
) -> None:
    dim, rate = table_RD.shape[1], float(rate)
    call = _loaded().update_rows
    state = None if state_R is None else state_R.data_ptr()
    each = int(state_R is not None and state_R.dim() == 2)

    def work(first: int, last: int) -> None:
        sum_D = torch.empty(dim)
        call(
            table_RD.data_ptr(), state, grouped.rows_V.data_ptr(), grouped.order_V.data_ptr(),
            grouped.bags_V.data_ptr(), gradient_BD.data_ptr(), first, last, dim, rate, eps, decay, scale, each, AHEAD,
            sum_D.data_ptr(),
        )  # fmt: skip

    share(work, grouped.cuts)


def squared_norm(grouped: Grouped, gradient_BD: Tensor) -> float:
    dim, parts = gradient_BD.shape[1], []
    call = _loaded().squared_norm

    def work(first: int, last: int) -> None:
        sum_D = torch.empty(dim)
        found = call(
            grouped.rows_V.data_ptr(), grouped.order_V.data_ptr(), grouped.bags_V.data_ptr(), gradient_BD.data_ptr(),
            first, last, dim, sum_D.data_ptr(),
        )  # fmt: skip
        parts.append((first, found))

    share(work, grouped.cuts)
    # Added in the order of the rows, not in the order threads finished.
    return float(sum(found for _, found in sorted(parts)))
