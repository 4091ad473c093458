"""Rows in C: prefetched from memory, and read ahead from files.

Shapes: R rows of all tables, W values of a row, T tables, N rows of a call.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import tempfile
from collections.abc import Callable

import numpy as np

from ...machine import usable_cores
from ..arguments import ANY, address
from ..compile import I64, POINTER, even_cuts, native_library, share, usable
from . import reference
from .rule import Fault, RecordFault, RecordFiles, Rows, Values, require_ascending, require_order, require_rows

AHEAD_BYTES = 8 << 10
"""What is prefetched: several rows, well within the first cache."""
SMALL = 256 << 10
"""With fewer bytes a second thread costs more than it saves."""
POOL = "recperf-rows"
"""Threads of their own: a step that shares its work on the others must not wait for rows of a later batch."""


class _Files(ctypes.Structure):
    """The struct `files` of native.c."""

    _fields_ = (("handles", POINTER), ("starts", POINTER), ("width", I64))


class _Fault(ctypes.Structure):
    """The struct `fault` of native.c."""

    _fields_ = (("kind", I64), ("row", I64), ("code", I64))


_FUNCTIONS = {
    "gather": [POINTER] * 3 + [I64] * 4,
    "scatter": [POINTER] * 3 + [I64] * 3,
    "read_records": [POINTER] * 4 + [I64] * 2,
    "write_records": [POINTER] * 4 + [I64] * 2,
    "written_back": [I64] * 2,
}
library = native_library(__file__, _FUNCTIONS, {"read_records": _Fault, "write_records": _Fault, "written_back": I64})
"""Returns the compiled library, or the reason why it cannot be used."""


def gather(table_RW: Values, rows_N: Rows, out_NW: Values) -> None:
    """Copy rows of a table to `out_NW`."""
    rows, width = table_RW.shape
    require_rows(rows_N, rows)
    table = address("table_RW", table_RW, np.float32, (rows, width))
    places = table, *_places(rows_N, "out_NW", out_NW, width)
    call, ahead = usable(library()).gather, max(1, AHEAD_BYTES // max(1, 4 * width))
    _share(lambda first, last: call(*places, first, last, width, ahead), len(rows_N), out_NW.nbytes)


def scatter(table_RW: Values, rows_N: Rows, values_NW: Values) -> None:
    """Copy values to distinct rows of a table."""
    rows, width = table_RW.shape
    require_rows(rows_N, rows)
    table = address("table_RW", table_RW, np.float32, (rows, width))
    places = table, *_places(rows_N, "values_NW", values_NW, width)
    call = usable(library()).scatter
    _share(lambda first, last: call(*places, first, last, width), len(rows_N), values_NW.nbytes)


def read_records(files: RecordFiles, rows_N: Rows, order_N: Rows | None, out_NW: Values) -> None:
    """Read ascending rows; row i goes to position order_N[i] of `out_NW`, or to i."""
    require_ascending(rows_N, int(files.starts_T1[-1]))
    _records(usable(library()).read_records, files, rows_N, order_N, "out_NW", out_NW)


def write_records(files: RecordFiles, rows_N: Rows, order_N: Rows | None, values_NW: Values) -> None:
    """Write ascending, distinct rows; row i has the values at position order_N[i], or i."""
    require_ascending(rows_N, int(files.starts_T1[-1]), distinct=True)
    _records(usable(library()).write_records, files, rows_N, order_N, "values_NW", values_NW)


def written_back(handle: int, *, start: bool) -> int:
    """The error number of a write that the kernel could not bring to the disk; `start`: begin to write all changes."""
    return int(usable(library()).written_back(handle, start))


def _records(
    call: Callable[..., _Fault], files: RecordFiles, rows_N: Rows, order_N: Rows | None, name: str, values_NW: Values
) -> None:
    count = len(rows_N)
    require_order(order_N, count)
    rows, values = _places(rows_N, name, values_NW, files.width)
    order = None if order_N is None else address("order_N", order_N, np.int64, (count,))
    handles = np.array(files.handles, np.int32)
    starts = address("starts_T1", files.starts_T1, np.int64, (len(handles) + 1,))
    columns = _Files(handles.ctypes.data, starts, files.width)
    faults: list[_Fault] = []

    def work(first: int, last: int) -> None:
        faults.append(call(ctypes.byref(columns), rows, order, values, first, last))

    _share(work, count, values_NW.nbytes)
    worst = min((fault for fault in faults if fault.kind), key=lambda fault: fault.row, default=None)
    if worst is not None:
        raise RecordFault(Fault(worst.kind), worst.row, worst.code)


def _places(rows_N: Rows, name: str, values_NW: Values, width: int) -> tuple[int, int]:
    count = len(rows_N)
    return address("rows_N", rows_N, np.int64, (ANY,)), address(name, values_NW, np.float32, (count, width))


_cores = functools.cache(usable_cores)


def _share(work: Callable[[int, int], None], count: int, size: int) -> None:
    if count:
        threads = min(count, _cores()) if size >= SMALL else 1
        share(work, even_cuts(count, threads), pool=POOL)


def self_check() -> None:
    """Run every C function on a tiny input; raises where a result differs from the reference."""
    draw = np.random.default_rng(0)
    table_RW, rows_N = draw.random((9, 5), np.float32), np.array([1, 2, 3, 7])
    expected = table_RW[rows_N]
    actual, copy_RW = np.empty_like(expected), np.zeros_like(table_RW)
    gather(table_RW, rows_N, actual)
    np.testing.assert_equal(actual, expected)
    scatter(copy_RW, rows_N, expected)
    np.testing.assert_equal(copy_RW[rows_N], expected)
    with tempfile.TemporaryFile() as file:
        files = RecordFiles((file.fileno(),), np.array([0, len(table_RW)]), table_RW.shape[1])
        for writer, reader in ((sys.modules[__name__], reference), (reference, sys.modules[__name__])):
            file.truncate(0)
            file.truncate(len(table_RW) * files.record_bytes)
            actual[:] = 0
            writer.write_records(files, rows_N, None, expected)
            reader.read_records(files, rows_N, None, actual)
            np.testing.assert_equal(actual, expected)
        if written_back(file.fileno(), start=True):
            raise OSError("the kernel reports a failed write")
