"""NumPy's .npy files: mapped read-only, and written in blocks without holding a whole column in memory."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import DataError, MachineError
from ....files import atomic_file
from ..store import map_file


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


def save_npy(path: Path, dtype: str, blocks: Iterable[NDArray[Any]], *, fix: str) -> None:
    """Write a .npy file from blocks whose total length is not known before."""
    length = 0
    with atomic_file(path, fix=fix) as file:
        file.write(header(dtype, 0))
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).view(np.uint8).data)
            length += len(block)
        file.seek(0)
        file.write(header(dtype, length))
