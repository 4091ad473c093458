"""A state as it goes to disk: a tree of JSON values for the manifest, with the tensors in files.

The manifest describes every tensor by its path in the tree ("trial/model/top.0.weight"): shape, dtype, and the
rectangles it was written in, each with its file, the key in that file and its place. A tensor that one process holds
is a single rectangle, under its path. One whose rows lie in tiers has increments of rows instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..machine import available_bytes
from ..units import size
from .checkpoint_file import DTYPE_NAMES, DTYPES, TensorFile, write_tensors
from .checkpoint_rows import Chain, ChangedRows, Increment, StoredRows, TieredTensor, link, load_plain, tiered_tensors
from .checkpoint_shards import Rectangle, Sharded, StoredShard, fill

FILE_BYTES = 1 << 30
"""A file takes further tensors until it has this size."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Piece(NamedTuple):
    """A tensor, or a rectangle of one, as this process writes it."""

    path: str
    place: Rectangle
    key: str
    tensor: Tensor
    sharded: bool

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Written(NamedTuple):
    """What one process wrote: size and digest of its files, and what is in them by the paths of tensors."""

    files: dict[str, dict[str, Any]]
    shards: dict[str, list[dict[str, Any]]]
    increments: dict[str, list[dict[str, Any]]]
    linked: set[str]
    """Files of earlier checkpoints, which were read back when they were written."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """A state, ready to be written."""

    tree: Any
    tensors: dict[str, dict[str, Any]]
    """Shape, dtype and width by path; of sharded tensors too, which other ranks write parts of."""
    pieces: list[Piece]
    tiered: dict[str, TieredTensor] = field(default_factory=dict)
    increment: Increment = field(default_factory=lambda: Increment(changes=[], generations={}, chain=None))
    """Of the tensors in tiers."""

    @classmethod
    def of(
        cls, state: dict[str, Any], *, host_copies: dict[str, Tensor] | None = None, chain: Chain | None = None
    ) -> Content:
        """Tensors in tiers continue the `chain`. With `host_copies` all are copied, as by `copied`."""
        content = cls(tree=None, tensors={}, pieces=[])
        tree = content._value(state, ())
        content = replace(content, tree=tree, increment=Increment.of(content.tiered, chain))
        return content if host_copies is None else content.copied(host_copies)

    def copied(self, host_copies: dict[str, Tensor]) -> Content:
        """The same in host memory, where training does not change it. The copies of tensors stay in `host_copies` and
        are overwritten by the next call, so that memory is allocated once."""
        increment = replace(self.increment, changes=[change.copied() for change in self.increment.changes])
        return replace(self, pieces=_copied(self.pieces, host_copies), increment=increment)

    @property
    def nbytes(self) -> int:
        """Bytes that this process writes, at least."""
        return self.increment.nbytes + sum(piece.nbytes for piece in self.pieces)

    def _value(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor | Sharded | TieredTensor):
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

    def _take(self, tensor: Tensor | Sharded | TieredTensor, path: str) -> str:
        if path in self.tensors:
            raise TypeError(f"two tensors of the state have the path {path}")
        described = {}
        if not isinstance(tensor, Tensor | Sharded):
            width = math.prod(tensor.shape[1:])
            self.tiered[path], described = tensor, {"initial": tensor.initial}
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
            self.pieces.append(Piece(path, place, path, tensor, False))
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{path} is a tensor of {tensor.dtype}, which a checkpoint cannot hold")
        about = {"shape": list(tensor.shape), "dtype": DTYPE_NAMES[tensor.dtype], "width": width}
        self.tensors[path] = {**about, **described}
        return path

    def write(self, folder: Path, *, rank: int = 0) -> Written:
        """Write the tensors into synced files of this rank; those that are not sharded are rank 0's."""
        written = Written({}, {}, {}, set())
        own = [piece for piece in self.pieces if piece.sharded or not rank]
        for number, pieces in enumerate(_by_file(own)):
            name = f"rank{rank}-{number:05d}.safetensors"
            written.files[name] = write_tensors(folder / name, {piece.key: piece.tensor for piece in pieces})
            for piece in pieces:
                entry = {"file": name, "key": piece.key, "place": list(piece.place)}
                written.shards.setdefault(piece.path, []).append(entry)
        if not rank:
            self._write_rows(folder, written)
        return written

    def _write_rows(self, folder: Path, written: Written) -> None:
        """Link the files of earlier increments, and write those of this one."""
        chain = self.increment.chain
        written.increments.update({path: [] for path in self.tiered})
        if chain:
            written.increments.update({path: list(entries) for path, entries in chain.increments.items()})
            written.files.update(chain.files)
            written.linked.update(name for name in chain.files if link(chain.folder / name, folder / name))
        parts = [part for change in self.increment.changes for part in change.parts(FILE_BYTES)]
        for number, changes in enumerate(_by_file(parts)):
            name = f"rows{self.increment.number}-{number:05d}.safetensors"
            tensors = {key: tensor for change in changes for key, tensor in change.tensors().items()}
            written.files[name] = write_tensors(folder / name, tensors)
            for change in changes:
                written.increments[change.path].append(change.entry(name))

    def manifest(self, written: list[Written]) -> dict[str, Any]:
        """What the manifest says of the state, from what all ranks wrote."""
        tensors = {
            path: {**about, "shards": [shard for each in written for shard in each.shards.get(path, [])]}
            for path, about in self.tensors.items()
        }
        for path in self.tiered:
            tensors[path]["increments"] = written[0].increments[path]
        files = {name: facts for each in written for name, facts in each.files.items()}
        return {"files": files, "tensors": tensors, "state": self.tree}

    def chain_at(self, folder: Path, written: list[Written]) -> Chain | None:
        """What the next checkpoint continues once this one is on disk in that folder."""
        if not self.tiered:
            return None
        return Chain.of(folder, self.manifest(written), self.increment.generations)


