"""A state as it goes to disk: a tree of JSON values for the manifest, with the tensors in files.

The manifest describes every tensor by its path in the tree ("trial/model/top.0.weight"): shape, dtype, and the
rectangles it was written in, each with its file, the key in that file and its place. A tensor that one process holds
is a single rectangle, under its path. Of a table in tiers the rows that were ever trained are written, as two tensors:
their numbers, ascending, and their values; a few JSON values describe what the others begin as.

Row-wise Adagrad has one number for each row of a rectangle. A rectangle that is read where the stored ones have other
columns gets the mean of their numbers, weighted by the columns they share: over all columns that is the number a
single process would have, and rectangles of a whole row begin with the row's number.

Files are safetensors: an 8-byte length, a JSON header with dtype, shape and place of every tensor, and the bytes. The
library would map a file into memory to read it. There an input/output error kills the process, and every page read
counts as memory of the process; reading with `pread` does neither and goes straight into the tensors of a model.

Shapes: R rows of a tensor, N rows that were written, n rows of a chunk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files import open_regular
from ..jsonfile import decode
from ..machine import available_bytes
from ..models.init import initial_rows
from ..models.tiers.columns import Rectangle, Sharded, TableColumns, TrainedRows, table_columns
from ..units import size
from .checkpoint_folder import CHUNK, StoredFile, StoredShard, StoredTensor, SyncedFile, decoded, encoded
from .loop import State

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor | TrainedRows]) -> StoredFile:
    """Write a safetensors file in one pass, and return its size and digest."""
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
            whole = tensor.reshape(1) if isinstance(tensor, Tensor) and tensor.dim() == 0 else tensor
            count = max(1, CHUNK * whole.shape[0] // max(1, whole.nbytes))
            for start in range(0, whole.shape[0], count):
                file.write(_bytes_of(whole[start : start + count].contiguous().cpu()))
    return file.facts


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
            if not 2 <= length <= self.size - 8:
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


class Piece(NamedTuple):
    """A tensor, or a rectangle of one, as this process writes it."""

    path: str
    place: Rectangle
    key: str
    tensor: Tensor | TrainedRows
    sharded: bool = False


class Written(NamedTuple):
    """What one process wrote: size and digest of its files, and what is in them by the paths of tensors."""

    files: dict[str, StoredFile]
    shards: dict[str, list[StoredShard]]


@dataclass(frozen=True, kw_only=True)
class Content:
    """A state, ready to be written."""

    tree: Any
    tensors: dict[str, StoredTensor]
    """By path, without their shards; sharded tensors too, which other ranks write parts of."""
    pieces: list[Piece]

    @classmethod
    def of(cls, state: State) -> Content:
        content = cls(tree=None, tensors={}, pieces=[])
        return replace(content, tree=encoded(state, content._take))

    def copied(self, copies: dict[str, Tensor]) -> Content:
        """The same in host memory, where training does not change it; from a GPU by copies that overlap, waited for
        once. The copies of tensors stay in `copies` and are overwritten by the next call, so that memory is allocated
        once."""
        for piece in self.pieces:
            copy, tensor = copies.get(piece.key), piece.tensor
            if isinstance(tensor, TrainedRows):
                copies[piece.key] = tensor[:]
                continue
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = copies[piece.key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copy.copy_(tensor, non_blocking=True)
        own = [piece.tensor for piece in self.pieces if isinstance(piece.tensor, Tensor)]
        for device in {tensor.device for tensor in own if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return replace(self, pieces=[piece._replace(tensor=copies[piece.key]) for piece in self.pieces])

    @property
    def nbytes(self) -> int:
        """Bytes that this process writes, at least."""
        return sum(piece.tensor.nbytes for piece in self.pieces)

    @property
    def tiered_bytes(self) -> int:
        """Those of tables in tiers, which no one has in memory at once."""
        return sum(piece.tensor.nbytes for piece in self.pieces if isinstance(piece.tensor, TrainedRows))

    def _take(self, tensor: Any, path: str) -> bool:
        """Take a tensor of the state; false for any other value."""
        if not isinstance(tensor, Tensor | Sharded | TableColumns):
            return False
        if path in self.tensors:
            raise TypeError(f"two tensors of the state have the path {path}")
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{path} is a tensor of {tensor.dtype}, which a checkpoint cannot hold")
        initial = None
        if isinstance(tensor, TableColumns):
            width, initial, rows_N = math.prod(tensor.shape[1:]), tensor.initial, tensor.rows()
            if count := len(rows_N):
                rows = TrainedRows(tensor, rows_N)
                self.pieces.append(Piece(path, Rectangle(0, count, 0, 1), f"{path}@rows", rows_N, True))
                self.pieces.append(Piece(path, Rectangle(0, count, 0, width), f"{path}@values", rows, True))
        elif isinstance(tensor, Sharded):
            width = tensor.width
            for place, part, written in tensor.shards:
                if written:
                    key = f"{path}@{place.first_row},{place.first_column}"
                    self.pieces.append(Piece(path, place, key, part.detach(), True))
        else:
            place = _whole(tuple(tensor.shape))
            width = place.columns
            self.pieces.append(Piece(path, place, path, tensor.detach()))
        dtype = DTYPE_NAMES[tensor.dtype]
        self.tensors[path] = StoredTensor(shape=tuple(tensor.shape), dtype=dtype, width=width, initial=initial)
        return True

    def write(self, folder: Path, *, rank: int = 0) -> Written:
        """Write the tensors into a synced file of this rank; those that are not sharded are rank 0's."""
        written, name = Written({}, {}), f"rank{rank}-00000.safetensors"
        if own := [piece for piece in self.pieces if piece.sharded or not rank]:
            written.files[name] = write_tensors(folder / name, {piece.key: piece.tensor for piece in own})
        for piece in own:
            shard = StoredShard(file=name, key=piece.key, place=piece.place)
            written.shards.setdefault(piece.path, []).append(shard)
        return written


