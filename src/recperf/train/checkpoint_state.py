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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..machine import available_bytes
from ..models.init import Fill, initial_rows
from ..models.tiers.columns import TableColumns, table_columns
from ..units import size
from . import checkpoint_tensors as tensors
from .checkpoint_tensors import (
    DTYPE_NAMES,
    DTYPES,
    ChunkedTensor,
    Rectangle,
    Sharded,
    StoredShard,
    TensorFile,
    fill,
    write_tensors,
)

FILE_BYTES = 1 << 30
"""A file takes further tensors until it has this size."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Piece(NamedTuple):
    """A tensor, or a rectangle of one, as this process writes it."""

    path: str
    place: Rectangle
    key: str
    tensor: Tensor | ChunkedTensor
    sharded: bool = False

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Written(NamedTuple):
    """What one process wrote: size and digest of its files, and what is in them by the paths of tensors."""

    files: dict[str, dict[str, Any]]
    shards: dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Content:
    """A state, ready to be written."""

    tree: Any
    tensors: dict[str, dict[str, Any]]
    """Shape, dtype and width by path; of sharded tensors too, which other ranks write parts of."""
    pieces: list[Piece]

    @classmethod
    def of(cls, state: dict[str, Any]) -> Content:
        content = cls(tree=None, tensors={}, pieces=[])
        return replace(content, tree=content._value(state, ()))

    def copied(self, host_copies: dict[str, Tensor]) -> Content:
        """The same in host memory, where training does not change it. The copies of tensors stay in `host_copies` and
        are overwritten by the next call, so that memory is allocated once."""
        return replace(self, pieces=_copied(self.pieces, host_copies))

    @property
    def nbytes(self) -> int:
        """Bytes that this process writes, at least."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def tiered_bytes(self) -> int:
        """Those of tables in tiers, which no one has in memory at once."""
        return sum(piece.nbytes for piece in self.pieces if isinstance(piece.tensor, ChunkedTensor))

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
        described = {}
        if isinstance(tensor, TableColumns):
            width = math.prod(tensor.shape[1:])
            described = {"initial": tensor.initial}
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
        about = {"shape": list(tensor.shape), "dtype": DTYPE_NAMES[tensor.dtype], "width": width}
        self.tensors[path] = {**about, **described}
        return path

    def write(self, folder: Path, *, rank: int = 0) -> Written:
        """Write the tensors into synced files of this rank; those that are not sharded are rank 0's."""
        written = Written({}, {})
        own = [piece for piece in self.pieces if piece.sharded or not rank]
        for number, pieces in enumerate(_by_file(own)):
            name = f"rank{rank}-{number:05d}.safetensors"
            written.files[name] = write_tensors(folder / name, {piece.key: piece.tensor for piece in pieces})
            for piece in pieces:
                entry = {"file": name, "key": piece.key, "place": list(piece.place)}
                written.shards.setdefault(piece.path, []).append(entry)
        return written

    def manifest(self, written: list[Written]) -> dict[str, Any]:
        """What the manifest says of the state, from what all ranks wrote."""
        tensors = {
            path: {**about, "shards": [shard for each in written for shard in each.shards.get(path, [])]}
            for path, about in self.tensors.items()
        }
        files = {name: facts for each in written for name, facts in each.files.items()}
        return {"files": files, "tensors": tensors, "state": self.tree}


def _written_rows(path: str, columns: TableColumns, width: int) -> Iterator[Piece]:
    """The numbers of rows and their values, which are read when they are written: a copy of all may not fit into
    memory."""
    rows_N = columns.rows()
    if len(rows_N):
        yield Piece(path, Rectangle(0, len(rows_N), 0, 1), f"{path}@rows", rows_N)
        values = ChunkedTensor(
            shape=(len(rows_N), *columns.shape[1:]),
            dtype=columns.dtype,
            read=lambda start, stop: columns.values(rows_N[start:stop]),
        )
        yield Piece(path, Rectangle(0, len(rows_N), 0, width), f"{path}@values", values)


