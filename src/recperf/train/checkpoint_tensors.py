"""Tensors in safetensors files, written in one pass with a digest, and those that ranks hold in rectangles of rows and
columns: what of the stored rectangles fills one of them.

The format is an 8-byte length, a JSON header with dtype, shape and place of every tensor, and the bytes. The library
would map a file into memory to read it. There an input/output error kills the process, and every page read counts as
memory of the process; reading with `pread` does neither and goes straight into the tensors of a model.

Row-wise Adagrad has one number for each row of a rectangle. A rectangle that is read where the stored ones have other
columns gets the mean of their numbers, weighted by the columns they share: over all columns that is the number a
single process would have, and rectangles of a whole row begin with the row's number.

Shapes: R rows, D width.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..files import open_regular
from ..jsonfile import decode
from ..models.tiers.columns import RowBlock, TableColumns
from .checkpoint_folder import Rectangle, StoredFile, StoredShard

CHUNK = 1 << 24
"""Bytes that are copied at a time where a tensor cannot be written or read in place."""
FILE_BYTES = 1 << 30
"""A file takes further tensors until it has this size."""
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000
"""Bytes, as in the safetensors library."""


class SyncedFile:
    """A new file that computes the digest of what is written to it and is on disk once it is closed."""

    def __init__(self, path: Path) -> None:
        self.handle = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, content: bytes | memoryview) -> None:
        left = memoryview(content)
        self.size += len(left)
        while len(left):
            # In chunks, so that the digest finds in the cache what was just copied to the disk's buffers.
            count = os.write(self.handle, left[:CHUNK])
            self.digest.update(left[:count])
            left = left[count:]

    def __enter__(self) -> SyncedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self.handle)
        finally:
            os.close(self.handle)

    @property
    def facts(self) -> StoredFile:
        """Size and digest as the manifest states them."""
        return StoredFile(bytes=self.size, sha256=self.digest.hexdigest())


def write_file(path: Path, content: bytes) -> StoredFile:
    with SyncedFile(path) as file:
        file.write(content)
    return file.facts


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkedTensor:
    """A tensor that is made some rows at a time, while it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    """The rows from one number up to another, contiguous in host memory."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[Tensor]:
        count = max(1, CHUNK * self.shape[0] // max(1, self.nbytes))
        for start in range(0, self.shape[0], count):
            yield self.read(start, min(start + count, self.shape[0]))

    def copied(self) -> Tensor:
        """All of it in host memory."""
        copy, start = torch.empty(self.shape, dtype=self.dtype), 0
        for rows in self.chunks():
            copy[start : start + len(rows)] = rows
            start += len(rows)
        return copy


def write_tensors(path: Path, tensors: Mapping[str, Tensor | ChunkedTensor]) -> StoredFile:
    """Write a safetensors file, and return its size and digest."""
    # Wide types first: then every tensor starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header, end = {}, 0
    for name, tensor in ordered:
        place = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with SyncedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for rows in tensor.chunks() if isinstance(tensor, ChunkedTensor) else _chunks(tensor):
                file.write(_bytes_of(rows.contiguous().cpu()))
    return file.facts


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor by rows; one that lies in host memory as it goes to the file needs no copies."""
    if tensor.dim() == 0 or tensor.numel() == 0 or (tensor.is_contiguous() and tensor.device.type == "cpu"):
        yield tensor
    else:
        count = max(1, CHUNK * tensor.shape[0] // tensor.nbytes)
        for start in range(0, tensor.shape[0], count):
            yield tensor[start : start + count]


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file to read from; a header that does not fit the file is a ValueError."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.handle = open_regular(path)
        try:
            self.size = os.fstat(self.handle).st_size
            length = int.from_bytes(self._bytes(8, 0), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, self.size - 8):
                raise ValueError(f"{self.name} has a header of {length} bytes in a file of {self.size}")
            self.start = 8 + length
            self.header = decode(self._bytes(length, 8))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.handle)

    def read(self, key: str, shape: tuple[int, ...], into: Tensor, row: int = 0, column: int = 0) -> None:
        """Fill a tensor from the one under `key`, which must have that shape, beginning at a row and a column.

        A tensor of two dimensions may be narrower than the stored one, others only have fewer rows.
        """
        first = self._first_byte(key, shape, into.dtype)
        if into.numel() == 0:
            return
        if into.dim() == 0:
            into, shape = into.view(1), (1,)
        row_bytes = math.prod(shape[1:]) * into.element_size()
        first += row * row_bytes
        if into.shape[1:] == shape[1:] and into.is_contiguous() and into.device.type == "cpu":
            self._read(_bytes_of(into), first)
            return
        count = min(into.shape[0], max(1, CHUNK // row_bytes))
        scratch = torch.empty(count, *shape[1:], dtype=into.dtype)
        for start in range(0, into.shape[0], count):
            rows = into[start : start + count]
            part = scratch[: rows.shape[0]]
            self._read(_bytes_of(part), first + start * row_bytes)
            rows.copy_(part if rows.shape == part.shape else part[:, column : column + rows.shape[1]])

    def _first_byte(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Where a tensor starts, once the header is known to state what is expected."""
        entry = self.header[key]
        first, end = entry["data_offsets"]
        if tuple(entry["shape"]) != shape or entry["dtype"] != DTYPE_NAMES[dtype]:
            raise ValueError(f"{key} in {self.name} is {entry['dtype']} {entry['shape']}, not {dtype} {list(shape)}")
        if first < 0 or end - first != math.prod(shape) * dtype.itemsize or self.start + end > self.size:
            raise ValueError(f"{key} in {self.name} cannot be at bytes {first} to {end}")
        return int(self.start + first)

    def _bytes(self, count: int, at: int) -> bytearray:
        content = bytearray(count)
        self._read(memoryview(content), at)
        return content

    def _read(self, into: memoryview, at: int) -> None:
        while len(into):
            count = os.preadv(self.handle, [into[:CHUNK]], at)
            if count == 0:
                raise ValueError(f"{self.name} ends at byte {at}")
            into, at = into[count:], at + count


class Shard(NamedTuple):
    """A rectangle of a tensor in this process."""

    place: Rectangle
    tensor: Tensor
    written: bool = True
    """Whether this process saves it; of copies on every rank only one does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharded:
    """A tensor that several ranks hold together. What they write covers the whole, and none of it twice."""

    shape: tuple[int, ...]
    """Of the whole: R and D, or R where there is one number for each row."""
    width: int
    """D."""
    shards: Sequence[Shard]
    """The rectangles in this process; loading a state fills them."""
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes in this process."""
        return sum(shard.tensor.nbytes for shard in self.shards)


def stacked(tensors: Sequence[Sharded | TableColumns]) -> Sharded | TableColumns:
    """Tensors of one width, one below the other, as one; all of them are in tiers, or none."""
    shards: list[Shard] = []
    blocks: list[RowBlock] = []
    rows = 0
    for tensor in tensors:
        if isinstance(tensor, Sharded):
            shards += [shard._replace(place=shard.place.below(rows)) for shard in tensor.shards]
        else:
            blocks += [block._replace(first_row=block.first_row + rows) for block in tensor.blocks]
        rows += tensor.shape[0]
    first, shape = tensors[0], (rows, *tensors[0].shape[1:])
    if isinstance(first, Sharded):
        return Sharded(shape=shape, width=first.width, dtype=first.dtype, shards=shards)
    initial = first.initial
    if initial["kind"] != "zero":
        parts = [{"rows": one.shape[0], "initial": one.initial} for one in tensors if not isinstance(one, Sharded)]
        initial = {"kind": "stacked", "parts": parts}
    return replace(first, shape=shape, blocks=blocks, initial=initial)


class Piece(NamedTuple):
    """A tensor, or a rectangle of one, as this process writes it."""

    path: str
    place: Rectangle
    key: str
    tensor: Tensor | ChunkedTensor
    sharded: bool = False


def by_file(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """What goes into each file, in order."""
    together: list[Piece] = []
    size = 0
    for piece in pieces:
        if together and size + piece.tensor.nbytes > FILE_BYTES:
            yield together
            together, size = [], 0
        together.append(piece)
        size += piece.tensor.nbytes
    if together:
        yield together


Read = Callable[[StoredShard, Tensor, int, int], None]
"""Fills a tensor from a stored rectangle, beginning at a row and a column of it."""


def fill(place: Rectangle, into: Tensor, stored: Iterable[StoredShard], read: Read) -> None:
    """Fill one rectangle from those that are stored."""
    sources = [(shard, common) for shard in stored if (common := shard.place.overlap(place)).area]
    if sum(common.area for _, common in sources) != place.area:
        raise ValueError(f"rows {place.first_row} to {place.first_row + place.rows} are incomplete or stored twice")
    if into.dim() == 1 and any(common.columns != place.columns for _, common in sources):
        into.copy_(_means(place, into.dtype, sources, read))
        return
    for shard, common in sources:
        row, column = common.first_row - place.first_row, common.first_column - place.first_column
        part = into[row : row + common.rows]
        if into.dim() == 2:
            part = part[:, column : column + common.columns]
        read(shard, part, common.first_row - shard.place.first_row, common.first_column - shard.place.first_column)


def _means(
    place: Rectangle, dtype: torch.dtype, sources: Iterable[tuple[StoredShard, Rectangle]], read: Read
) -> Tensor:
    # In float64, so that the mean of equal numbers is that number to the bit.
    means_R = torch.zeros(place.rows, dtype=torch.float64)
    for shard, common in sources:
        part = torch.empty(common.rows, dtype=dtype)
        read(shard, part, common.first_row - shard.place.first_row, 0)
        start = common.first_row - place.first_row
        means_R[start : start + common.rows] += part.double() * (common.columns / place.columns)
    return means_R
