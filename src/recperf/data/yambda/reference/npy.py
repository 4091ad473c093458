"""NumPy's .npy files one block at a time: mapped where they lie, and written without ever holding a whole column."""

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
from ....files import sync_folder, writing
from .. import store
from ..store import BlockDigests, map_file


def header(dtype: str, length: int) -> bytes:
    """What numpy.save writes before a one-dimensional array. Its size is the same for every length."""
    text = io.BytesIO()
    described = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(text, described)
    return text.getvalue()


def map_npy(path: Path, dtype: str, length: int | None = None, *, of: str, fix: str) -> NDArray[Any]:
    """A one-dimensional .npy file, mapped shared and read-only; any other content is an error that calls it `of`."""

    def wrong(how: str) -> DataError:
        return DataError(f"{of} cannot be used: {path.name} {how}", where={"file": path}, fix=fix)

    if not path.is_file():
        raise wrong("is missing")
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, found = read(file)
            offset = file.tell()
    except (ValueError, EOFError, SyntaxError):
        raise wrong("does not begin as a .npy file does") from None
    except OSError as error:
        raise MachineError(
            f"{path.name} cannot be read: {error.strerror}", where={"file": path}, fix="check its permissions"
        ) from error
    if found != np.dtype(dtype) or len(shape) != 1:
        raise wrong(f"holds {found} {list(shape)}, not one column of {np.dtype(dtype)}")
    if length is not None and shape[0] != length:
        raise wrong(f"holds {shape[0]:,} values, not {length:,}")
    size, expected = path.stat().st_size, offset + shape[0] * found.itemsize
    if size != expected:
        raise wrong(f"has {size:,} bytes, not the {expected:,} its header states")
    return map_file(path, "|u1", expected)[offset:].view(found)


class Draft:
    """A file being written, and the digests of its blocks; as much of a file as pyarrow writes to."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digests = file, BlockDigests([])
        self._first: str | None = None

    def write(self, content: Any) -> int:
        part = memoryview(content).cast("B")
        self._digests.update(part)
        return self._file.write(part)

    def write_start(self, content: bytes) -> None:
        """Write over the beginning, once all else is written."""
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


def save_blocks(path: Path, dtype: str, blocks: Iterable[NDArray[Any]], *, fix: str) -> list[str]:
    """Write a .npy file from its blocks, however many they turn out to be. Answers with the file's digests."""
    length = 0
    with drafted(path, fix=fix) as file:
        file.write(header(dtype, 0))
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).view(np.uint8).data)
            length += len(block)
        file.write_start(header(dtype, length))
    return file.blocks()


@contextmanager
def drafted(path: Path, *, fix: str) -> Iterator[Draft]:
    """A file being written: it gets its name when it is whole and on the disk, or nothing of it remains."""
    beside = path.with_name(f".{path.name}.tmp")
    with writing(path, fix=fix):
        try:
            with beside.open("w+b") as file:
                yield Draft(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
