"""Where all rows of the tables lie while a model trains: in host memory, or in files.

A record is a row's weights and optimizer state side by side. A row that was never written has no record yet: it takes
neither memory nor disk, and whoever needs it computes its initial value. Files are working files of one process, from
which nothing is resumed: what survives a kill is a checkpoint.

Shapes: R rows of all tables, W values of a record, P parts of the store, N rows of a call.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ... import machine
from ...config import require
from ...errors import ArgumentError, DataError, MachineError, RecperfError, shorten_middle
from ...files import open_regular, writing
from ...ops.rows import Fault, Name, RecordFault, RecordFiles, Request, choose
from ...ops.rows.reference import require_rows
from ...units import size

MAP_NORESERVE = 0x4000
"""Linux's value, on all of its common processors; Python names it from 3.13 on."""
SUFFIX = ".recperf-rows"
MOST_ROWS = (1 << 32) - 1
"""Of a part of the store: records are counted in 32 bits."""
RESUME = "--resume RUN continues after the last checkpoint"
ELSEWHERE = "choose another folder with --tables.folder"

Rows = NDArray[np.int64]
Values = NDArray[np.float32]


class RowStore(ABC):
    """All records of a model's tables. Calls come from one thread at a time; inside, several threads share the work.

    A row gets its record when it is written first, after those that were written before it: they lie in one piece, and
    rows that left the cache together are read together.
    """

    kind: str
    """host or file."""

    def __init__(self, parts: list[int], width: int, impl: Name) -> None:
        """Rows of each part of the store that numbers its records from 1."""
        require(len(parts) >= 1, "tables", len(parts), "at least 1")
        for count in parts:
            require(1 <= count <= MOST_ROWS, "rows", count, f"1 to {MOST_ROWS:,}")
        require(width >= 1, "width", width, "at least 1")
        self.rows, self.width = sum(parts), width
        self.starts_P1 = np.cumsum([0, *parts], dtype=np.int64)
        self._body, self.why = choose(impl)
        self.forget()

    def forget(self) -> None:
        """No row was ever written."""
        # Zeros that nobody wrote, not overwritten ones, which would take memory for every row.
        self._numbers_R = np.zeros(self.rows, np.uint32)
        """The number of a row's record in its part, from 1 on; 0: none yet."""
        self._used_P = np.zeros(len(self.starts_P1) - 1, np.int64)
        """Records of each part that rows have."""

    def written(self, rows_N: Rows) -> NDArray[np.bool_]:
        """Whether each of these rows was ever written; others may not be read."""
        return self._numbers_R[rows_N] > 0

    def read(self, rows_N: Rows, out_NW: Values) -> None:
        """Copy records to `out_NW`, which is contiguous and may be pinned memory of a tensor."""
        _require_call(self, rows_N, "out_NW", out_NW)
        numbers_N = self._numbers_R[rows_N]
        if not numbers_N.all():
            raise ArgumentError(f"row {rows_N[numbers_N.argmin()]} was never written; it has its initial value")
        self._read(rows_N, self._parts(rows_N)[1] + numbers_N - 1, out_NW)

    def write(self, rows_N: Rows, values_NW: Values) -> None:
        """Replace the records of distinct rows. After an error the caller still has their values."""
        _require_call(self, rows_N, "values_NW", values_NW)
        parts_N, starts_N = self._parts(rows_N)
        numbers_N, used_P = self._numbers_R[rows_N].astype(np.int64), self._used_P.copy()
        new_N = np.flatnonzero(numbers_N == 0)
        new_N = new_N[np.argsort(rows_N[new_N])]
        if (np.diff(rows_N[new_N]) == 0).any():
            raise ArgumentError("rows_N has a row twice")
        for part, count in zip(*np.unique(parts_N[new_N], return_counts=True)):
            of_part_N = new_N[parts_N[new_N] == part]
            numbers_N[of_part_N] = used_P[part] + np.arange(1, count + 1)
            used_P[part] += count
        self._write(rows_N, starts_N + numbers_N - 1, values_NW)
        self._numbers_R[rows_N], self._used_P = numbers_N, used_P

    def _parts(self, rows_N: Rows) -> tuple[Rows, Rows]:
        """The part of each row, and the first row of that part."""
        parts_N = np.searchsorted(self.starts_P1, rows_N, side="right") - 1
        return parts_N, self.starts_P1[parts_N]

    @abstractmethod
    def _read(self, rows_N: Rows, records_N: Rows, out_NW: Values) -> None: ...

    @abstractmethod
    def _write(self, rows_N: Rows, records_N: Rows, values_NW: Values) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class HostRows(RowStore):
    """All records in host memory, which is taken as rows are written first."""

    kind = "host"

    def __init__(self, rows: int, width: int, *, impl: Name = "auto") -> None:
        super().__init__([rows], width, impl)
        self._records_RW = np.frombuffer(_mapping(4 * rows * width), np.float32).reshape(rows, width)

    def _read(self, rows_N: Rows, records_N: Rows, out_NW: Values) -> None:
        self._body.gather(self._records_RW, records_N, out_NW)

    def _write(self, rows_N: Rows, records_N: Rows, values_NW: Values) -> None:
        self._body.scatter(self._records_RW, records_N, values_NW)

    def close(self) -> None:
        """Give the memory back."""
        self._records_RW = np.empty((0, self.width), np.float32)


