"""Hooks that tell a profiler about the steps and the waits of a program: optimizers, gradient scalers, loaders.

They do nothing in worker processes, which inherit them, and in code that torch.compile compiles.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from threading import get_ident, local
from types import GeneratorType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import UsageError
from ..measure.program_facts import loader_facts, note_batch
from ..measure.program_records import LoaderFacts
from ..measure.schedule import ENDLESS
from .step_profile import Profiler, length, prefetched

RARE = 8
"""An optimizer that steps once in up to this many steps of another one ends the steps of the loop."""
MOST_STOPS = 3
"""A program that ignores being stopped this often is left to run."""
MOST_BUFFERED = 32
RARE_LOADER, COMMON_LOADER = 0.25, 0.5
"""Share of the steps in which a loader for evaluation, and one for training, delivers batches."""

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class ProgramStopped(BaseException):
    """Ends a program after enough of its steps were seen; not an Exception, so that programs do not handle it."""


@dataclass
class Loader:
    length: int | None
    workers: int
    prefetched: int
    facts: LoaderFacts | None = None
    batches: int = 0
    steps: int = 0


class Hooks(ExitStack):
    """Active inside its `with` block."""

    def __init__(self, profiler: Profiler, *, to_the_end: bool = False, ends_by_optimizer: bool = True) -> None:
        super().__init__()
        self.profiler, self.to_the_end = profiler, to_the_end
        self.stops = self.steps_seen = 0
        self.ended_by = ""
        self._by_optimizer = ends_by_optimizer
        self._cycle = Cycle()
        self._process = os.getpid()
        self._inside = local()
        self._loaders: dict[int, Loader] = {}
        self._delivered: set[int] = set()
        self._input_calls = self._left_out = 0
        self._step_thread = get_ident()
        self._input_threads: set[int] = set()
        self._model: nn.Module | None = None
        self._modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        """Modules that the program made, by identity: some cannot be hashed."""

    def __enter__(self) -> Hooks:
        super().__enter__()
        self.enter_context(patched(Optimizer, "_patch_step_function", self._new_optimizer))
        self.enter_context(patched(torch.amp.GradScaler, "step", self._scaler_step))
        self.enter_context(patched(_BaseDataLoaderIter, "__next__", self._next_batch))
        self.enter_context(patched(DataLoader, "__iter__", self._new_iterator))
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            self.callback(register(self._note_module).remove)
        self.enter_context(patched(threading, "excepthook", _unless_stopped))
        return self

    # Ends of steps

    def _new_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Every class of optimizers gets its hook when its first optimizer is made."""

        def patch(optimizer: Optimizer) -> None:
            original(optimizer)
            kind: Any = type(optimizer)
            if not getattr(kind.step, "recperf", False):
                self.enter_context(patched(kind, "step", self._optimizer_step))

        return patch

    def _optimizer_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(optimizer, *args, **kwargs)
            return self._outermost(optimizer, original, optimizer, *args, **kwargs)

        step.recperf = True  # type: ignore[attr-defined]
        return step

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A gradient scaler leaves out the optimizer's step where gradients overflow; the step of the loop ends."""

        @wraps(original)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._outermost(optimizer, original, scaler, optimizer, *args, **kwargs)

        return step

    def _outermost(self, optimizer: Optimizer, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call an optimizer's step; one inside another is a part of it."""
        if getattr(self._inside, "optimizer", False) or self._is_worker():
            return call(*args, **kwargs)
        self._inside.optimizer = True
        try:
            result = call(*args, **kwargs)
        finally:
            self._inside.optimizer = False
        if self._by_optimizer and not self.profiler.done:
            change = self._cycle.ends(id(optimizer))
            if change == "restart":
                self.profiler.restart()
            if change:
                self.ended_by = f"the step of {type(optimizer).__name__}"
        else:
            change = "end" if self._by_optimizer and id(optimizer) == self._cycle.last else ""
        self._model = self._model or self._find_model(optimizer)
        if change:
            self._end_step()
        return result

    def steps(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Hook of a function whose return ends a step."""

        @wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if not self._is_worker():
                self.ended_by = f"the return of {getattr(function, '__name__', 'the step function')}"
                self._end_step()
            return result

        return step

    def _end_step(self) -> None:
        self.steps_seen += 1
        self._step_thread = get_ident()
        observer = self.profiler.observer
        if not observer.done:
            ordinary = self._ordinary()
            if observer.state == "warm":
                self._expect()
                observer.model = self._model
            self._left_out += not ordinary and observer.state != "warm"
            observer.end_step(ordinary=ordinary)
        if observer.done and not self.to_the_end and self.stops < MOST_STOPS:
            self.stops += 1
            raise ProgramStopped

    def _note_module(self, module: nn.Module, name: str, item: Any) -> None:
        self._modules[id(module)] = module

    def _find_model(self, optimizer: Optimizer) -> nn.Module | None:
        """The module that holds the optimizer's parameters, once the first steps ran."""
        if self.steps_seen < 1 or self.profiler.done or _compiles():
            return None
        parameters = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        best = max(
            self._roots(), key=lambda module: sum(id(p) in parameters for p in module.parameters()), default=None
        )
        return None if isinstance(best, nn.DataParallel) else best

    def _roots(self) -> list[nn.Module]:
        """The modules that no other one holds."""
        modules = list(self._modules.values())
        inner = {id(child) for module in modules for child in module._modules.values()}
        return [module for module in modules if id(module) not in inner]

    def roots(self, variables: Mapping[str, Any]) -> dict[str, nn.Module]:
        """The same by the names of the program's variables, else by class; one alone needs no name."""
        roots = self._roots()
        if len(roots) == 1:
            return {"": roots[0]}
        named = {id(value): name for name, value in variables.items()}
        result: dict[str, nn.Module] = {}
        for root in roots:
            name = named.get(id(root), type(root).__name__)
            result[name if name not in result else f"{name} {len(result)}"] = root
        return result

    # Waits for input

    def _new_iterator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def iterate(loader: Any) -> Any:
            if self._is_worker():
                return original(loader)
            facts = Loader(length(loader), loader.num_workers, prefetched(loader), loader_facts(loader))
            self._loaders.setdefault(id(loader.dataset), facts)
            # Worker processes do not inherit the counting of operators, which a wait for input leaves out.
            with self._waiting():
                return original(loader)

        return iterate

    def _next_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def next_batch(iterator: Any) -> Any:
            if self._is_worker() or getattr(self._inside, "input", False):
                return original(iterator)
            with self._waiting():
                batch = original(iterator)
            key = id(iterator._dataset)
            self._delivered.add(key)
            if key in self._loaders:
                self._loaders[key].batches += 1
                if (facts := self._loaders[key].facts) and self._loaders[key].batches == 1:
                    note_batch(facts, batch)
            return batch

        return next_batch

    def inputs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Hook of a function that returns a batch, or yields batches."""

        @wraps(function)
        def batches(*args: Any, **kwargs: Any) -> Any:
            if self._is_worker():
                return function(*args, **kwargs)
            self._input_calls += 1
            with self._waiting():
                result = function(*args, **kwargs)
            return self._each(result) if isinstance(result, GeneratorType) else result

        return batches

    def _each(self, generator: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._waiting():
                try:
                    batch = next(generator)
                except StopIteration:
                    return
            yield batch

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A wait for input; one inside another is a part of it."""
        if getattr(self._inside, "input", False) or self.profiler.done:
            yield
            return
        self._input_threads.add(get_ident())
        self._inside.input = True
        try:
            with self.profiler.waiting_for_input():
                yield
        finally:
            self._inside.input = False

    def _ordinary(self) -> bool:
        """Whether the step used no loader that few steps use, beside the one that most use: that is an evaluation."""
        used = [loader for key, loader in self._loaders.items() if key in self._delivered]
        self._delivered.clear()
        for loader in used:
            loader.steps += 1
        shares = [loader.steps / self.steps_seen for loader in used]
        return not (min(shares, default=1.0) < RARE_LOADER and max(shares, default=0.0) >= COMMON_LOADER)

    def _expect(self) -> None:
        """Tell the observer how many steps there will be and how many batches may be ready."""
        observer = self.profiler.observer
        observer.schedule.expected = None
        loader = max(self._loaders.values(), key=lambda loader: loader.steps, default=None)
        if loader is None or not loader.steps:
            return
        if self.profiler.watch is not None:
            self.profiler.watch.loader = loader.facts
        per_step = loader.batches / loader.steps
        observer.buffered = min(MOST_BUFFERED, round(loader.prefetched / per_step))
        if loader.length is not None:
            observer.schedule.expected = int(loader.length / per_step)
        elif loader.workers:
            observer.schedule.expected = ENDLESS

    def _is_worker(self) -> bool:
        return os.getpid() != self._process

    @property
    def workers(self) -> int:
        """The most that a loader has that delivered batches."""
        return max((loader.workers for loader in self._loaders.values() if loader.batches), default=0)

    def notes(self) -> list[str]:
        """What was seen and what could not be."""
        notes = [f"a step ends with {self.ended_by}"]
        if self._left_out:
            notes.append(
                f"steps left out, because they used another DataLoader as an evaluation does: {self._left_out}"
            )
        if self.stops > 1:
            notes.append("the program caught the exception that stops it, and ran to its end")
        if self.workers:
            notes.append(f"batches come from {self.workers} worker processes")
        if self._input_threads - {self._step_thread}:
            notes.append("batches are prepared in another thread: waiting for them is seen as blocked time")
        if not any(loader.batches for loader in self._loaders.values()) and not self._input_calls:
            notes.append(
                "no torch DataLoader was iterated: waiting for input is not seen; "
                "--input-function module:name names what makes the batches"
            )
        return notes


class Cycle:
    """Finds which optimizer ends the steps of a loop with several: the one that steps least often."""

    def __init__(self) -> None:
        self.last: int | None = None
        self._begin(None)

    def _begin(self, last: int | None) -> None:
        self.last = last
        self._steps = 1
        self._seen_at: dict[int, int] = {}
        self._since: Counter[int] = Counter()

    def ends(self, optimizer: int) -> str:
        """What the step of an optimizer means: "end" of a step, "" nothing, "restart" the first end of longer ones."""
        if self.last is None:
            self._begin(optimizer)
            return "end"
        if optimizer == self.last:
            self._steps += 1
            self._since.clear()
            return "end"
        self._since[optimizer] += 1
        between = self._steps - self._seen_at.get(optimizer, 0)
        self._seen_at[optimizer] = self._steps
        if 2 <= between <= RARE or self._since[optimizer] > RARE:
            # Steps less often, or the last one does not step any more.
            self._begin(optimizer)
            return "restart"
        return ""


def patched_function(name: str, wrap: Wrap) -> AbstractContextManager[None]:
    """Let `package.module:function` or `package.module:Class.method` pass through a hook."""
    module, _, path = name.partition(":")
    try:
        return patched_path(import_module(module), path, wrap)
    except ImportError as error:
        raise UsageError(f"cannot import {module}: {error}") from None
    except AttributeError:
        raise UsageError(f"{module} has no {path!r}") from None


def patched_path(owner: Any, path: str, wrap: Wrap) -> AbstractContextManager[None]:
    *outer, attribute = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    inspect.getattr_static(owner, attribute)
    return patched(owner, attribute, wrap)


@contextmanager
def patched(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Let a method of a class, or a function of a module, pass through a hook."""
    own, original = name in vars(owner), inspect.getattr_static(owner, name)
    if isinstance(original, staticmethod | classmethod):
        replaced: Any = type(original)(wrap(original.__func__))
    else:
        replaced = wrap(original)
    setattr(owner, name, replaced)
    try:
        yield
    finally:
        setattr(owner, name, original) if own else delattr(owner, name)


def _unless_stopped(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A thread of the program that is stopped ends without a traceback."""
    return lambda failure: None if issubclass(failure.exc_type, ProgramStopped) else hook(failure)


def _compiles() -> bool:
    """Whether the program used torch.compile, whose functions would be compiled again because of hooks of modules."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo and dynamo.counters["frames"])
