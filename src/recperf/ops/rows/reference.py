"""Rows in plain numpy: the definition that the C body must match."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from ..splitmix import GOLDEN, finalise_numpy_
from .rule import Fault, RecordFault, RecordFiles, Request, Rows, Values, require_rows

LANES, FACTOR, HALF = 4, 0xD6E8FEB86659FD93, 32
"""Words are mixed into four sums in turn, so that a processor works on four at a time; the factor is odd."""
PART = 1024
"""Records in memory at a time."""

Words = NDArray[np.uint64]


def gather(table_RW: Values, rows_N: Rows, out_NW: Values) -> None:
    """Copy rows of a table to `out_NW`."""
    require_rows(rows_N, len(table_RW))
    np.take(table_RW, rows_N, axis=0, out=out_NW)


def scatter(table_RW: Values, rows_N: Rows, values_NW: Values) -> None:
    """Copy values to distinct rows of a table."""
    require_rows(rows_N, len(table_RW))
    table_RW[rows_N] = values_NW


def read_records(files: RecordFiles, request: Request, out_NW: Values) -> None:
    request.require(files)
    for first in range(0, len(request.order_N), PART):
        part = request.order_N[first : first + PART]
        rows, places = request.rows_N[part], request.places_N[part]
        content = b"".join(_read(files, row, place) for row, place in zip(rows.tolist(), places.tolist()))
        records = np.frombuffer(content, np.uint64).reshape(len(rows), -1)
        heads = rows.astype(np.uint64) + np.uint64(1)
        for fault, wrong in (
            (Fault.EMPTY, records[:, 0] == 0),
            (Fault.OTHER_ROW, records[:, 0] != heads),
            (Fault.DAMAGED, records[:, -1] != checksums(heads, records[:, 1:-1])),
        ):
            if wrong.any():
                raise RecordFault(fault, int(rows[wrong.argmax()]))
        out_NW[part] = records[:, 1:-1].view(np.float32)[:, : files.width]


def write_records(files: RecordFiles, request: Request, values_NW: Values) -> None:
    """Write records to distinct places."""
    request.require(files, distinct=True)
    for first in range(0, len(request.order_N), PART):
        part = request.order_N[first : first + PART]
        rows, places = request.rows_N[part], request.places_N[part]
        records = np.zeros((len(rows), files.record_bytes // 8), np.uint64)
        records[:, 0] = rows + 1
        values = records[:, 1:-1].copy()
        values.view(np.float32)[:, : files.width] = values_NW[part]
        records[:, 1:-1], records[:, -1] = values, checksums(records[:, 0], values)
        for row, place, record in zip(rows.tolist(), places.tolist(), records):
            _write(files, row, place, record.tobytes())


def lost_write(handle: int) -> int:
    """Python cannot ask the kernel for a write that it could not bring to the disk."""
    return 0


def checksums(heads_N: Words, words_NC: Words) -> Words:
    """The checksum of each record, seeded by its first word."""
    lanes = heads_N[:, None] + np.arange(1, LANES + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    for first in range(0, words_NC.shape[1], LANES):
        part = words_NC[:, first : first + LANES]
        lanes[:, : part.shape[1]] = _mixed(lanes[:, : part.shape[1]], part)
    total = heads_N
    for lane in lanes.T:
        total = _mixed(total, lane)
    return finalise_numpy_(total)


def _mixed(sums: Words, words: Words) -> Words:
    product = (sums ^ words) * np.uint64(FACTOR)
    return product ^ product >> np.uint64(HALF)


def _offset(files: RecordFiles, place: int) -> tuple[int, int]:
    """The handle of the file of a place, and where the record begins there."""
    table = int(np.searchsorted(files.starts_T1, place, side="right")) - 1
    return files.handles[table], (place - int(files.starts_T1[table])) * files.record_bytes


def _read(files: RecordFiles, row: int, place: int) -> bytes:
    handle, offset = _offset(files, place)
    record = b""
    try:
        while len(record) < files.record_bytes:
            more = os.pread(handle, files.record_bytes - len(record), offset + len(record))
            if not more:
                raise RecordFault(Fault.SHORT, row)
            record += more
    except OSError as error:
        raise RecordFault(Fault.SYSTEM, row, error.errno or 0) from None
    return record


def _write(files: RecordFiles, row: int, place: int, record: bytes) -> None:
    handle, offset = _offset(files, place)
    try:
        while record:
            count = os.pwrite(handle, record, offset)
            record, offset = record[count:], offset + count
    except OSError as error:
        raise RecordFault(Fault.SYSTEM, row, error.errno or 0) from None