def _whole(shape: tuple[int, ...]) -> Rectangle:
    return Rectangle(0, shape[0] if shape else 1, 0, math.prod(shape[1:]))


@dataclass(frozen=True)
class StateReader:
    """Reads a state whose digests hold; a description or a header that makes no sense is some error."""

    folder: Path
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    _open: dict[str, TensorFile] = field(default_factory=dict)

    def read(self, tree: Any, into: Any = None) -> Any:
        """The state; its tensors are those of `into`, where that has one of the same path, shape and dtype."""
        for columns in table_columns(into):
            if columns.written():
                columns.clear()
        try:
            return decoded(tree, into, self._tensor)
        finally:
            for file in self._open.values():
                file.close()

    def _tensor(self, path: str, into: Any) -> Tensor | Sharded | TableColumns:
        about = self.tensors[path]
        shape, dtype, some_rows = about.shape, DTYPES[about.dtype], about.initial is not None
        alike = isinstance(into, Tensor | Sharded | TableColumns) and (tuple(into.shape), into.dtype) == (shape, dtype)
        if not alike and (isinstance(into, Sharded | TableColumns) or (some_rows and isinstance(into, Tensor))):
            # Nothing fits: a tensor that only has a shape says so to whoever compares.
            return torch.empty(shape, dtype=dtype, device="meta")
        if isinstance(into, TableColumns):
            self._load(about, into)
            return into
        if isinstance(into, Sharded):
            for shard in into.shards:
                self._fill(about, shard.tensor, shard.rectangle)
            return into
        if alike:
            tensor: Tensor = into.detach()
        else:
            nbytes = math.prod(shape) * dtype.itemsize
            if some_rows and nbytes > available_bytes():
                raise MemoryError(f"{path} of {size(nbytes)} does not fit into memory")
            if not some_rows and nbytes > sum(file.bytes for file in self.files.values()):
                raise ValueError(f"a tensor of shape {shape} is larger than the files of this checkpoint")
            tensor = torch.empty(shape, dtype=dtype)
        self._fill(about, tensor, _whole(shape)._replace(columns=about.width))
        return tensor

    def _load(self, about: StoredTensor, into: TableColumns) -> None:
        """Load rows into a table in tiers, in which none was written yet; of a whole tensor those that do not have
        their initial bits."""
        if about.initial is not None:
            if into.initial != about.initial:
                raise ValueError(f"its rows begin as {about.initial}, those of this model as {into.initial}")
            for rows_n, values in self._chunks(about):
                into.load(rows_n, values)
            return
        fill, count = initial_rows(into.initial, into.shape), _rows_at_a_time(into.shape, into.dtype)
        starts = [(start, block) for block in into.blocks for start in range(block.first_row, block.end, count)]
        for start, block in starts:
            values = torch.empty(min(count, block.end - start), *into.shape[1:], dtype=into.dtype)
            initial = torch.empty_like(values)
            self._fill(about, values, Rectangle(start, len(values), 0, about.width))
            fill(initial, start)
            bits, initial_bits = (one.reshape(len(one), -1).view(torch.uint8) for one in (values, initial))
            differs_n = (bits != initial_bits).any(dim=1)
            if differs_n.any():
                into.load(differs_n.nonzero().flatten() + start, values[differs_n])

    def _fill(self, about: StoredTensor, out: Tensor, place: Rectangle) -> None:
        """Fill a plain tensor, the rectangle of this one at `place`; where some rows are stored, over initial ones."""
        if about.initial is not None:
            self._fill_some(about, out, place)
            return
        stored = [(shard, Rectangle(*shard.place)) for shard in about.shards]
        if len(stored) == 1 and stored[0][1] == place:
            self._file(stored[0][0].file).read(stored[0][0].key, about.shape, out)
            return
        if len(about.shape) == 1 and about.width == 1:
            # One process wrote the numbers of rows without knowing how wide those are.
            stop = place.first_column + place.columns
            stored = [(shard, whole._replace(columns=stop)) for shard, whole in stored]
        sources = [(shard, whole, common) for shard, whole in stored if (common := whole.overlap(place)).area]
        if sum(common.area for _, _, common in sources) != place.area:
            raise ValueError(f"rows {place.first_row} to {place.first_row + place.rows} are incomplete or stored twice")
        means = out.dim() == 1 and any(common.columns != place.columns for _, _, common in sources)
        # In float64, so that the mean of equal numbers is that number to the bit.
        means_R = torch.zeros(place.rows if means else 0, dtype=torch.float64)
        for shard, whole, common in sources:
            row, column = common.first_row - place.first_row, common.first_column - place.first_column
            part = torch.empty(common.rows, dtype=out.dtype) if means else out[row : row + common.rows]
            if out.dim() == 2:
                part = part[:, column : column + common.columns]
            begin = common.first_row - whole.first_row, common.first_column - whole.first_column
            self._file(shard.file).read(shard.key, (whole.rows, whole.columns)[: out.dim()], part, *begin)
            if means:
                means_R[row : row + common.rows] += part.double() * (common.columns / place.columns)
        if means:
            out.copy_(means_R)

    def _fill_some(self, about: StoredTensor, out: Tensor, place: Rectangle) -> None:
        assert about.initial is not None
        fill, count = initial_rows(about.initial, about.shape), _rows_at_a_time(about.shape, out.dtype)
        columns = (slice(place.first_column, place.first_column + place.columns),) if out.dim() == 2 else ()
        for start in range(0, place.rows, count):
            part = out[start : start + count]
            scratch = torch.empty(len(part), *about.shape[1:], dtype=out.dtype, device=out.device)
            fill(scratch, place.first_row + start)
            part.copy_(scratch[:, *columns])
        for rows_n, values in self._chunks(about):
            # They are ascending.
            first, stop = torch.searchsorted(rows_n, torch.tensor([place.first_row, place.first_row + place.rows]))
            own = values[first:stop, *columns]
            out.index_copy_(0, (rows_n[first:stop] - place.first_row).to(out.device), own.to(out.device))

    def _chunks(self, about: StoredTensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The stored rows of a table and their values, a chunk at a time."""
        shape, dtype = about.shape, DTYPES[about.dtype]
        step = _rows_at_a_time(shape, dtype)
        # Of each process that trained rows their numbers and their values.
        for numbers, values in zip(about.shards[::2], about.shards[1::2], strict=True):
            count, last = numbers.place[1], -1
            for start in range(0, count, step):
                rows_n = torch.empty(min(step, count - start), dtype=torch.int64)
                values_n = torch.empty(len(rows_n), *shape[1:], dtype=dtype)
                self._file(numbers.file).read(numbers.key, (count,), rows_n, start)
                self._file(values.file).read(values.key, (count, *shape[1:]), values_n, start)
                ascending = bool((rows_n.diff() > 0).all()) and int(rows_n[0]) > last
                last = int(rows_n[-1])
                if not ascending or last >= shape[0]:
                    raise ValueError(f"rows in {numbers.file} are not ascending numbers below {shape[0]}")
                yield rows_n, values_n

    def _file(self, name: str) -> TensorFile:
        if name not in self.files:
            raise ValueError(f"{name!r} is not a file of this checkpoint")
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
        return self._open[name]


def _rows_at_a_time(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """How many rows of a tensor are a chunk."""
    return min(shape[0], max(1, CHUNK // (dtype.itemsize * (shape[1] if len(shape) == 2 else 1))))
