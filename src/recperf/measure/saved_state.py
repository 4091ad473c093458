"""Saves what a step can change and puts it back in place, so that steps which were only measured leave nothing behind.

What a step can change is what it reaches: the variables that its functions name, attributes, containers, tensors with
their gradients, arrays and random generators. An object outside of these whose content Python cannot see, such as an
iterator, a file or a lock, cannot be put back: `problem` names it.
"""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import functools
import logging
import operator
import random
import re
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..machine import available_bytes
from .clocks import cuda_used
from .places import USER, Stacks

MOST_OBJECTS = 1_000_000
"""A step that reaches more Python objects is not saved: looking at all of them would take seconds."""
SHARE = 0.5
"""Share of the free memory that the copy may take; the rest is for the step."""

_DESCRIPTORS = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType),
)
_FIXED: tuple[type, ...] = (
    *(int, float, complex, str, bytes, range, slice, type(None), type(...), type(NotImplemented)),
    *(*_DESCRIPTORS, types.MappingProxyType, types.GenericAlias, weakref.ReferenceType, *weakref.ProxyTypes),
    *(operator.attrgetter, operator.itemgetter, operator.methodcaller, re.Pattern, enum.Enum, decimal.Decimal),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, logging.Logger, types.ModuleType),
    *(np.generic, np.dtype, np.ufunc, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo),
    *(torch.iinfo, torch.Stream, torch.Event, torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
"""Types of objects that never change, or whose changes do not matter to a step."""
_FIXED_EXACTLY = frozenset((*_FIXED, bool, object))
_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
_MISSING: Any = object()


class SavedState:
    """The state that is reached from some objects when it is created, and the state of the global random generators.

    Where `problem` is not empty, it says in one clause what cannot be put back, and nothing was saved.
    """

    def __init__(self, *roots: object) -> None:
        self._undo: list[Callable[[], object]] = []
        self._tensors: list[_SavedTensor] = []
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._sparse: list[tuple[Tensor, Tensor]] = []
        self._seen: dict[object, object] = {}
        self._arrays = 0
        self._files = Stacks()
        try:
            if cuda_used():
                torch.cuda.synchronize()
            self._walk(list(roots))
            self._require_memory()
            self._copy()
        except (_Unsaved, torch.OutOfMemoryError, MemoryError) as error:
            self.problem = str(error) if isinstance(error, _Unsaved) else "a copy of its state does not fit in memory"
            self._forget()
            return
        self.problem = ""
        self._undo += _random_states()

    def restore(self) -> None:
        """Put everything back; the tensors and containers stay the same objects."""
        if cuda_used():
            torch.cuda.synchronize()
        with torch.no_grad():
            for undo in self._undo:
                undo()
            for storage, copy in self._copies.values():
                if storage.nbytes() != copy.numel():
                    storage.resize_(copy.numel())
                _bytes_of(storage).copy_(copy)
            for tensor, clone in self._sparse:
                tensor.copy_(clone)
            for saved in self._tensors:
                saved.restore()
        self._forget()

    def _forget(self) -> None:
        for one in (self._undo, self._tensors, self._copies, self._sparse, self._seen):
            one.clear()

    def _require_memory(self) -> None:
        storages = {saved.storage._cdata: saved.storage for saved in self._tensors}
        needs: dict[torch.device, int] = {torch.device("cpu"): self._arrays}
        for storage in storages.values():
            needs[storage.device] = needs.get(storage.device, 0) + storage.nbytes()
        for tensor, _ in self._sparse:
            size = tensor._indices().nbytes + tensor._values().nbytes
            needs[tensor.device] = needs.get(tensor.device, 0) + size
        for device, need in needs.items():
            free = available_bytes()
            if device.type == "cuda":
                reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
                free = torch.cuda.mem_get_info(device)[0] + reserved
            if need > SHARE * free:
                raise _Unsaved(
                    f"a copy of its state ({need / 1e9:.2f} GB) takes more than half of the free memory "
                    f"({free / 1e9:.2f} GB on {device})"
                )

    def _copy(self) -> None:
        for saved in self._tensors:
            key, storage = saved.storage._cdata, saved.storage
            if key not in self._copies:
                self._copies[key] = storage, _bytes_of(storage).clone()
        self._sparse = [(tensor, tensor.detach().clone()) for tensor, _ in self._sparse]

    def _walk(self, roots: list[object]) -> None:
        """Look at everything that the roots reach and note how each is put back."""
        left: list[tuple[object, str]] = [(root, "") for root in roots]
        while left:
            one, name = left.pop()
            kind = type(one)
            if kind in _FIXED_EXACTLY or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            if len(self._seen) > MOST_OBJECTS:
                raise _Unsaved(f"it reaches more than {MOST_OBJECTS:,} Python objects")
            left += (
                (value, f"{name}.{key}" if name and key else name or key)
                for key, value in self._inside(one, name)
                if type(value) not in _FIXED_EXACTLY
            )

    def _inside(self, one: Any, name: str) -> Iterator[tuple[str, Any]]:
        """What an object holds, by name; what can change in the object itself is noted to be put back."""
        if isinstance(one, Tensor):
            yield from self._tensor(one, name)
        elif isinstance(one, types.FunctionType):
            yield from self._function(one)
        elif isinstance(one, types.MethodType):
            yield from (("", one.__self__), ("", one.__func__))
        elif isinstance(one, functools.partial):
            yield from (("", one.func), ("", one.args), ("", one.keywords))
        elif isinstance(one, (staticmethod, classmethod)):
            yield "", one.__func__
        elif isinstance(one, property):
            yield from (("", one.fget), ("", one.fset))
        elif isinstance(one, functools.cached_property):
            yield "", one.func
        elif isinstance(one, type):
            if self._is_users(sys.modules.get(one.__module__)):
                yield from self._class(one)
        elif isinstance(one, np.ndarray):
            yield from self._array(one)
        elif not (isinstance(one, _FIXED) or one is sys.stdout or one is sys.stderr or self._random(one)):
            yield from self._object(one, name)

    def _object(self, one: Any, name: str) -> Iterator[tuple[str, Any]]:
        """A container or an object with attributes."""
        kind = type(one)
        if kind.__module__.startswith(_COMPILER):
            # A compiled module: the rest belongs to the compiler.
            yield "", getattr(one, "_orig_mod", None)
            return
        slots = [slot for base in kind.__mro__ for slot in _slots(base)]
        attributes = getattr(one, "__dict__", None)
        if isinstance(one, dict):
            yield from self._dict(one)
        elif isinstance(one, (list, deque, set)):
            self._undo.append(functools.partial(_put_items, one, list(one)))
            yield from (("", item) for item in one)
        elif isinstance(one, (bytearray, array.array)):
            self._undo.append(functools.partial(one.__setitem__, slice(None), one[:]))
        elif isinstance(one, (tuple, frozenset)):
            yield from (("", item) for item in one)
        elif isinstance(one, functools._lru_cache_wrapper):
            yield "", one.__wrapped__
        elif _base(kind) is not object or not (isinstance(attributes, dict) or any(map(_has_slots, kind.__mro__))):
            raise _Unsaved(f"it holds {_called(name)}an object of type {_type_name(kind)}, whose state is not visible")
        for slot in slots:
            value = _slot_value(slot, one)
            self._undo.append(functools.partial(_put_slot, slot, one, value))
            yield slot.__name__, value
        if isinstance(attributes, dict):
            yield from self._dict(attributes)
        yield "", kind

    def _dict(self, one: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
        self._undo.append(functools.partial(_put_dict, one, dict(one)))
        for key, value in one.items():
            yield key if isinstance(key, str) else "", value
            yield "", key

    def _cell(self, cell: types.CellType) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:
            value = _MISSING
        self._undo.append(functools.partial(_put_cell, cell, value))
        return value

    def _function(self, one: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """The variables of a function, and the global ones that it names where it is the user's."""
        if one.__module__ and "/torch/_dynamo/" in one.__code__.co_filename:
            yield "", one.__dict__.get("__wrapped__") or one.__dict__.get("_torchdynamo_orig_callable")
            return
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or ()):
            yield name, self._cell(cell)
        yield from (("", one.__defaults__), ("", one.__kwdefaults__))
        if one.__dict__:
            yield from self._dict(one.__dict__)
        if self._files.file(one.__code__.co_filename)[0] == USER:
            names = set(_names(one.__code__))
            yield from self._namespace(one.__globals__, names, {id(one.__globals__)})

    def _namespace(self, space: dict[str, Any], names: set[str], known: set[int]) -> Iterator[tuple[str, Any]]:
        """The variables of a module with some names, also those of the user's modules among them."""
        for name in names:
            value = space.get(name, _MISSING)
            self._undo.append(functools.partial(_put_key, space, name, value))
            if not isinstance(value, types.ModuleType):
                yield name, value
            elif id(value.__dict__) not in known and self._is_users(value):
                yield from self._namespace(value.__dict__, names, known | {id(value.__dict__)})

    def _class(self, one: type) -> Iterator[tuple[str, Any]]:
        """The attributes of a class of the user, and those of its base classes."""
        held = {name: value for name, value in vars(one).items() if _is_own(name, value)}
        self._undo.append(functools.partial(_put_attributes, one, held))
        yield from held.items()
        yield from (("", base) for base in one.__bases__)

    def _is_users(self, module: Any) -> bool:
        if getattr(module, "__name__", "") == "__main__":
            return True
        file = getattr(module, "__file__", None)
        return file is not None and self._files.file(file)[0] == USER

    def _tensor(self, one: Tensor, name: str) -> Iterator[tuple[str, Any]]:
        if one.device.type == "meta":
            return
        if one.layout == torch.sparse_coo:
            self._sparse.append((one, one))
        elif one.layout != torch.strided or is_traceable_wrapper_subclass(one):
            kind = _type_name(type(one)) if one.layout == torch.strided else str(one.layout)
            raise _Unsaved(f"it holds {_called(name)}a tensor of type {kind}, which cannot be put back")
        else:
            saved = _SavedTensor(one)
            self._tensors.append(saved)
            yield "grad", saved.grad
        for hooks in (one._backward_hooks, getattr(one, "_post_accumulate_grad_hooks", None)):
            yield "", hooks
        if one.__dict__:
            yield from self._dict(one.__dict__)

    def _array(self, one: np.ndarray[Any, Any]) -> Iterator[tuple[str, Any]]:
        if one.flags.writeable:
            self._arrays += one.nbytes
            if self._arrays > SHARE * available_bytes():
                raise _Unsaved("a copy of its arrays takes more than half of the free memory")
            self._undo.append(functools.partial(np.copyto, one, one.copy()))
        if one.dtype.hasobject:
            yield from (("", item) for item in one.reshape(-1).tolist())

    def _random(self, one: Any) -> bool:
        """Whether the object is a random generator, whose state is put back."""
        if isinstance(one, torch.Generator):
            self._undo.append(functools.partial(one.set_state, one.get_state()))
        elif isinstance(one, np.random.Generator):
            self._undo.append(functools.partial(setattr, one.bit_generator, "state", one.bit_generator.state))
        elif isinstance(one, np.random.BitGenerator):
            self._undo.append(functools.partial(setattr, one, "state", one.state))
        elif isinstance(one, np.random.RandomState):
            self._undo.append(functools.partial(one.set_state, one.get_state()))
        elif isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):
            self._undo.append(functools.partial(one.setstate, one.getstate()))
        else:
            return isinstance(one, random.SystemRandom)
        return True


class _Unsaved(Exception):
    """Something that cannot be put back."""


class _SavedTensor:
    """Where a tensor has its data, and its gradient; the data itself is copied once for all tensors that share it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.storage, self.dtype = tensor, tensor.untyped_storage(), tensor.dtype
        self.view = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self.is_leaf, self.requires_grad = tensor.is_leaf, tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None

    def restore(self) -> None:
        tensor = self.tensor
        view = (tensor.storage_offset(), tensor.size(), tensor.stride())
        if (tensor.untyped_storage()._cdata, tensor.dtype, view) != (self.storage._cdata, self.dtype, self.view):
            tensor.data = torch.empty(0, dtype=self.dtype, device=self.storage.device).set_(self.storage, *self.view)
        if self.is_leaf and tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _random_states() -> Iterator[Callable[[], object]]:
    """How the global random generators are put back."""
    cuda = torch.cuda.default_generators if cuda_used() else ()
    for generator in (torch.default_generator, *cuda):
        yield functools.partial(generator.set_state, generator.get_state())
    yield functools.partial(np.random.set_state, np.random.get_state())
    yield functools.partial(random.setstate, random.getstate())


def _same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _put_items(one: Any, items: list[Any]) -> None:
    if not _same(one, items):
        base: Any = next(base for base in (list, deque, set) if isinstance(one, base))
        base.clear(one)
        (base.update if base is set else base.extend)(one, items)


def _put_dict(one: dict[Any, Any], items: dict[Any, Any]) -> None:
    if not (_same(one, items) and _same(one.values(), items.values())):
        base = OrderedDict if isinstance(one, OrderedDict) else dict
        base.clear(one)
        base.update(one, items)


def _put_key(space: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        space.pop(name, None)
    elif space.get(name, _MISSING) is not value:
        space[name] = value


def _put_cell(cell: types.CellType, value: Any) -> None:
    if value is not _MISSING:
        cell.cell_contents = value
    else:
        with suppress(ValueError):  # It is still empty.
            del cell.cell_contents


def _slot_value(slot: types.MemberDescriptorType, one: Any) -> Any:
    try:
        return slot.__get__(one)
    except AttributeError:
        return _MISSING


def _put_slot(slot: types.MemberDescriptorType, one: Any, value: Any) -> None:
    if value is not _MISSING:
        slot.__set__(one, value)
    elif _slot_value(slot, one) is not _MISSING:
        slot.__delete__(one)


def _put_attributes(one: type, held: dict[str, Any]) -> None:
    now = {name: value for name, value in vars(one).items() if _is_own(name, value)}
    for name in now.keys() - held.keys():
        type.__delattr__(one, name)
    for name, value in held.items():
        if now.get(name, _MISSING) is not value:
            type.__setattr__(one, name, value)


def _is_own(name: str, value: Any) -> bool:
    """Whether an attribute of a class is the author's, not one that Python adds."""
    written = isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
    return written or not (name.startswith("__") or name == "_abc_impl" or isinstance(value, _DESCRIPTORS))


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names and attributes that a function and those inside it use."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return chain(code.co_names, *inner)


def _base(kind: type) -> type:
    """The nearest class that is not written in Python; `object` where all state is in attributes."""
    for base in kind.__mro__:
        new = base.__new__
        if not base.__flags__ & (1 << 9) or (isinstance(new, types.BuiltinFunctionType) and new.__self__ is base):
            return base
    return object


def _has_slots(base: type) -> bool:
    return "__slots__" in vars(base)


def _slots(base: type) -> list[types.MemberDescriptorType]:
    members = vars(base).values() if _has_slots(base) else ()
    return [one for one in members if isinstance(one, types.MemberDescriptorType)]


def _called(name: str) -> str:
    return f"`{name}`, " if name else ""


def _type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
