"""A state as it goes to disk: a tree of JSON values for the manifest, with the tensors in files.

The manifest describes every tensor by its path in the tree ("trial/model/top.0.weight"): shape, dtype, and the
rectangles it was written in, each with its file, the key in that file and its place. A tensor that one process holds
is a single rectangle, under its path. Of a table in tiers the rows that were ever trained are written, as two tensors:
their numbers, ascending, and their values; a few JSON values describe what the others begin as.

Shapes: R rows of a tensor, W width, N rows that were written, n rows of a chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from ..machine import available_bytes
from ..models.init import Fill, initial_rows
from ..models.tiers.columns import TableColumns, table_columns
from ..units import size
from . import checkpoint_tensors as tensors
from .checkpoint_folder import FORMAT, Manifest, Rectangle, StoredFile, StoredShard, StoredTensor
from .checkpoint_tensors import (
    DTYPE_NAMES,
    DTYPES,
    ChunkedTensor,
    Piece,
    Sharded,
    TensorFile,
    by_file,
    fill,
    write_tensors,
)
from .loop import State

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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
        return replace(content, tree=content._value(state, ()))

    def copied(self, copies: dict[str, Tensor]) -> Content:
        """The same in host memory, where training does not change it; from a GPU by copies that overlap, waited for
        once. The copies of tensors stay in `copies` and are overwritten by the next call, so that memory is allocated
        once."""
        for piece in self.pieces:
            copy, tensor = copies.get(piece.key), piece.tensor
            if isinstance(tensor, ChunkedTensor):
                copies[piece.key] = tensor.copied()
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
        return sum(piece.tensor.nbytes for piece in self.pieces if isinstance(piece.tensor, ChunkedTensor))

    def _value(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor | Sharded | TableColumns):
            return {"$tensor": self._take(value, _shown(path))}
        if isinstance(value, dict):
            pairs = [(key, self._value(inner, (*path, key))) for key, inner in value.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return dict(pairs)
            if any(not isinstance(key, str | int) or isinstance(key, bool) for key in value):
                raise TypeError(f"a key in {_shown(path)} is neither a string nor an integer")
            return {"$pairs": [list(pair) for pair in pairs]}
        if isinstance(value, list | tuple):
            return [self._value(inner, (*path, index)) for index, inner in enumerate(value)]
        if isinstance(value, float):
            # JSON has no NaN and no infinities.
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if value is None or isinstance(value, str | bool | int):
            return value
        raise TypeError(f"{_shown(path)} is a {type(value).__name__}, which a checkpoint cannot hold")

    def _take(self, tensor: Tensor | Sharded | TableColumns, path: str) -> str:
        if path in self.tensors:
            raise TypeError(f"two tensors of the state have the path {path}")
        initial = None
        if isinstance(tensor, TableColumns):
            width, initial = math.prod(tensor.shape[1:]), tensor.initial
            self.pieces.extend(_written_rows(path, tensor, width))
        elif isinstance(tensor, Sharded):
            width = tensor.width
            for place, part, written in tensor.shards:
                if written:
                    key = f"{path}@{place.first_row},{place.first_column}"
                    self.pieces.append(Piece(path, place, key, part.detach(), True))
        else:
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise TypeError(f"{path} is not a dense tensor, which a checkpoint cannot hold")
            tensor = tensor.detach().resolve_conj().resolve_neg()
            place = _whole(tuple(tensor.shape))
            width = place.columns
            self.pieces.append(Piece(path, place, path, tensor))
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{path} is a tensor of {tensor.dtype}, which a checkpoint cannot hold")
        dtype = DTYPE_NAMES[tensor.dtype]
        self.tensors[path] = StoredTensor(shape=tuple(tensor.shape), dtype=dtype, width=width, initial=initial)
        return path

    def write(self, folder: Path, *, rank: int = 0) -> Written:
        """Write the tensors into synced files of this rank; those that are not sharded are rank 0's."""
        written = Written({}, {})
        own = [piece for piece in self.pieces if piece.sharded or not rank]
        for number, pieces in enumerate(by_file(own)):
            name = f"rank{rank}-{number:05d}.safetensors"
            written.files[name] = write_tensors(folder / name, {piece.key: piece.tensor for piece in pieces})
            for piece in pieces:
                shard = StoredShard(file=name, key=piece.key, place=piece.place)
                written.shards.setdefault(piece.path, []).append(shard)
        return written

    def manifest(self, written: list[Written], *, step: int, best: bool, when: str) -> Manifest:
        """The manifest of the state, from what all ranks wrote."""
        for path, tensor in self.tensors.items():
            tensor.shards = tuple(shard for each in written for shard in each.shards.get(path, []))
        return Manifest(
            format=FORMAT,
            step=step,
            best=best,
            when=when,
            files={name: facts for each in written for name, facts in each.files.items()},
            tensors=self.tensors,
            state=self.tree,
        )


