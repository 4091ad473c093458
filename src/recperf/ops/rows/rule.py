"""What the implementations share: the layout of a record in a file, and what can be wrong with one.

A record is the row's number + 1, its W float32 values, zeros up to a multiple of 8 bytes, and a checksum of all of
these: 64-bit words in the byte order of the machine, because the files belong to one process. The checksum changes with
any change of a single word or of two bits, and with the row. A hole of a file reads as zeros, which is no record.
Records have any place in their file; places of all files have one numbering.

Shapes: R rows of all tables, W values of a row, T tables, N rows of a call.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError

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
