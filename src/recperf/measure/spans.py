"""A span is a name around a piece of work. When nobody listens it costs one function call and times nothing.

    with span("embedding"):
        ...

A `StepClock` listens: between `begin()` and `end()` it books the time of every span to its name, children taken out
of their parents, and what no span covered to "other", so that the parts of a step sum to its wall time.
"""

from __future__ import annotations

from time import perf_counter_ns
from types import TracebackType
from typing import Protocol


class Listener(Protocol):
    def enter(self, name: str) -> None: ...

    def leave(self) -> None: ...


class _Off:
    """The span nobody listens to: one shared object, nothing stored, nothing timed."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _On:
    __slots__ = ("listener", "name")

    def __init__(self, listener: Listener, name: str) -> None:
        self.listener = listener
        self.name = name

    def __enter__(self) -> None:
        self.listener.enter(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.listener.leave()


class _Both:
    __slots__ = ("first", "second")

    def __init__(self, first: Listener, second: Listener) -> None:
        self.first, self.second = first, second

    def enter(self, name: str) -> None:
        self.first.enter(name)
        self.second.enter(name)

    def leave(self) -> None:
        self.second.leave()
        self.first.leave()


_OFF = _Off()
_listener: Listener | None = None
"""Who is told: the follower, whoever listens now, or both."""
_follower: Listener | None = None
_hearing: Listener | None = None


def span(name: str) -> _Off | _On:
    """A context manager that tells the listener, if there is one, when the named work begins and ends."""
    return _OFF if _listener is None else _On(_listener, name)


def listen(listener: Listener | None) -> Listener | None:
    """Set who hears spans (none: nobody) and return who did before."""
    global _hearing
    before, _hearing = _hearing, listener
    _tell()
    return before


def follow(follower: Listener | None) -> None:
    """Set who hears all spans of this process, whoever else listens for a while."""
    global _follower
    _follower = follower
    _tell()


def _tell() -> None:
    global _listener
    _listener = _Both(_follower, _hearing) if _follower and _hearing else _follower or _hearing


def inside() -> str:
    """The innermost open span of the clock that listens; empty where none does."""
    found = getattr(_hearing, "inside", "")
    return str(found)


class StepClock:
    """Books the time of a step to the spans inside it, by the host's clock; `device_clock` has the one for a GPU."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._parts: dict[str, int] = {}
        self._mark = 0
        self._began = 0
        self._before: Listener | None = None

    def begin(self) -> None:
        self._stack, self._parts = ["other"], {}
        self._before = listen(self)
        self._began = self._mark = perf_counter_ns()

    def end(self) -> tuple[int, dict[str, int]]:
        """The step's wall time and its parts, in ns; the parts sum to the wall time."""
        self._book()
        listen(self._before)
        return self._mark - self._began, self._parts

    @property
    def inside(self) -> str:
        return self._stack[-1]

    def enter(self, name: str) -> None:
        self._book()
        self._stack.append(name)

    def leave(self) -> None:
        self._book()
        self._stack.pop()

    def _book(self) -> None:
        now, name = perf_counter_ns(), self._stack[-1]
        self._parts[name] = self._parts.get(name, 0) + now - self._mark
        self._mark = now
