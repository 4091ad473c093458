"""Changes that are made to a program from outside: constructors and settings of torch pass through hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import local
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, SparseAdam
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..measure.clocks import cuda_used
from .program_hooks import Wrap, patched


@contextmanager
def changed(settings: dict[str, Any]) -> Iterator[None]:
    """Inside, the program has these changes; `compile` is made by whoever knows its model."""
    with ExitStack() as stack:
        for name, value in settings.items():
            for owner, method, wrap in CHANGES[name](value) if name in CHANGES else ():
                stack.enter_context(patched(owner, method, wrap))
        yield


Patches = list[tuple[Any, str, Wrap]]


def _loader(**arguments: Any) -> Patches:
    """DataLoaders get these arguments, whatever the program passes."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(loader, *args, **kwargs).arguments | arguments
            rest = bound.pop("kwargs", {})
            original(**bound, **rest)

        return init

    return [(DataLoader, "__init__", wrap)]


def _batches(size: int) -> Patches:
    """DataLoaders that get a batch size get this one."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(loader, *args, **kwargs).arguments
            if isinstance(bound.get("batch_size"), int):
                bound["batch_size"] = size
            rest = bound.pop("kwargs", {})
            original(**bound, **rest)

        return init

    return [(DataLoader, "__init__", wrap)]


def _optimizer(way: str) -> Patches:
    """Optimizers that have the option run fused or foreach."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(optimizer: Any, params: Any, defaults: dict[str, Any]) -> None:
            if way in defaults and not defaults.get("fused") and not defaults.get("differentiable"):
                defaults = {**defaults, "foreach": None, way: True}
            original(optimizer, params, defaults)

        return init

    return [(Optimizer, "__init__", wrap)]


def _zero_grad(_: bool) -> Patches:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(original)(lambda owner, set_to_none=True: original(owner, set_to_none=True))

    return [(Optimizer, "zero_grad", wrap), (nn.Module, "zero_grad", wrap)]


def _tf32(_: bool) -> Patches:
    torch.set_float32_matmul_precision("high")
    return []


def _autocast(precision: str) -> Patches:
    """Outermost modules compute in this precision where autocast allows it, and return what is as wide as before."""
    inside = local()

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == getattr(torch, precision):
            return value.float()
        if type(value) in (list, tuple):
            return type(value)(map(wide, value))
        return {key: wide(one) for key, one in value.items()} if type(value) is dict else value

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "module", False) or not torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            inside.module = True
            try:
                with torch.autocast("cuda" if cuda_used() else "cpu", getattr(torch, precision)):
                    return wide(original(module, *args, **kwargs))
            finally:
                inside.module = False

        return call

    return [(nn.Module, "__call__", wrap)]


def _threads(count: int) -> Patches:
    torch.set_num_threads(count)
    return [(torch, "set_num_threads", lambda original: lambda number: None)]


def _sparse(shapes: list[list[int]]) -> Patches:
    """Embeddings of these sizes have sparse gradients, and SparseAdam takes them over from Adam."""
    modules: WeakSet[nn.Module] = WeakSet()

    def embedding(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if [module.num_embeddings, module.embedding_dim] in shapes:
                module.sparse = True
                modules.add(module)

        return init

    def split(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(optimizer: Any, params: Any, defaults: dict[str, Any]) -> None:
            tables = {id(module.weight) for module in modules}
            if not isinstance(optimizer, Adam) or not tables:
                original(optimizer, params, defaults)
                return
            listed = _flat(params)
            groups = listed if isinstance(listed[0], dict) else [{"params": listed}]
            groups = [{**group, "params": _flat(group["params"])} for group in groups]
            taken = [tensor for group in groups for tensor in group["params"] if id(tensor) in tables]
            for group in groups:
                group["params"] = [tensor for tensor in group["params"] if id(tensor) not in tables]
            rest = [group for group in groups if group["params"]]
            # An optimizer must have a parameter; one without a gradient is never changed.
            original(optimizer, rest or [{"params": [nn.Parameter(torch.zeros(1))]}], defaults)
            if taken:
                _beside(optimizer, SparseAdam(taken, **{name: defaults[name] for name in ("lr", "betas", "eps")}))

        return init

    return [
        (nn.Embedding, "__init__", embedding),
        (nn.EmbeddingBag, "__init__", embedding),
        (Optimizer, "__init__", split),
    ]


def _beside(optimizer: Any, rows: Optimizer) -> None:
    """Let a second optimizer step after the first and clear its gradients with it."""

    def step(*_: Any) -> None:
        rows.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        rows.step()

    zero_grad = optimizer.zero_grad

    def clear(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        rows.zero_grad()

    optimizer.register_step_post_hook(step)
    optimizer.zero_grad = clear


def _flat(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _replay(_: bool) -> Patches:
    """Iterators of loaders return their first batch again, as often as they have batches."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        batches: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

        @wraps(original)
        def next_batch(iterator: Any) -> Any:
            taken = batches.setdefault(iterator, [])
            try:
                ends = len(iterator)
            except TypeError:
                return original(iterator)
            if taken and len(taken) >= ends:
                raise StopIteration
            taken.append(taken[0] if taken else original(iterator))
            return taken[-1]

        return next_batch

    return [(_BaseDataLoaderIter, "__next__", wrap)]


CHANGES: dict[str, Callable[[Any], Patches]] = {
    "workers": lambda count: _loader(num_workers=count, persistent_workers=count > 0),
    "batch_size": _batches,
    "replay": _replay,
    "pinned": lambda pinned: _loader(pin_memory=pinned),
    "optimizer": _optimizer,
    "zero_grad": _zero_grad,
    "tf32": _tf32,
    "autocast": _autocast,
    "threads": _threads,
    "sparse": _sparse,
}
