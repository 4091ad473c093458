"""A state as it goes to disk: a tree of JSON values for the manifest, with the tensors in files.

The manifest describes every tensor by its path in the tree ("trial/model/top.0.weight"): shape, dtype, and the
rectangles it was written in, each with its file, the key in that file and its place. A tensor that one process holds
is a single rectangle, under its path.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checkpoint_file import DTYPE_NAMES, DTYPES, TensorFile, write_tensors
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


class Written(NamedTuple):
    """What one process wrote: size and digest of its files, and the rectangles in them by the paths of tensors."""

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
    def of(cls, state: dict[str, Any], *, host_copies: dict[str, Tensor] | None = None) -> Content:
        """With `host_copies` the tensors are copied to host memory, where training does not change them. The copies
        stay in that dictionary and are overwritten by the next call, so that memory is allocated once."""
        content = cls(tree=None, tensors={}, pieces=[])
        tree = content._value(state, ())
        pieces = content.pieces if host_copies is None else _copied(content.pieces, host_copies)
        return cls(tree=tree, tensors=content.tensors, pieces=pieces)

    def _value(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor | Sharded):
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

    def _take(self, tensor: Tensor | Sharded, path: str) -> str:
        if path in self.tensors:
            raise TypeError(f"two tensors of the state have the path {path}")
        if isinstance(tensor, Sharded):
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
        self.tensors[path] = {"shape": list(tensor.shape), "dtype": DTYPE_NAMES[tensor.dtype], "width": width}
        return path

    def write(self, folder: Path, *, rank: int = 0) -> Written:
        """Write the tensors into synced files of this rank; those that are not sharded are rank 0's."""
        written = Written({}, {})
        for number, pieces in enumerate(self._by_file(rank)):
            name = f"rank{rank}-{number:05d}.safetensors"
            written.files[name] = write_tensors(folder / name, {piece.key: piece.tensor for piece in pieces})
            for piece in pieces:
                entry = {"file": name, "key": piece.key, "place": list(piece.place)}
                written.shards.setdefault(piece.path, []).append(entry)
        return written

    def _by_file(self, rank: int) -> Iterator[list[Piece]]:
        pieces: list[Piece] = []
        size = 0
        for piece in self.pieces:
            if rank and not piece.sharded:
                continue
            if pieces and size + piece.tensor.nbytes > FILE_BYTES:
                yield pieces
                pieces, size = [], 0
            pieces.append(piece)
            size += piece.tensor.nbytes
        if pieces:
            yield pieces

    def manifest(self, written: list[Written]) -> dict[str, Any]:
        """What the manifest says of the state, from what all ranks wrote."""
        tensors = {
            path: {**about, "shards": [shard for each in written for shard in each.shards.get(path, [])]}
            for path, about in self.tensors.items()
        }
        files = {name: facts for each in written for name, facts in each.files.items()}
        return {"files": files, "tensors": tensors, "state": self.tree}


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

    def read(self, into: Any = None) -> Any:
        """The state; its tensors are those of `into`, where that has one of the same path, shape and dtype."""
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
            return self._tensor(self.manifest["tensors"][path], into)
        if "$float" in value:
            return _NOT_FINITE[value["$float"]]
        into = into if isinstance(into, dict) else {}
        pairs = value["$pairs"] if "$pairs" in value else value.items()
        return {key: self._value(inner, into.get(key)) for key, inner in pairs}

    def _tensor(self, about: dict[str, Any], into: Any) -> Tensor | Sharded:
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
    """Whether a tensor can be read into: elements that share memory, as of an expanded one, cannot."""
    if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != dtype:
        return False
    separate = all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride()))
    return separate and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def tensor_bytes(value: Any) -> int:
    """The bytes of all tensors in a tree."""
    if isinstance(value, Tensor | Sharded):
        return value.nbytes
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(tensor_bytes, inner))


def shape_mismatch(ours: Any, saved: Any, path: str = "") -> str | None:
    """The first tensor that has another shape in a saved tree, in a line; none where all that are in both agree."""
    if isinstance(ours, Tensor | Sharded) and isinstance(saved, Tensor | Sharded):
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