def _by_file(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    together: list[Piece] = []
    size = 0
    for piece in pieces:
        if together and size + piece.nbytes > FILE_BYTES:
            yield together
            together, size = [], 0
        together.append(piece)
        size += piece.nbytes
    if together:
        yield together


def _whole(shape: tuple[int, ...]) -> Rectangle:
    return Rectangle(0, shape[0] if shape else 1, 0, math.prod(shape[1:]))


def _copied(pieces: list[Piece], copies: dict[str, Tensor]) -> list[Piece]:
    """The same in host memory; from a GPU by copies that overlap, waited for once."""
    for piece in pieces:
        copy, tensor = copies.get(piece.key), piece.tensor
        if isinstance(tensor, ChunkedTensor):
            copies[piece.key] = tensor.copied()
            continue
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = copies[piece.key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copy.copy_(tensor, non_blocking=True)
    for device in {
        piece.tensor.device for piece in pieces if isinstance(piece.tensor, Tensor) and piece.tensor.is_cuda
    }:
        torch.cuda.synchronize(device)
    return [piece._replace(tensor=copies[piece.key]) for piece in pieces]


def _shown(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path)) or "the state"


def _stored(about: dict[str, Any]) -> list[StoredShard]:
    return [StoredShard(Rectangle(*each["place"]), each["file"], each["key"]) for each in about["shards"]]


@dataclass(frozen=True)
class StoredRows:
    """A table of which a checkpoint holds some rows; what makes no sense is a ValueError."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: dict[str, Any]
    shards: list[StoredShard]
    """The numbers of the rows and their values; none where no row was ever trained."""
    open_file: Callable[[str], TensorFile]

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2) or any(type(size) is not int or size < 1 for size in self.shape):
            raise ValueError(f"a table cannot have the shape {self.shape}")
        counts = [shard.place.rows for shard in self.shards]
        if len(counts) not in (0, 2) or any(
            type(count) is not int or count != counts[0] or count < 1 for count in counts
        ):
            raise ValueError("a table has no valid number of rows")

    def load(self, into: TableColumns) -> None:
        """Load the rows into a table in tiers, in which none was written yet."""
        if into.initial != self.initial:
            raise ValueError(f"its rows begin as {self.initial}, those of this model as {into.initial}")
        for rows_n, values in self._chunks():
            into.load(rows_n, values)

    def fill_(self, out: Tensor, place: Rectangle) -> None:
        """Fill a plain tensor, the rectangle of this one at `place`: initial rows, and over them those written."""
        _fill_rectangle_(out, place, initial_rows(self.initial, self.shape), self.shape)
        columns = slice(place.first_column, place.first_column + place.columns)
        for rows_n, values in self._chunks():
            # They are ascending.
            first, stop = torch.searchsorted(rows_n, torch.tensor([place.first_row, place.first_row + place.rows]))
            own = values[first:stop, columns] if out.dim() == 2 else values[first:stop]
            out.index_copy_(0, (rows_n[first:stop] - place.first_row).to(out.device), own.to(out.device))

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their values, a chunk at a time."""
        if not self.shards:
            return
        numbers, values = self.shards
        count, step, last = numbers.place.rows, _rows_at_a_time(self.shape, self.dtype), -1
        for start in range(0, count, step):
            rows_n = torch.empty(min(step, count - start), dtype=torch.int64)
            values_n = torch.empty(len(rows_n), *self.shape[1:], dtype=self.dtype)
            file = self.open_file(numbers.file)
            file.read(numbers.key, (count,), rows_n, start)
            self.open_file(values.file).read(values.key, (count, *self.shape[1:]), values_n, start)
            ascending = bool((rows_n.diff() > 0).all()) and int(rows_n[0]) > last
            last = int(rows_n[-1])
            if not ascending or last >= self.shape[0]:
                raise ValueError(f"rows in {file.name} are not ascending numbers below {self.shape[0]}")
            yield rows_n, values_n


def _rows_at_a_time(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """How many rows of a tensor are a chunk."""
    return min(shape[0], max(1, tensors.CHUNK // (dtype.itemsize * (shape[1] if len(shape) == 2 else 1))))


def _fill_rectangle_(out: Tensor, place: Rectangle, fill: Fill, shape: tuple[int, ...]) -> None:
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


def _load_plain(into: TableColumns, read: Callable[[int, Tensor], None]) -> None:
    """Load all rows of a plain tensor, which `read` gives from a row on; those with their initial bits are skipped."""
    fill, size = initial_rows(into.initial, into.shape), _rows_at_a_time(into.shape, into.dtype)
    for start in range(0, into.shape[0], size):
        values = torch.empty(min(size, into.shape[0] - start), *into.shape[1:], dtype=into.dtype)
        initial = torch.empty_like(values)
        read(start, values)
        fill(initial, start)
        differs_n = (_bits(values) != _bits(initial)).any(dim=1)
        if differs_n.any():
            into.load(differs_n.nonzero().flatten() + start, values[differs_n])


def _bits(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).view(torch.uint8)


@dataclass(frozen=True)
class StateReader:
    """Reads a state whose digests hold; a manifest or a header that makes no sense is some error."""

    folder: Path
    manifest: dict[str, Any]
    _open: dict[str, TensorFile] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    """Tensors that were read: a few bytes of a state must not name one a thousand times."""

    def read(self, into: Any = None) -> Any:
        """The state; its tensors are those of `into`, where that has one of the same path, shape and dtype."""
        for columns in table_columns(into):
            if columns.written():
                columns.clear()
        try:
            return self._value(self.manifest["state"], into)
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
            about = self.manifest["tensors"][path]
            return self._rows(path, about, into) if "initial" in about else self._tensor(about, into)
        if "$float" in value:
            return _NOT_FINITE[value["$float"]]
        into = into if isinstance(into, dict) else {}
        pairs = value["$pairs"] if "$pairs" in value else value.items()
        return {key: self._value(inner, into.get(key)) for key, inner in pairs}

    def _rows(self, path: str, about: dict[str, Any], into: Any) -> Tensor | Sharded | TableColumns:
        """A table of which some rows are stored."""
        shape, dtype = tuple(about["shape"]), DTYPES[about["dtype"]]
        stored = StoredRows(shape, dtype, about["initial"], _stored(about), self._file)
        target: Tensor | Sharded | TableColumns = into
        if not isinstance(into, Tensor | Sharded | TableColumns) or (isinstance(into, Tensor) and not _separate(into)):
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes > available_bytes():
                raise MemoryError(f"{path} of {size(nbytes)} does not fit into memory")
            target = torch.empty(shape, dtype=dtype)
        if tuple(target.shape) != shape or target.dtype != dtype:
            return torch.empty(shape, dtype=dtype, device="meta")
        if isinstance(target, Sharded):
            for shard in target.shards:
                stored.fill_(shard.tensor, shard.place)
        elif isinstance(target, Tensor):
            target = target.detach()
            stored.fill_(target, _whole(shape))
        else:
            stored.load(target)
        return target

    def _tensor(self, about: dict[str, Any], into: Any) -> Tensor | Sharded | TableColumns:
        shape, dtype, width = tuple(about["shape"]), DTYPES[about["dtype"]], about["width"]
        stored = _stored(about)
        if isinstance(into, Sharded):
            if into.shape != shape or into.dtype != dtype:
                # Nothing fits: a tensor that only has a shape says so to whoever compares.
                return torch.empty(shape, dtype=dtype, device="meta")
            if len(shape) == 1 and width == 1:
                # One process wrote the numbers of rows without knowing how wide those are.
                widened = [shard.place._replace(columns=into.width) for shard in stored]
                stored = [shard._replace(place=place) for shard, place in zip(stored, widened)]
            for shard in into.shards:
                fill(shard.place, shard.tensor, stored, self._fill_from)
            return into
        if math.prod(shape) * dtype.itemsize > sum(file["bytes"] for file in self.manifest["files"].values()):
            raise ValueError(f"a tensor of shape {shape} is larger than the files of this checkpoint")
        if isinstance(into, TableColumns):
            if into.shape != shape or into.dtype != dtype:
                return torch.empty(shape, dtype=dtype, device="meta")
            _load_plain(
                into, lambda row, rows: fill(Rectangle(row, len(rows), 0, width), rows, stored, self._fill_from)
            )
            return into
        tensor = into.detach() if _fits(into, shape, dtype) else torch.empty(shape, dtype=dtype)
        if len(stored) == 1 and stored[0].place == Rectangle(*_whole(shape)[:3], width):
            self._file(stored[0].file).read(stored[0].key, shape, tensor)
        else:
            # Several ranks wrote what one process now reads.
            fill(Rectangle(0, shape[0], 0, width), tensor, stored, self._fill_from)
        return tensor

    def _fill_from(self, shard: StoredShard, into: Tensor, row: int, column: int) -> None:
        shape = (shard.place.rows, shard.place.columns)[: into.dim()]
        self._file(shard.file).read(shard.key, shape, into, row, column)

    def _file(self, name: str) -> TensorFile:
        if name not in self.manifest["files"]:
            raise ValueError(f"{name!r} is not a file of this checkpoint")
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
        return self._open[name]


def _fits(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor can be read into."""
    return isinstance(tensor, Tensor) and tensor.shape == shape and tensor.dtype == dtype and _separate(tensor)


def _separate(tensor: Tensor) -> bool:
    """Whether each element has a place of its own: those of an expanded tensor share one."""
    separate = all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride()))
    return separate and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def tensor_bytes(value: Any) -> int:
    """The bytes of all tensors in a tree; of one in tiers those of the rows that were written, and their numbers."""
    if isinstance(value, Tensor | Sharded):
        return value.nbytes
    if isinstance(value, TableColumns):
        return value.written() * (math.prod(value.shape[1:]) * value.dtype.itemsize + torch.int64.itemsize)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(tensor_bytes, inner))


def shape_mismatch(ours: Any, saved: Any, path: str = "") -> str | None:
    """The first tensor that has another shape in a saved tree, in a line; none where all that are in both agree."""
    kinds = Tensor | Sharded | TableColumns
    if isinstance(ours, kinds) and isinstance(saved, kinds):
        if tuple(ours.shape) == tuple(saved.shape):
            return None
        return f"{path} is {tuple(ours.shape)}, the checkpoint's {tuple(saved.shape)}"
    if isinstance(ours, dict) and isinstance(saved, dict):
        pairs = [(key, ours[key], saved[key]) for key in ours if key in saved]
    elif isinstance(ours, list | tuple) and isinstance(saved, list | tuple):
        pairs = [(index, *pair) for index, pair in enumerate(zip(ours, saved))]
    else:
        return None
    mismatches = (shape_mismatch(one, other, f"{path}/{key}" if path else str(key)) for key, one, other in pairs)
    return next((text for text in mismatches if text), None)
