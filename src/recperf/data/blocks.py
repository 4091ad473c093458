"""Mapped columns whose blocks are compared with their digests when they are first read.

Each block of a file has a SHA-256. A process verifies a block once, before anything in it is used, so that later reads
cost nothing. Threads hash several blocks at once.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, MachineError
from ..files import NOT_FILES, digest_of, open_dataset_file
from ..jsonfile import Count, Struct
from ..machine import usable_cores

MOST_THREADS = 16

Rows = slice | int | NDArray[Any] | Sequence[int]


class Blocks:
    """The blocks of a mapped file, and which of them were compared with their digests. Thread-safe.

    `damaged` makes the error from the file and what is wrong with it.
    """

    def __init__(
        self,
        path: Path,
        content: NDArray[np.uint8],
        digests: Sequence[str],
        *,
        block: int,
        damaged: Callable[[Path, str], DataError],
    ) -> None:
        self.path, self.block, self.bytes = path, block, len(content)
        self._content, self._digests, self.damaged = content, digests, damaged
        if len(digests) != -(-len(content) // block):
            raise damaged(path, f"has {-(-len(content) // block):,} blocks and {len(digests):,} checksums")
        self._verified = np.zeros(len(digests), np.bool_)
        self.complete = not len(digests)
        """Whether every block was compared."""
        self._lock = Lock()

    @property
    def verified_bytes(self) -> int:
        ends = np.minimum((np.flatnonzero(self._verified) + 1) * self.block, len(self._content))
        return int((ends - np.flatnonzero(self._verified) * self.block).sum())

    def require(self, first: Any, stop: Any) -> None:
        """Compare the blocks of some ranges of bytes with their digests; the first difference is an error.

        A range begins at an entry of `first` and ends before the same entry of `stop`.
        """
        if self.complete:
            return
        first, stop = np.atleast_1d(first), np.atleast_1d(stop)
        begin = first // self.block
        end = np.where(stop > first, -(-stop // self.block), begin)
        length = len(self._verified) + 1
        covered = np.cumsum(np.bincount(begin, minlength=length) - np.bincount(end, minlength=length))[:-1] > 0
        if (covered & ~self._verified).any():
            # One thread at a time: others that need the same blocks wait for them instead of hashing them too.
            with self._lock:
                self._compare(np.flatnonzero(covered & ~self._verified))

    def _compare(self, blocks: NDArray[np.int64]) -> None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)  # The ranks of a host share its cores.
        threads = min(MOST_THREADS, usable_cores() // ranks, len(blocks))
        if threads < 2:
            for block in blocks.tolist():
                self._compare_one(block)
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="recperf-digests") as pool:
                list(pool.map(self._compare_one, blocks.tolist()))
        self._verified[blocks] = True
        self.complete = bool(self._verified.all())

    def _compare_one(self, block: int) -> None:
        first = block * self.block
        if hashlib.sha256(self._content[first : first + self.block].data).hexdigest() != self._digests[block]:
            raise self.damaged(self.path, f"differs from its checksum in block {block} (from byte {first:,})")


class Column:
    """A mapped column. What is read of it is first compared with its digests, if it has any."""

    def __init__(self, array: NDArray[Any], blocks: Blocks | None = None) -> None:
        self.array, self.blocks = array, blocks
        self._width = array.nbytes // max(1, len(array))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: Rows) -> NDArray[Any]:
        if self.blocks is not None and not self.blocks.complete:
            if isinstance(rows, slice):
                if within := range(*rows.indices(len(self))):
                    self.require(min(within[0], within[-1]), max(within[0], within[-1]) + 1)
            else:
                positions = np.asarray(rows)
                if positions.dtype == np.bool_:
                    positions = np.flatnonzero(np.broadcast_to(positions, len(self)))
                positions = positions.astype(np.int64).ravel()
                positions = np.where(positions < 0, positions + len(self), positions)
                self.require(positions, positions + 1)
        return np.asarray(self.array[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self[:], dtype, copy=copy)

    def require(self, first: Any, stop: Any) -> None:
        """Verify ranges of rows; after that, `array` may be read there without this class."""
        if self.blocks is not None and not self.blocks.complete:
            first, stop = np.atleast_1d(np.asarray(first, np.int64)), np.atleast_1d(np.asarray(stop, np.int64))
            if ((first < 0) | (stop > len(self))).any():
                raise self.blocks.damaged(
                    self.blocks.path,
                    f"has {len(self):,} rows, not {first.min():,} to {stop.max() - 1:,}",
                )
            self.blocks.require(first * self._width, stop * self._width)


class StoredColumn(Struct, omit_defaults=True):
    """The file of a column, as the manifest of its folder describes it."""

    bytes: Count
    blocks: list[str]
    """Digests of its blocks."""
    dtype: str = ""

    @staticmethod
    def of(path: Path, dtype: str = "", *, block: int) -> StoredColumn:
        """Describe a file with the digests of its blocks."""
        size = path.stat().st_size
        with path.open("rb") as file:
            return StoredColumn(bytes=size, dtype=dtype, blocks=[digest_of(file, block) for _ in range(0, size, block)])

    def mapped(
        self, path: Path, dtype: str, *, block: int, damaged: Callable[[Path, str], DataError], width: int = 0
    ) -> Column:
        """The file as a column, mapped shared and read-only, of `width` values in a row (0: one, not in a list)."""
        try:
            with open_dataset_file(path) as file:
                size = file.seek(0, 2)
                content = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) if size else b""
        except OSError as error:
            if error.errno in NOT_FILES:
                raise damaged(path, "is missing, or is not a file") from None
            what = f"{path.name} cannot be read: {error.strerror or error}"
            raise MachineError(what, where={"file": path}, fix="check its permissions and the disk") from error
        if size != self.bytes:
            raise damaged(path, f"has {size:,} bytes, not the {self.bytes:,} its manifest states")
        array = np.frombuffer(content, dtype)
        blocks = Blocks(path, array.view(np.uint8), self.blocks, block=block, damaged=damaged)
        return Column(array.reshape(-1, width) if width else array, blocks)


def verified(columns: Iterable[Column]) -> dict[str, int]:
    """Bytes of these columns' files that this process compared with their digests, and how many they have."""
    files = [
        (column.blocks.verified_bytes, column.blocks.bytes) if column.blocks else (0, column.array.nbytes)
        for column in columns
    ]
    return {"bytes": sum(done for done, _ in files), "of": sum(total for _, total in files)}
