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

    @classmethod
    def of(cls, state: dict[str, Any], *, room: dict[str, Tensor] | None = None) -> Content:
        """With `room` a copy in host memory, which training does not change; it is made there and fills it, so that
        the next one finds memory that is there already."""
        taken = _Taken()
        tree = taken.value(state, ())
        tree_bytes = json.dumps({"tree": tree, "tensors": taken.described}, allow_nan=False).encode()
        blocks = taken.blocks()
        return cls(tree=tree_bytes, blocks=blocks if room is None else _copied(blocks, room))


@dataclass
class _Taken:
    """Tensors taken out of a tree, in their order."""

    tensors: list[Tensor] = field(default_factory=list)
    described: list[dict[str, Any]] = field(default_factory=list)
    end: int = 0

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor):
            return {"$tensor": self._take(value, path)}
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

    def blocks(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        small: list[Tensor] = []
        for number, (tensor, about) in enumerate(zip(self.tensors, self.described)):
            if "start" in about:
                small.append(_as_bytes(tensor))
            else:
                found.update(pieces(tensor, number))
        if self.end:
            found[SHARED] = _joined(small)
        return found


def pieces(tensor: Tensor, number: int) -> Iterator[tuple[str, Tensor]]:
    """A large tensor under the names of its pieces, as views."""
    rows = max(1, PIECE * tensor.shape[0] // tensor.nbytes)
    for index, start in enumerate(range(0, tensor.shape[0], rows)):
        yield f"tensor-{number:05d}-{index:05d}", tensor[start : start + rows]


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
    if isinstance(value, Tensor):
        return value.nbytes
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(tensor_bytes, inner))


class Rebuilt:
    """Room for a state that is about to be read: where `into` has a tensor that fits, that tensor itself."""

    def __init__(self, content: bytes, into: Any = None) -> None:
        read = json.loads(content)
        self.tree, self.described = read["tree"], read["tensors"]
        self.tensors: list[Tensor | None] = [None] * len(self.described)
        self._match(self.tree, into)
        self._shared = torch.empty(
            sum(_padded(_size(about)) for about in self.described if "start" in about), dtype=torch.uint8
        )
        self.blocks: dict[str, Tensor] = {SHARED: self._shared} if self._shared.numel() else {}
        for number, about in enumerate(self.described):
            room = self.tensors[number]
            if room is None:
                room = self.tensors[number] = torch.empty(about["shape"], dtype=_dtype(about))
            if "start" not in about:
                self.blocks.update(pieces(room, number))

    def _match(self, tree: Any, into: Any) -> None:
        if isinstance(tree, list) and isinstance(into, list | tuple):
            for inner, fitting in zip(tree, into):
                self._match(inner, fitting)
        elif isinstance(tree, dict) and "$tensor" in tree:
            if isinstance(into, Tensor) and _fits(into, self.described[tree["$tensor"]]):
                self.tensors[tree["$tensor"]] = into.detach()
        elif isinstance(tree, dict) and isinstance(into, dict):
            for key, inner in tree.get("$pairs", tree.items()):
                self._match(inner, into.get(key))

    def state(self) -> Any:
        """The state, once the blocks are filled."""
        for number, about in enumerate(self.described):
            if "start" in about:
                room = self.tensors[number]
                assert room is not None
                part = self._shared[about["start"] : about["start"] + _size(about)]
                room.copy_(part.view(_dtype(about)).reshape(about["shape"]))
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
    if isinstance(ours, Tensor) and isinstance(saved, Tensor):
        if ours.shape == saved.shape:
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
