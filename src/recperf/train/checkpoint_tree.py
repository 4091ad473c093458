"""A state as it goes to disk: a tree of JSON values with tensors taken out, and the tensors in a few blocks.

Small tensors share one block of bytes, so that a model of a hundred of them costs no more than its bytes; large ones
are cut along their first axis, so that no more than a piece is ever in memory beside them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .checkpoint_parts import Divided, Means, Rectangle, Stored, Wanted, read_parts, wanted_of

SMALL = 1 << 16
"""Bytes up to which a tensor goes into the shared block."""
PIECE = 1 << 27
"""Bytes of a piece of a large tensor, and of a file."""
SHARED = "small"
_ALIGNED = 16
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, kw_only=True)
class Content:
    """A state, ready to be written."""

    tree: bytes
    blocks: dict[str, Tensor]
    parts: dict[str, Tensor] = field(default_factory=dict)
    """This process's parts of tensors that are divided among several."""
    divided: bool = False
    """Whether there are such tensors."""

    @classmethod
    def of(cls, state: dict[str, Any], *, room: dict[str, Tensor] | None = None) -> Content:
        """With `room` a copy in host memory, which training does not change; it is made there and fills it, so that
        the next one finds memory that is there already."""
        taken = _Taken()
        tree = taken.value(state, ())
        tree_bytes = json.dumps({"tree": tree, "tensors": taken.described}, allow_nan=False).encode()
        blocks = taken.blocks()
        return cls(
            tree=tree_bytes,
            blocks=blocks if room is None else _copied(blocks, room),
            parts=taken.parts(),
            divided=any(isinstance(tensor, Divided) for tensor in taken.tensors),
        )


