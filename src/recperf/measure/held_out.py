"""Permutes each input of held-out batches over their rows, to see whether a score depends on it."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .learning_records import InputSeen

MOST_COLUMNS = 64
"""A table of more columns is permuted as one input."""
Path = tuple[Any, ...]
"""Keys and indices that lead to a tensor in a batch."""


def permuted(batches: Iterable[Any], score: Callable[[Any], Any], modules: Sequence[nn.Module]) -> list[InputSeen]:
    """The scores of each batch as it is and with each input permuted, by a generator of its own. Modules are in eval
    mode meanwhile; their buffers and the random generators are put back."""
    generator = torch.Generator().manual_seed(0)
    seen: dict[str, InputSeen] = {}
    with _unchanged(modules), torch.no_grad():
        for batch in batches:
            before = float(score(batch))
            for path, tensor, column in _inputs(batch):
                order = torch.randperm(len(tensor), generator=generator).to(tensor.device)
                mixed = tensor[order] if column is None else tensor.clone()
                if column is not None:
                    mixed[:, column] = tensor[order, column]
                name = _name(path, column)
                one = seen.setdefault(name, InputSeen(name=name, scores=[], permuted=[], constant=True))
                one.scores.append(before)
                one.permuted.append(float(score(_replaced(batch, path, mixed))))
                values = tensor if column is None else tensor[:, column]
                one.constant &= bool((values == values[:1]).all())
    return list(seen.values())


def _inputs(batch: Any) -> Iterator[tuple[Path, Tensor, int | None]]:
    """The tensors that have a row for each row of the batch, and their columns where they are few."""
    tensors = [(path, one) for path, one in _tensors(batch, ()) if one.dim() and len(one) > 1]
    if not tensors:
        return
    # What most tensors have as many of are the rows.
    rows = Counter(len(one) for _, one in tensors).most_common(1)[0][0]
    for path, tensor in tensors:
        if len(tensor) == rows:
            yield path, tensor, None
            if tensor.dim() == 2 and 1 < tensor.shape[1] <= MOST_COLUMNS:
                for column in range(tensor.shape[1]):
                    yield path, tensor, column


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _tensors(one, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _tensors(one, (*path, index))


def _replaced(value: Any, path: Path, tensor: Tensor) -> Any:
    """The batch with another tensor at a path; the batch itself stays."""
    if not path:
        return tensor
    key, *rest = path
    inner = _replaced(value[key], tuple(rest), tensor)
    if isinstance(value, dict):
        return {**value, key: inner}
    changed = [inner if index == key else one for index, one in enumerate(value)]
    if isinstance(value, tuple):
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    return changed


def _name(path: Path, column: int | None) -> str:
    whole = "".join(f"[{key!r}]" for key in path) or "batch"
    return whole if column is None else f"{whole}[:, {column}]"


@contextmanager
def _unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    modes = [(module, module.training) for root in modules for module in root.modules()]
    buffers = [(buffer, buffer.clone()) for root in modules for buffer in root.buffers()]
    used = torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if used else []
    numpy: Any = sys.modules.get("numpy.random")
    states = random.getstate(), numpy and numpy.get_state()
    try:
        with torch.random.fork_rng(devices):
            for root in modules:
                root.eval()
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, training in modes:
            module.training = training
        random.setstate(states[0])
        if numpy is not None:
            numpy.set_state(states[1])