def _written_rows(path: str, columns: TableColumns, width: int) -> Iterator[Piece]:
    """The numbers of rows and their values, which are read when they are written: a copy of all may not fit into
    memory."""
    rows_N = columns.rows()
    if len(rows_N):
        yield Piece(path, Rectangle(0, len(rows_N), 0, 1), f"{path}@rows", rows_N, True)
        values = ChunkedTensor(
            shape=(len(rows_N), *columns.shape[1:]),
            dtype=columns.dtype,
            read=lambda start, stop: columns.values(rows_N[start:stop]),
        )
        yield Piece(path, Rectangle(0, len(rows_N), 0, width), f"{path}@values", values, True)


def _whole(shape: tuple[int, ...]) -> Rectangle:
    return Rectangle(0, shape[0] if shape else 1, 0, math.prod(shape[1:]))


def _shown(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path)) or "the state"


@dataclass(frozen=True)
class StateReader:
    """Reads a state whose digests hold; a manifest or a header that makes no sense is some error."""

    folder: Path
    manifest: Manifest
    _open: dict[str, TensorFile] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    """Tensors that were read: a few bytes of a state must not name one a thousand times."""

    def read(self, into: Any = None) -> Any:
        """The state; its tensors are those of `into`, where that has one of the same path, shape and dtype."""
        for columns in table_columns(into):
            if columns.written():
                columns.clear()
        try:
            return self._value(self.manifest.state, into)
        finally:
            for file in self._open.values():
                file.close()

    def _value(self, value: Any, into: Any) -> Any:
        if isinstance(value, list):
            targets = into[: len(value)] if isinstance(into, list | tuple) else []
            return [self._value(inner, target) for inner, target in itertools.zip_longest(value, targets)]
        if not isinstance(value, dict):
            return value
        if "$tensor" in value:
            path = value["$tensor"]
            if path in self._read:
                raise ValueError(f"the state has {path!r} twice")
            self._read.add(path)
            return self._tensor(path, into)
        if "$float" in value:
            return _NOT_FINITE[value["$float"]]
        into = into if isinstance(into, dict) else {}
        pairs = value["$pairs"] if "$pairs" in value else value.items()
        return {key: self._value(inner, into.get(key)) for key, inner in pairs}

    def _tensor(self, path: str, into: Any) -> Tensor | Sharded | TableColumns:
        about = self.manifest.tensors[path]
        shape, dtype, some_rows = about.shape, DTYPES[about.dtype], about.initial is not None
        self._require_sense(about, dtype)
        in_place = isinstance(into, Sharded | TableColumns) or (some_rows and isinstance(into, Tensor))
        if in_place and (tuple(into.shape) != shape or into.dtype != dtype):
            # Nothing fits: a tensor that only has a shape says so to whoever compares.
            return torch.empty(shape, dtype=dtype, device="meta")
        if isinstance(into, TableColumns):
            self._load(about, into)
            return into
        if isinstance(into, Sharded):
            for shard in into.shards:
                self._fill(about, shard.tensor, shard.place)
            return into
        tensor: Tensor
        if _fits(into, shape, dtype):
            tensor = into.detach()
        else:
            nbytes = math.prod(shape) * dtype.itemsize
            if some_rows and nbytes > available_bytes():
                raise MemoryError(f"{path} of {size(nbytes)} does not fit into memory")
            tensor = torch.empty(shape, dtype=dtype)
        self._fill(about, tensor, _whole(shape)._replace(columns=about.width))
        return tensor

    def _require_sense(self, about: StoredTensor, dtype: torch.dtype) -> None:
        if about.initial is None:
            if math.prod(about.shape) * dtype.itemsize > sum(file.bytes for file in self.manifest.files.values()):
                raise ValueError(f"a tensor of shape {about.shape} is larger than the files of this checkpoint")
            return
        if len(about.shape) not in (1, 2) or min(about.shape) < 1:
            raise ValueError(f"a table cannot have the shape {about.shape}")
        # Of each process that trained rows their numbers and their values.
        counts = [shard.place.rows for shard in about.shards]
        if counts[::2] != counts[1::2] or any(count < 1 for count in counts):
            raise ValueError("a table has no valid number of rows")

    def _load(self, about: StoredTensor, into: TableColumns) -> None:
        """Load rows into a table in tiers, in which none was written yet; of a whole tensor those that do not have
        their initial bits."""
        if about.initial is not None:
            if into.initial != about.initial:
                raise ValueError(f"its rows begin as {about.initial}, those of this model as {into.initial}")
            for rows_n, values in self._chunks(about):
                into.load(rows_n, values)
            return
        fill, size = initial_rows(into.initial, into.shape), _rows_at_a_time(into.shape, into.dtype)
        starts = [(start, block) for block in into.blocks for start in range(block.first_row, block.end, size)]
        for start, block in starts:
            values = torch.empty(min(size, block.end - start), *into.shape[1:], dtype=into.dtype)
            initial = torch.empty_like(values)
            self._fill(about, values, Rectangle(start, len(values), 0, about.width))
            fill(initial, start)
            differs_n = (_bits(values) != _bits(initial)).any(dim=1)
            if differs_n.any():
                into.load(differs_n.nonzero().flatten() + start, values[differs_n])

    def _fill(self, about: StoredTensor, out: Tensor, place: Rectangle) -> None:
        """Fill a plain tensor, the rectangle of this one at `place`; where some rows are stored, over initial ones."""
        if about.initial is not None:
            _fill_rectangle_(out, place, initial_rows(about.initial, about.shape), about.shape)
            columns = slice(place.first_column, place.first_column + place.columns)
            for rows_n, values in self._chunks(about):
                # They are ascending.
                first, stop = torch.searchsorted(rows_n, torch.tensor([place.first_row, place.first_row + place.rows]))
                own = values[first:stop, columns] if out.dim() == 2 else values[first:stop]
                out.index_copy_(0, (rows_n[first:stop] - place.first_row).to(out.device), own.to(out.device))
            return
        shards: Sequence[StoredShard] = about.shards
        if len(shards) == 1 and shards[0].place == place:
            self._file(shards[0].file).read(shards[0].key, about.shape, out)
            return
        if len(about.shape) == 1 and about.width == 1:
            # One process wrote the numbers of rows without knowing how wide those are.
            stop = place.first_column + place.columns
            shards = [structs.replace(shard, place=shard.place._replace(columns=stop)) for shard in shards]
        fill(place, out, shards, self._read_shard)

    def _read_shard(self, shard: StoredShard, into: Tensor, row: int, column: int) -> None:
        shape = (shard.place.rows, shard.place.columns)[: into.dim()]
        self._file(shard.file).read(shard.key, shape, into, row, column)

    def _chunks(self, about: StoredTensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The stored rows of a table and their values, a chunk at a time."""
        shape, dtype = about.shape, DTYPES[about.dtype]
        step = _rows_at_a_time(shape, dtype)
        for numbers, values in zip(about.shards[::2], about.shards[1::2]):
            count, last = numbers.place.rows, -1
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
        if name not in self.manifest.files:
            raise ValueError(f"{name!r} is not a file of this checkpoint")
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
        return self._open[name]


def _rows_at_a_time(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """How many rows of a tensor are a chunk."""
    return min(shape[0], max(1, tensors.CHUNK // (dtype.itemsize * (shape[1] if len(shape) == 2 else 1))))


def _fill_rectangle_(out: Tensor, place: Rectangle, fill: Fill, shape: tuple[int, ...]) -> None:
    """Fill the rectangle of a table at `place` with initial rows."""
    if out.is_contiguous() and out.shape[1:] == shape[1:]:
        fill(out, place.first_row)
        return
    size = _rows_at_a_time(shape, out.dtype)
    for start in range(0, place.rows, size):
        part = out[start : start + size]
        scratch = torch.empty(len(part), *shape[1:], dtype=out.dtype, device=out.device)
        fill(scratch, place.first_row + start)
        columns = slice(place.first_column, place.first_column + place.columns)
        part.copy_(scratch if out.dim() == 1 else scratch[:, columns])


def _bits(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).view(torch.uint8)


def _fits(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor can be read into: each element needs a place of its own, those of an expanded one share one."""
    if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != dtype:
        return False
    separate = all(stride or size < 2 for size, stride in zip(shape, tensor.stride()))
    return separate and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
