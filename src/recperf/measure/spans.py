"""A span is a name around a piece of work. When nothing listens it costs one function call and times nothing.

    with span("embedding"):
        ...

Every name is declared once with the phase of the step it belongs to: the names that all workloads share below, those of
a model where the model counts its work. A `StepClock` listens: between `begin()` and `end()` it adds the time of every
span to its name, excluding spans inside it, and the time outside of all spans to "other", so that the parts of a step
sum to its wall time. Torch-free.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

from ..errors import ConfigError

PHASES = ("data", "forward", "backward", "communication", "update", "other")
"""The phases of a step in order."""
EXCHANGE = "exchange"
"""`<span>_exchange` is the time in which a rank waits, inside that span, for data of other ranks."""
OTHER = "other"


class Declared(NamedTuple):
    phase: str
    part: str
    """Its part in the step budget of result.json."""
    kind: str
    """Kind of its work: tables, hash, products, interaction, dense update; empty for any other."""


_declared: dict[str, Declared] = {}


def declare(phase: str, *names: str, part: str | None = None, kind: str = "") -> None:
    """Declare span names of a phase.

    A forward name also declares `<name>_backward`. In the step budget, backward and update spans are one part each, and
    every other span is its own part unless `part` is given.
    """
    if phase not in PHASES:
        raise ConfigError(f"unknown phase {phase!r} of spans", where={"known": ", ".join(PHASES)})
    for name in names:
        own = phase if phase in ("backward", "update") else name
        _declared[name] = Declared(phase, part or own, kind)
        if phase == "forward":
            _declared[f"{name}_backward"] = Declared("backward", "backward", kind)


declare("data", "data")
declare("forward", "forward", "loss")
declare("forward", "embedding", kind="tables")
declare("forward", "hash", part="embedding", kind="hash")
declare("backward", "backward")
declare("backward", "recompute", part="recompute")
declare("update", "update", "dense_update", kind="dense update")
declare("update", "sparse_update", kind="tables")
declare("communication", EXCHANGE)
declare("other", OTHER, "reduce", "metrics", "graph")


def declared(name: str) -> Declared:
    """The declaration of a span name; an error where there is none."""
    if name in _declared:
        return _declared[name]
    if name.endswith(f"_{EXCHANGE}"):
        return Declared("communication", name, "")
    raise ConfigError(
        f"span {name!r} is not declared", fix=f'recperf.measure.spans.declare("forward", "{name}"), or another phase'
    )


def phase_of(name: str) -> str:
    """The phase of a span."""
    return declared(name).phase


def budget_part(name: str, default: str | None = None) -> str:
    """The part of the step budget that a span counts towards. A name read from a file may be unknown: give a default
    then."""
    known = name in _declared or name.endswith(f"_{EXCHANGE}")
    return default if default is not None and not known else declared(name).part


def kind_of(name: str) -> str:
    """The kind of work of a span; empty where it is unknown."""
    return _declared[name].kind if name in _declared else ""


class SpanListener(Protocol):
    def enter(self, name: str) -> None: ...

    def leave(self) -> None: ...


class _On:
    __slots__ = ("listener", "name")

    def __init__(self, listener: SpanListener, name: str) -> None:
        self.listener = listener
        self.name = name

    def __enter__(self) -> None:
        self.listener.enter(self.name)

    def __exit__(self, *_: object) -> None:
        self.listener.leave()


_OFF = nullcontext()
"""The span while there is no listener: one shared object that stores and times nothing."""
_listener: SpanListener | None = None
_only_waits = False


def span(name: str) -> nullcontext[None] | _On:
    """A context manager that tells the listener, if there is one, when the named work begins and ends."""
    if _listener is None or (_only_waits and not is_wait(name)):
        return _OFF
    declared(name)
    return _On(_listener, name)


def is_wait(name: str) -> bool:
    """Whether a span is a wait for input or for other ranks."""
    return name == "data" or name.endswith(EXCHANGE)


def listen(listener: SpanListener | None, *, only_waits: bool = False) -> SpanListener | None:
    """Set the current listener (None: no one) and return the one before. `only_waits`: it gets no other spans."""
    global _listener, _only_waits
    before, _listener, _only_waits = _listener, listener, only_waits
    return before


def inside() -> str:
    """The innermost open span of the current clock; empty where there is none."""
    return str(getattr(_listener, "inside", ""))


class StepClock:
    """Divides the wall time of a step among its spans, from marks at their boundaries; `clocks.EventClock` does
    the same for a GPU."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._marks: list[tuple[str, Any]] = []
        """The innermost span from each mark on, and the mark."""
        self._before: SpanListener | None = None

    def begin(self) -> None:
        self._stack, self._marks = [OTHER], []
        self._before = listen(self)
        self._mark()

    def end(self) -> tuple[int, dict[str, int]]:
        """The step's time and its parts, in ns; the parts sum to the whole."""
        self.close()
        return self.read()

    def close(self) -> None:
        self._mark()
        listen(self._before)

    def read(self) -> tuple[int, dict[str, int]]:
        parts: dict[str, int] = {}
        for (name, begin), (_, end) in pairwise(self._marks):
            parts[name] = parts.get(name, 0) + self._between(begin, end)
        return sum(parts.values()), parts

    @property
    def inside(self) -> str:
        return self._stack[-1]

    def enter(self, name: str) -> None:
        self._stack.append(name)
        self._mark()

    def leave(self) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._marks.append((self._stack[-1], self._now()))

    def _now(self) -> Any:
        return perf_counter_ns()

    def _between(self, begin: Any, end: Any) -> int:
        return int(end - begin)
