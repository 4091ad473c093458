"""NumPy's .npy files: mapped read-only, and written in blocks without holding a whole column in memory."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ....errors import DataError, MachineError
from ....files import atomic_file
from .. import store
from ..store import BlockDigests, map_file


def header(dtype: str, length: int) -> bytes:
    """The header that numpy.save writes for a one-dimensional array; its size is the same for every length."""
    buffer = io.BytesIO()
    fields = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def map_npy(path: Path, dtype: str, length: int | None = None, *, of: str, fix: str) -> NDArray[Any]:
    """Map a one-dimensional .npy file; any other content is an error that names the dataset `of`."""

    def unusable(reason: str) -> DataError:
        return DataError(f"{of} cannot be used: {path.name} {reason}", where={"file": path}, fix=fix)

    if not path.is_file():
        raise unusable("is missing")
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, actual = read(file)
            offset = file.tell()
    except (ValueError, EOFError, SyntaxError):
        raise unusable("has no .npy header") from None
    except OSError as error:
        raise MachineError(
            f"{path.name} cannot be read: {error.strerror}", where={"file": path}, fix="check its permissions"
        ) from error
    if actual != np.dtype(dtype) or len(shape) != 1:
        raise unusable(f"holds {actual} {list(shape)}, not one column of {np.dtype(dtype)}")
    if length is not None and shape[0] != length:
        raise unusable(f"holds {shape[0]:,} values, not {length:,}")
    size, expected = path.stat().st_size, offset + shape[0] * actual.itemsize
    if size != expected:
        raise unusable(f"has {size:,} bytes, not the {expected:,} its header states")
    return map_file(path, "|u1", expected)[offset:].view(actual)


class DigestedFile:
    """A file that computes the digests of its blocks while it is written; pyarrow can write to it."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digests = file, BlockDigests([])
        self._first: str | None = None

    def write(self, content: Any) -> int:
        part = memoryview(content).cast("B")
        self._digests.update(part)
        return self._file.write(part)

    def write_start(self, content: bytes) -> None:
        """Overwrite the beginning after everything else is written."""
        self._file.seek(0)
        self._file.write(content)
        self._file.seek(0)
        self._first = hashlib.sha256(self._file.read(store.DIGEST_BLOCK)).hexdigest()
        self._file.seek(0, os.SEEK_END)

    def flush(self) -> None:
        self._file.flush()

    def blocks(self) -> list[str]:
        """Digests of all blocks."""
        blocks = self._digests.all()
        return blocks if self._first is None else [self._first, *blocks[1:]]


@contextmanager
def digested_file(path: Path, *, fix: str) -> Iterator[DigestedFile]:
    """An atomically written file with digests of its blocks."""
    with atomic_file(path, fix=fix) as file:
        yield DigestedFile(file)


def save_blocks(path: Path, dtype: str, blocks: Iterable[NDArray[Any]], *, fix: str) -> list[str]:
    """Write a .npy file from blocks whose total length is not known before. Returns the digests of the file."""
    length = 0
    with digested_file(path, fix=fix) as file:
        file.write(header(dtype, 0))
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).view(np.uint8).data)
            length += len(block)
        file.write_start(header(dtype, length))
    return file.blocks()
