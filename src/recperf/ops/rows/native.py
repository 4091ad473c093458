"""Rows in C: prefetched from memory, and read ahead from files.

Shapes: R rows of all tables, W values of a row, T tables, N rows of a call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from ...machine import usable_cores
from ..arguments import ANY, address
from ..compile import I64, POINTER, even_cuts, native_library, share, usable
from .reference import Fault, RecordFault, RecordFiles, Request, Rows, Values, require_rows

AHEAD_BYTES = 8 << 10
"""What is prefetched: several rows, well within the first cache."""
SMALL = 256 << 10
"""With fewer bytes a second thread costs more than it saves."""
POOL = "recperf-rows"
"""Threads of their own: a step that shares its work on the others must not wait for rows of a later batch."""


class _Call(ctypes.Structure):
    """The struct `call` of native.c."""

    _fields_ = (*((name, POINTER) for name in ("handles", "starts", "rows", "places", "order")), ("width", I64))


class _Fault(ctypes.Structure):
    """The struct `fault` of native.c."""

    _fields_ = (("kind", I64), ("row", I64), ("code", I64))


_FUNCTIONS = {
    "gather": [POINTER] * 3 + [I64] * 4,
    "scatter": [POINTER] * 3 + [I64] * 3,
    "read_records": [POINTER] * 2 + [I64] * 2,
    "write_records": [POINTER] * 2 + [I64] * 2,
    "lost_write": [I64],
}
library = native_library(__file__, _FUNCTIONS, {"read_records": _Fault, "write_records": _Fault, "lost_write": I64})
"""Returns the compiled library, or the reason why it cannot be used."""


def gather(table_RW: Values, rows_N: Rows, out_NW: Values) -> None:
    """Copy rows of a table to `out_NW`."""
    rows, width = table_RW.shape
    require_rows(rows_N, rows)
    table = address("table_RW", table_RW, np.float32, (rows, width))
    places = table, *_places(rows_N, "out_NW", out_NW, width)
    call, ahead = usable(library()).gather, max(1, AHEAD_BYTES // max(1, 4 * width))
    _share(lambda first, last: call(*places, first, last, width, ahead), len(rows_N), out_NW.nbytes, _cores())


def scatter(table_RW: Values, rows_N: Rows, values_NW: Values) -> None:
    """Copy values to distinct rows of a table."""
    rows, width = table_RW.shape
    require_rows(rows_N, rows)
    table = address("table_RW", table_RW, np.float32, (rows, width))
    places = table, *_places(rows_N, "values_NW", values_NW, width)
    call = usable(library()).scatter
    _share(lambda first, last: call(*places, first, last, width), len(rows_N), values_NW.nbytes, _cores())


def read_records(files: RecordFiles, request: Request, out_NW: Values) -> None:
    request.require(files)
    _records(usable(library()).read_records, files, request, "out_NW", out_NW, _cores())


def write_records(files: RecordFiles, request: Request, values_NW: Values) -> None:
    """Write records to distinct places."""
    request.require(files, distinct=True)
    # The kernel lets one thread at a time write to a file; another can prepare its records meanwhile.
    most = min(_cores(), 2 * len(files.handles))
    _records(usable(library()).write_records, files, request, "values_NW", values_NW, most)


def lost_write(handle: int) -> int:
    """The error number of a write that the kernel could not bring to the disk since the last call; 0: there is none."""
    return int(usable(library()).lost_write(handle))


def _records(
    function: Callable[..., _Fault], files: RecordFiles, request: Request, name: str, values_NW: Values, most: int
) -> None:
    count, handles = len(request.rows_N), np.array(files.handles, np.int32)
    rows, values = _places(request.rows_N, name, values_NW, files.width)
    call = _Call(
        handles=handles.ctypes.data,
        starts=address("starts_T1", files.starts_T1, np.int64, (len(handles) + 1,)),
        rows=rows,
        places=address("places_N", request.places_N, np.int64, (count,)),
        order=address("order_N", request.order_N, np.int64, (count,)),
        width=files.width,
    )
    faults: list[_Fault] = []

    def work(first: int, last: int) -> None:
        faults.append(function(ctypes.byref(call), values, first, last))

    _share(work, count, values_NW.nbytes, most)
    worst = min((fault for fault in faults if fault.kind), key=lambda fault: fault.row, default=None)
    if worst is not None:
        raise RecordFault(Fault(worst.kind), worst.row, worst.code)


def _places(rows_N: Rows, name: str, values_NW: Values, width: int) -> tuple[int, int]:
    count = len(rows_N)
    return address("rows_N", rows_N, np.int64, (ANY,)), address(name, values_NW, np.float32, (count, width))


_cores = functools.cache(usable_cores)


def _share(work: Callable[[int, int], None], count: int, size: int, most: int) -> None:
    if count:
        threads = min(count, most) if size >= SMALL else 1
        share(work, even_cuts(count, threads), pool=POOL)
