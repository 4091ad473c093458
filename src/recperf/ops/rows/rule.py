"""What the implementations share: the layout of a record in a file, and what can be wrong with one.

A record is the row's number + 1, its W float32 values, zeros up to a multiple of 8 bytes, and a checksum of all of
these: 64-bit words in the byte order of the machine, because the files belong to one process. A hole of a file reads as
zeros, which is no record. The checksum changes with any change of a single word or of two bits, and with the row.

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
    """Open files of records, one per table; rows of all tables have one numbering."""

    handles: tuple[int, ...]
    starts_T1: Rows
    """The first row of each table, and the number of rows of all."""
    width: int

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.width)


def record_bytes(width: int) -> int:
    return 8 * (2 + (width + 1) // 2)


def require_rows(rows_N: Rows, end: int) -> None:
    """Fail unless all rows are in 0..end: C would read past the end of a table."""
    if len(rows_N) and not (rows_N.min() >= 0 and rows_N.max() < end):
        raise ArgumentError(f"rows_N has rows from {rows_N.min()} to {rows_N.max()}; allowed: 0 to {end - 1}")


def require_ascending(rows_N: Rows, end: int, *, distinct: bool = False) -> None:
    """Fail unless the rows are in 0..end and in ascending order, which reading one file after another needs."""
    require_rows(rows_N, end)
    before, after = rows_N[:-1], rows_N[1:]
    if (after <= before).any() if distinct else (after < before).any():
        raise ArgumentError(f"rows_N is not in ascending order{' or has a row twice' if distinct else ''}")


def require_order(order_N: Rows | None, count: int) -> None:
    """Fail unless every position of the order is one of the call's."""
    if order_N is not None and count and not (order_N.min() >= 0 and order_N.max() < count):
        raise ArgumentError(f"order_N has positions outside 0 to {count - 1}")