class FileRows(RowStore):
    """All records in files of a folder, one per table. A file is as long as the rows that were written.

    The folder is new, and belongs to this process as long as the store is open.
    """

    kind = "file"

    def __init__(self, folder: Path, tables: dict[str, int], width: int, *, impl: Name = "auto") -> None:
        super().__init__(list(tables.values()), width, impl)
        self.names, self.paths = tuple(tables), tuple(_path(folder, number, name) for number, name in enumerate(tables))
        with ExitStack() as stack:
            handles = tuple(_create(path, stack) for path in self.paths)
            self._files = RecordFiles(handles, self.starts_P1, width)
            self._stack = stack.pop_all()

    def _read(self, rows_N: Rows, records_N: Rows, out_NW: Values) -> None:
        try:
            self._body.read_records(self._files, Request.of(rows_N, records_N), out_NW)
        except RecordFault as fault:
            raise self._error(fault, "read") from None

    def write(self, rows_N: Rows, values_NW: Values) -> None:
        """Also fails if an earlier write was lost; records that were not written whole do not match their checksum."""
        super().write(rows_N, values_NW)
        self._require_saved()

    def _write(self, rows_N: Rows, records_N: Rows, values_NW: Values) -> None:
        try:
            self._body.write_records(self._files, Request.of(rows_N, records_N), values_NW)
        except RecordFault as fault:
            raise self._error(fault, "written") from None

    def close(self) -> None:
        """Close the files; who made their folder removes them."""
        self._stack.close()

    def _require_saved(self) -> None:
        """Fail if the kernel could not bring to the disk what was written earlier: reading it might give old values."""
        for name, path, handle in zip(self.names, self.paths, self._files.handles):
            code = self._body.lost_write(handle)
            if code:
                raise MachineError(
                    f"rows of table {_quoted(name)} were lost on their way to the disk: {os.strerror(code)}",
                    where={"file": path},
                    fix=f"check the disk; {RESUME}",
                )

    def _error(self, fault: RecordFault, done: str) -> RecperfError:
        """The error for a user: table, row and file."""
        table, start = (int(one) for one in self._parts(np.asarray(fault.row)))
        path, row = self.paths[table], fault.row - start
        what = f"row {row:,} of table {_quoted(self.names[table])}"
        where: dict[str, object] = {"file": path}
        if fault.fault is Fault.SYSTEM:
            return _system_error(f"{what} cannot be {done}", fault.code, where, self._files.handles[table])
        cause = {
            Fault.SHORT: "is missing: its file became shorter",
            Fault.EMPTY: "is missing: its place in the file is empty",
            Fault.OTHER_ROW: "is missing: its place in the file holds another row",
            Fault.DAMAGED: "is damaged: its checksum does not match",
        }[fault.fault]
        return DataError(f"{what} {cause}", where=where, fix=f"check the disk and who else writes there; {RESUME}")


def _system_error(what: str, code: int, where: dict[str, object], handle: int) -> MachineError:
    if code in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            disk = os.fstatvfs(handle)
            where = {**where, "free": size(disk.f_bavail * disk.f_frsize)}
        cause = "the disk is full" if code == errno.ENOSPC else "the disk quota is used up"
        return MachineError(f"{what}: {cause}", where=where, fix=f"free some space; {RESUME}")
    if code == errno.EFBIG:
        return MachineError(
            f"{what}: the file may not become larger", where=where, fix=f"ulimit -f unlimited; {RESUME}"
        )
    return MachineError(f"{what}: {os.strerror(code)}", where=where, fix=f"check the disk; {RESUME}")


def _mapping(count: int) -> mmap.mmap:
    """Memory of the process alone that is taken page by page when it is written first."""
    try:
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise MachineError(
            f"this machine refuses {size(count)} of memory for the tables: {getattr(error, 'strerror', None) or error}",
            where=machine.address_space(),
            fix="--tables.placement file",
        ) from None
    # Rows are written side by side, so that they fill a huge page before they take another one.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _create(path: Path, stack: ExitStack) -> int:
    with writing(path, fix=ELSEWHERE):
        handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        stack.callback(os.close, handle)
        if hasattr(os, "posix_fadvise"):
            # Nothing is gained from reading what lies beside a row.
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
    return handle


def _path(folder: Path, number: int, name: str) -> Path:
    """The file of a table, whose name may hold anything."""
    return folder / f"{number:04d}-{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:80]}{SUFFIX}"


def _quoted(name: str) -> str:
    return shorten_middle(repr(name), 80)


def _require_call(store: RowStore, rows_N: Rows, name: str, values_NW: Values) -> None:
    if rows_N.dtype != np.int64 or rows_N.ndim != 1 or not rows_N.flags.c_contiguous:
        raise ArgumentError(
            f"rows_N is {rows_N.dtype} of shape {rows_N.shape}; it must be contiguous int64 of one dimension"
        )
    shape = len(rows_N), store.width
    if values_NW.dtype != np.float32 or values_NW.shape != shape or not values_NW.flags.c_contiguous:
        raise ArgumentError(
            f"{name} is {values_NW.dtype} of shape {values_NW.shape}; it must be contiguous float32 of shape {shape}"
        )
    require_rows(rows_N, store.rows)
