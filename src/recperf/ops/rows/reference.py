"""Rows in plain numpy, the definition that the C body must match, and the layout of a record in a file.

A record is the row's number + 1, its W float32 values, zeros up to a multiple of 8 bytes, and a checksum of all of
these: 64-bit words in the byte order of the machine, because the files belong to one process. The checksum changes with
any change of a single word or of two bits, and with the row. A hole of a file reads as zeros, which is no record.
Records have any place in their file; places of all files have one numbering.

Shapes: R rows of all tables, W values of a row, T tables, N rows of a call.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError
from ..hashing import GOLDEN, finalise_numpy_

Rows = NDArray[np.int64]
Values = NDArray[np.float32]


class Fault(enum.IntEnum):
    """What is wrong with a record; native.c has the same numbers."""

    SYSTEM = 1
    """The operating system reported an error."""
    SHORT = 2
    """The file ends before the record does."""
    EMPTY = 3
    """The record was never written: its place holds zeros."""
    OTHER_ROW = 4
    DAMAGED = 5
    """The checksum does not match."""


class RecordFault(Exception):
    """A record that could not be read or written; `code` is the error number of the operating system."""

    def __init__(self, fault: Fault, row: int, code: int = 0) -> None:
        super().__init__(f"{fault.name} at row {row}")
        self.fault, self.row, self.code = fault, row, code


@dataclass(frozen=True, eq=False)
class RecordFiles:
    """Open files of records, one per table."""

    handles: tuple[int, ...]
    starts_T1: Rows
    """The first place of each file, and the number of places of all."""
    width: int

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.width)


@dataclass(frozen=True, eq=False)
class Request:
    """Records to read or write, and the order of their places, in which a disk serves them best."""

    rows_N: Rows
    places_N: Rows
    order_N: Rows

    @classmethod
    def of(cls, rows_N: Rows, places_N: Rows) -> Request:
        return cls(rows_N, places_N, np.argsort(places_N))

    def require(self, files: RecordFiles, *, distinct: bool = False) -> None:
        """Fail unless the order is ascending and all places are in the files: C trusts both."""
        count, end = len(self.rows_N), int(files.starts_T1[-1])
        require_rows(self.places_N, end, "places_N")
        require_rows(self.order_N, count, "order_N")
        places_N = self.places_N[self.order_N]
        before, after = places_N[:-1], places_N[1:]
        if (after <= before).any() if distinct else (after < before).any():
            raise ArgumentError(f"the places are not in ascending order{' or there is one twice' if distinct else ''}")


def record_bytes(width: int) -> int:
    return 8 * (2 + (width + 1) // 2)


def require_rows(rows_N: Rows, end: int, name: str = "rows_N") -> None:
    """Fail unless all rows are in 0..end: C would read past the end of a table."""
    if len(rows_N) and not (rows_N.min() >= 0 and rows_N.max() < end):
        raise ArgumentError(f"{name} has numbers from {rows_N.min()} to {rows_N.max()}; allowed: 0 to {end - 1}")


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
