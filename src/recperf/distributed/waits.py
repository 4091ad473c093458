"""The time a step spends waiting for other ranks: torch.distributed's collectives, watched while a window is measured.

TorchRec and recperf call collectives by their name in torch.distributed, so they are wrapped there. Each wait is a span
`<part>_exchange` and has three moments: when this rank reached the collective, and when it began and ended waiting for
it. All ranks reach the same collectives in the same order, so moments of different ranks can be compared: the others
waited for the last rank to arrive. Ranks of one host read the same clock; between hosts the offset is measured.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..measure import spans
from .ranks import Ranks, host

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "reduce_scatter",
    "reduce_scatter_tensor",
)  # fmt: skip
ROUNDS = 16
"""Round trips by which a clock offset is measured; the fastest one is the most accurate."""


class Wait(NamedTuple):
    """A rank's wait for a collective; moments in ns."""

    number: int
    """Counts collectives since the watch began; the same collective has the same number on every rank."""
    what: str
    part: str
    """The part of the step it is in."""
    came: int
    began: int
    ended: int
    bytes: int
    """The input of this rank."""


class WaitLog:
    """Records the waits of some steps."""

    def __init__(self) -> None:
        self.steps: list[list[Wait]] = []
        self._count = 0
        self._recording = False

    @contextmanager
    def installed(self) -> Iterator[WaitLog]:
        """Wrap torch.distributed. Not only in recorded steps: a step may wait for what an earlier one began."""
        originals = {name: getattr(distributed, name) for name in COLLECTIVES}
        for name, call in originals.items():
            setattr(distributed, name, self._wrapped(name, call))
        try:
            yield self
        finally:
            for name, call in originals.items():
                setattr(distributed, name, call)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record the waits of a step."""
        self.steps.append([])
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(call).parameters)
        # all_reduce works in place on its one tensor; the others take their input second.
        input_place, async_place = 0 if name == "all_reduce" else 1, parameters.index("async_op")

        def argument(place: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return arguments[place] if len(arguments) > place else named.get(parameters[place])

        @functools.wraps(call)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self._count += 1
            sent = _bytes(argument(input_place, arguments, named))
            arrival = _Arrival(self, self._count, name, monotonic_ns(), sent)
            if not argument(async_place, arguments, named):
                return arrival.wait(lambda: call(*arguments, **named))
            work = call(*arguments, **named)
            return _WatchedWork(work, arrival) if work is not None else None

        return wrapped

    def add(self, wait: Wait) -> None:
        if self._recording:
            self.steps[-1].append(wait)


class _Arrival(NamedTuple):
    """A collective that this rank has reached."""

    log: WaitLog
    number: int
    what: str
    came: int
    bytes: int

    def wait(self, finish: Callable[[], Any]) -> Any:
        part = _part()
        began = monotonic_ns()
        with exchange_span():
            result = finish()
        self.log.add(Wait(self.number, self.what, part, self.came, began, monotonic_ns(), self.bytes))
        return result


def exchange_span() -> AbstractContextManager[None]:
    """A span around a wait for other ranks, named after the part of the step that it is in."""
    part = _part()
    return spans.span(spans.EXCHANGE if part == spans.OTHER else f"{part}_{spans.EXCHANGE}")


def _part() -> str:
    """The part of the step that is open, without a wait inside it."""
    name = spans.inside()
    return spans.OTHER if name in ("", spans.EXCHANGE) else name.removesuffix(f"_{spans.EXCHANGE}")


class _WatchedWork(distributed.Work):
    """An asynchronous collective; TorchRec checks that it is a `Work`."""

    def __init__(self, work: Any, arrival: _Arrival) -> None:
        super().__init__()
        self._work, self._arrival = work, arrival

    def wait(self, *arguments: Any, **named: Any) -> bool:
        return bool(self._arrival.wait(lambda: self._work.wait(*arguments, **named)))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _bytes(tensors: Any) -> int:
    listed = tensors if isinstance(tensors, list | tuple) else [tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in listed if isinstance(tensor, Tensor))


@dataclass(frozen=True)
class Clock:
    """How a rank's clock relates to rank 0's."""

    host: str
    """Equal on ranks that share a clock."""
    ahead_ns: int = 0
    """Subtracted from this rank's moments it gives rank 0's."""
    error_ns: int = 0
    """The largest error of that."""


def compare_clocks(world: Ranks) -> Clock:
    """Measure this rank's clock against rank 0's. Every rank calls it."""
    here = host()
    hosts = world.all_gather(here)
    clock = Clock(here)
    # One rank after the other: rank 0 answers at once only while it talks to a single one.
    for rank in (rank for rank, other in enumerate(hosts) if other != hosts[0]):
        if world.rank == rank:
            clock = _measure_offset(here)
        elif world.is_leader:
            _answer(rank)
    return clock


def _measure_offset(here: str) -> Clock:
    leader_time, best = torch.zeros(1, dtype=torch.int64), Clock(here, 0, 1 << 62)
    for _ in range(ROUNDS):
        sent = monotonic_ns()
        distributed.send(leader_time, 0)
        distributed.recv(leader_time, 0)
        error = (monotonic_ns() - sent) // 2
        if error < best.error_ns:
            best = Clock(here, sent + error - int(leader_time), error)
    return best


def _answer(rank: int) -> None:
    for _ in range(ROUNDS):
        distributed.recv(torch.zeros(1, dtype=torch.int64), rank)
        distributed.send(torch.tensor([monotonic_ns()]), rank)