T = TypeVar("T", Piece, ChangedRows)


def _by_file(pieces: Iterable[T]) -> Iterator[list[T]]:
    together: list[T] = []
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
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = copies[piece.key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copy.copy_(tensor, non_blocking=True)
    for device in {piece.tensor.device for piece in pieces if piece.tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return [piece._replace(tensor=copies[piece.key]) for piece in pieces]


def _shown(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path)) or "the state"


@dataclass(frozen=True)
class StateReader:
    """Reads a state whose digests hold; a manifest or a header that makes no sense is some error."""

    folder: Path
    manifest: dict[str, Any]
    _open: dict[str, TensorFile] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    """Tensors that were read: a few bytes of a state must not name one a thousand times."""
    _loaded: dict[str, TieredTensor] = field(default_factory=dict)
    """Tensors in tiers that now have exactly the rows of this checkpoint, by path."""

    def read(self, into: Any = None) -> Any:
        """The state; its tensors are those of `into`, where that has one of the same path, shape and dtype."""
        for tensor in tiered_tensors(into):
            if tensor.written():
                tensor.clear()
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
            return self._rows(path, about, into) if "increments" in about else self._tensor(about, into)
        if "$float" in value:
            return _NOT_FINITE[value["$float"]]
        into = into if isinstance(into, dict) else {}
        pairs = value["$pairs"] if "$pairs" in value else value.items()
        return {key: self._value(inner, into.get(key)) for key, inner in pairs}

    def chain(self) -> Chain | None:
        """What the next checkpoint continues, if all tensors in tiers were loaded from increments."""
        generations = {path: tensor.changed(0)[1] for path, tensor in self._loaded.items()}
        return Chain.of(self.folder, self.manifest, generations) if generations else None

    def _rows(self, path: str, about: dict[str, Any], into: Any) -> Tensor | Sharded | TieredTensor:
        """A tensor that is stored as increments of rows."""
        shape, dtype = tuple(about["shape"]), DTYPES[about["dtype"]]
        stored = StoredRows(shape, dtype, about["initial"], about["increments"], self._file)
        target: Tensor | Sharded | TieredTensor = into
        if not isinstance(into, Tensor | Sharded | TieredTensor) or (isinstance(into, Tensor) and not _separate(into)):
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
            self._loaded[path] = target
        return target

    def _tensor(self, about: dict[str, Any], into: Any) -> Tensor | Sharded | TieredTensor:
        shape, dtype, width = tuple(about["shape"]), DTYPES[about["dtype"]], about["width"]
        stored = [StoredShard(Rectangle(*each["place"]), each["file"], each["key"]) for each in about["shards"]]
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
        if not isinstance(into, Tensor) and isinstance(into, TieredTensor):
            if into.shape != shape or into.dtype != dtype:
                return torch.empty(shape, dtype=dtype, device="meta")
            load_plain(into, lambda row, rows: fill(Rectangle(row, len(rows), 0, width), rows, stored, self._fill_from))
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
    if isinstance(value, TieredTensor):
        return value.written() * (math.prod(value.shape[1:]) * value.dtype.itemsize + torch.int64.itemsize)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(tensor_bytes, inner))


def shape_mismatch(ours: Any, saved: Any, path: str = "") -> str | None:
    """The first tensor that has another shape in a saved tree, in a line; none where all that are in both agree."""
    kinds = Tensor | Sharded | TieredTensor
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