@dataclass
class _Taken:
    """Tensors taken out of a tree, in their order."""

    tensors: list[Tensor | Divided] = field(default_factory=list)
    described: list[dict[str, Any]] = field(default_factory=list)
    end: int = 0

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor):
            return {"$tensor": self._take(value, path)}
        if isinstance(value, Divided):
            return {"$tensor": self._take_divided(value, path)}
        if isinstance(value, dict):
            pairs = [(key, self.value(inner, (*path, key))) for key, inner in value.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return dict(pairs)
            if any(not isinstance(key, str | int) or isinstance(key, bool) for key in value):
                raise TypeError(f"a key in {_shown(path)} is neither a string nor a whole number")
            return {"$pairs": [list(pair) for pair in pairs]}
        if isinstance(value, list | tuple):
            return [self.value(inner, (*path, index)) for index, inner in enumerate(value)]
        if isinstance(value, float):
            # JSON has no word for these.
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if value is None or isinstance(value, str | bool | int):
            return value
        raise TypeError(f"{_shown(path)} is a {type(value).__name__}, which a checkpoint cannot hold")

    def _take(self, tensor: Tensor, path: tuple[Any, ...]) -> int:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(f"{_shown(path)} is a tensor without plain numbers, which a checkpoint cannot hold")
        plain = tensor.detach().resolve_conj().resolve_neg()
        number = len(self.tensors)
        about: dict[str, Any] = {
            "name": _shown(path),
            "shape": list(plain.shape),
            "dtype": str(plain.dtype).removeprefix("torch."),
        }
        if plain.nbytes <= SMALL:
            about["start"] = self.end
            self.end += _padded(plain.nbytes)
        self.tensors.append(plain)
        self.described.append(about)
        return number

    def _take_divided(self, tensor: Divided, path: tuple[Any, ...]) -> int:
        self.tensors.append(tensor)
        self.described.append(
            {
                "name": _shown(path),
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "width": tensor.width,
                "parts": [list(part) for part in tensor.parts],
            }
        )
        return len(self.tensors) - 1

    def blocks(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        small: list[Tensor] = []
        for number, (tensor, about) in enumerate(zip(self.tensors, self.described)):
            if isinstance(tensor, Divided):
                continue
            if "start" in about:
                small.append(_as_bytes(tensor))
            else:
                found.update(_cut(tensor, _whole_name(number)))
        if self.end:
            found[SHARED] = _joined(small)
        return found

    def parts(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for tensor, about in zip(self.tensors, self.described):
            if isinstance(tensor, Divided):
                for number, part in tensor.ours.items():
                    found.update(_cut(part.detach(), _part_name(about, number)))
        return found


def _whole_name(number: int) -> str:
    return f"tensor-{number:05d}"


def _part_name(about: dict[str, Any], number: int) -> str:
    """After where it stands in the tree, which is the same on every process; numbers of tensors may not be."""
    return f"{about['name']}-part-{number:05d}"


def _cut(tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    """A large tensor under the names of its pieces, as views."""
    for piece, start, rows in _pieces(name, tuple(tensor.shape), tensor.dtype):
        yield piece, tensor[start : start + rows]


def _pieces(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[str, int, int]]:
    """Names, first rows and rows of a tensor's pieces."""
    each = max(1, PIECE * shape[0] // (math.prod(shape) * dtype.itemsize))
    for index, start in enumerate(range(0, shape[0], each)):
        yield f"{name}-{index:05d}", start, min(each, shape[0] - start)


def _joined(parts: list[Tensor]) -> Tensor:
    """Bytes one behind the other, each at a multiple of 16. One copy from each device, however many tensors."""
    devices = {part.device for part in parts}
    if len(devices) == 1:
        return torch.cat(parts).cpu()
    starts = [0, *itertools.accumulate(part.numel() for part in parts)]
    found = torch.empty(starts[-1], dtype=torch.uint8)
    for device in devices:
        here = [(start, part) for start, part in zip(starts, parts) if part.device == device]
        joined, at = torch.cat([part for _, part in here]).cpu(), 0
        for start, part in here:
            found[start : start + part.numel()] = joined[at : at + part.numel()]
            at += part.numel()
    return found


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    lacking = -flat.numel() % _ALIGNED
    return torch.nn.functional.pad(flat, (0, lacking)) if lacking else flat


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _copied(blocks: dict[str, Tensor], room: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in host memory; from a GPU by copies that overlap, waited for once."""
    for name, block in blocks.items():
        there = room.get(name)
        if there is None or there.shape != block.shape or there.dtype != block.dtype:
            room[name] = torch.empty(block.shape, dtype=block.dtype, pin_memory=block.is_cuda)
        room[name].copy_(block, non_blocking=True)
    for device in {block.device for block in blocks.values() if block.is_cuda}:
        torch.cuda.synchronize(device)
    return {name: room[name] for name in blocks}


def _shown(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path)) or "the state"


def tensor_bytes(value: Any) -> int:
    """Of all tensors in a tree."""
    if isinstance(value, Tensor | Divided):
        return value.nbytes
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(tensor_bytes, inner))


class Rebuilt:
    """Room for a state that is about to be read: where `into` has a tensor that fits, that tensor itself."""

    def __init__(self, content: bytes, into: Any = None) -> None:
        read = json.loads(content)
        self.described, self.tree = read["tensors"], read["tree"]
        self.tensors: dict[int, Tensor | Divided] = {}
        self._match(self.tree, into)
        self._shared = torch.empty(
            sum(_padded(_size(about)) for about in self.described if "start" in about), dtype=torch.uint8
        )
        size = (self._shared.numel(),)
        self.wanted: list[Wanted] = [Wanted(SHARED, size, (0,), size, self._shared)] if size[0] else []
        """What is to be read."""
        self._means = Means()
        for number in self.tensors:
            self._want(number, self.described[number])

    def _match(self, tree: Any, into: Any) -> None:
        if isinstance(tree, list):
            fitting = into if isinstance(into, list | tuple) else []
            for inner, other in itertools.zip_longest(tree, fitting[: len(tree)]):
                self._match(inner, other)
        elif isinstance(tree, dict) and "$tensor" in tree:
            self.tensors[tree["$tensor"]] = _room(into, self.described[tree["$tensor"]])
        elif isinstance(tree, dict):
            for key, inner in tree.get("$pairs", tree.items()):
                self._match(inner, into.get(key) if isinstance(into, dict) else None)

    def _want(self, number: int, about: dict[str, Any]) -> None:
        room, shape, dtype = self.tensors[number], tuple(about["shape"]), _dtype(about)
        if "start" in about or (isinstance(room, Tensor) and room.is_meta):
            return
        if "parts" in about:
            # A single process that reads what several wrote holds all of it.
            whole = Rectangle(0, shape[0], 0, about["width"])
            held = room.held if isinstance(room, Divided) else [(whole, room)]
            self.wanted += wanted_of(shape, _stored(about, shape, dtype), held, self._means)
            return
        pieces = _pieces(_whole_name(number), shape, dtype)
        if isinstance(room, Divided):
            rows = [Stored(name, Rectangle(start, count, 0, room.width)) for name, start, count in pieces]
            self.wanted += wanted_of(shape, rows, room.held, self._means)
            return
        for name, start, count in pieces:
            part = (count, *shape[1:])
            self.wanted.append(Wanted(name, part, (0,) * len(part), part, room[start : start + count]))

    def state(self) -> Any:
        """The state, once all that is wanted was read."""
        for number, room in self.tensors.items():
            about = self.described[number]
            if "start" not in about or (isinstance(room, Tensor) and room.is_meta):
                continue
            part = self._shared[about["start"] : about["start"] + _size(about)]
            whole = part.view(_dtype(about)).reshape(about["shape"])
            if isinstance(room, Tensor):
                room.copy_(whole)
                continue
            for place, into in room.held:
                columns = slice(place.first_column, place.first_column + place.columns)
                rows = whole[place.first_row : place.first_row + place.rows]
                into.copy_(rows[:, columns] if rows.dim() == 2 else rows)
        self._means.finish()
        return self._value(self.tree)

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        if "$tensor" in value:
            return self.tensors[value["$tensor"]]
        if "$float" in value:
            return _NOT_FINITE[value["$float"]]
        return {key: self._value(inner) for key, inner in value.get("$pairs", value.items())}


def _room(into: Any, about: dict[str, Any]) -> Tensor | Divided:
    """Where a tensor goes: into what there is, if it fits, else into a new one; a divided one of another shape is not
    read, and only says its shape."""
    if isinstance(into, Divided):
        return into if list(into.shape) == about["shape"] else torch.empty(about["shape"], device="meta")
    if isinstance(into, Tensor) and _fits(into, about):
        return into.detach()
    return torch.empty(about["shape"], dtype=_dtype(about))


def _stored(about: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Stored]:
    """The pieces of a divided tensor's parts."""
    for number, part in enumerate(read_parts(about)):
        size = (part.rows, part.columns) if len(shape) == 2 else (part.rows,)
        for name, start, rows in _pieces(_part_name(about, number), size, dtype):
            yield Stored(name, Rectangle(part.first_row + start, rows, part.first_column, part.columns))


def _fits(tensor: Tensor, about: dict[str, Any]) -> bool:
    alone = all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride()))
    plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return plain and alone and list(tensor.shape) == about["shape"] and tensor.dtype == _dtype(about)


def _dtype(about: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, about["dtype"])
    assert isinstance(found, torch.dtype)
    return found


def _size(about: dict[str, Any]) -> int:
    return int(math.prod(about["shape"])) * _dtype(about).itemsize


def unlike(ours: Any, saved: Any, path: str = "") -> str | None:
    """The first tensor of two trees that has another shape in the other, in a line; none when all that are in both
    have the same."""
    if isinstance(ours, Tensor | Divided) and isinstance(saved, Tensor | Divided):
        if tuple(ours.shape) == tuple(saved.shape):
            return None
        return f"{path} is {tuple(ours.shape)}, the checkpoint's {tuple(saved.shape)}"
    if isinstance(ours, dict) and isinstance(saved, dict):
        pairs = [(key, ours[key], saved[key]) for key in ours if key in saved]
    elif isinstance(ours, list | tuple) and isinstance(saved, list | tuple):
        pairs = [(index, *pair) for index, pair in enumerate(zip(ours, saved))]
    else:
        return None
    found = (unlike(one, other, f"{path}/{key}" if path else str(key)) for key, one, other in pairs)
    return next((text for text in found if text), None)
