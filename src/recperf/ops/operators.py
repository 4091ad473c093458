"""Makes functions in C or Triton visible as operators: to torch.profiler, and to the counter of a step's work.

    @operator("bag_sum", rows=lambda table_RD, ids_V, *_: (table_RD, ids_V))
    def bag_sum(table_RD, ids_V, offsets_B1): ...

When nothing listens, a call costs one more function call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
PREFIX = "recperf::"
"""Begins the names of these operators, as "aten::" begins those of torch."""


@dataclass(frozen=True)
class NativeCall:
    """A call of an operator, with functions of its arguments that describe its work."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Callable[..., Any] | None
    """The table and the ids of the random rows it accesses."""
    reads: Callable[..., Any] | None
    """Tensors that it reads or updates in place; None: all of its arguments."""
    flops: Callable[..., int] | None
    special: Callable[..., int] | None
    """Evaluations of functions such as exp."""
    updates: bool
    """Whether it writes those rows too."""

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def of(self, figure: Callable[..., Any] | None) -> Any:
        return None if figure is None else figure(*self.args, **self.kwargs)


class Listener(Protocol):
    def __call__(self, call: NativeCall) -> Any:
        """Run the call and return its result."""
        ...


_listener: Listener | None = None


def operator(
    name: str,
    *,
    rows: Callable[..., Any] | None = None,
    reads: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
    special: Callable[..., int] | None = None,
    updates: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function an operator. `updates` says that it writes its random rows; the other parameters are functions of
    its arguments, called only to count."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if _listener is None:
                return function(*args, **kwargs)
            call = NativeCall(PREFIX + name, function, args, kwargs, rows, reads, flops, special, updates)
            result: R = _listener(call)
            return result

        return called

    return decorated


def set_call_listener(listener: Listener | None) -> None:
    """Set the listener that runs every call from now on; None: calls run directly."""
    global _listener
    _listener = listener


def recorded(call: NativeCall) -> Any:
    """A listener that shows every call to torch.profiler as an operator."""
    with fast_range(call.name):
        return call.run()


def fast_range(name: str) -> Any:
    """A range that torch.profiler records as an operator, for a tenth of the time that record_function takes."""
    import torch

    return torch._C._profiler._RecordFunctionFast(name)
