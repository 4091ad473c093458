"""The time a step spends waiting for other ranks: torch.distributed's collectives, watched while a window is measured.

TorchRec and recperf call collectives by their name in torch.distributed, so they are wrapped there. Each wait is a span
`<part>_exchange` and has three moments: when this rank reached the collective, and when it began and ended waiting for
it. All ranks reach the same collectives in the same order. Ranks of one host read the same clock, so that the part of a
wait before the last rank reached the collective is waiting for that rank (`late`); the rest is for bytes to move.

Traces of the ranks do not replace this. A trace shows how long a collective is in flight, not how long its rank waits
for it: Python code of the step that runs while the next batch's ids travel looks like a wait. The profiler also makes
short steps about twice as long, and is not there in the steps that a run's budget is measured with. Traces are compared
(measure/trace/analyse.py) where there is nothing else: other programs, and NCCL's kernels.

Every rank measures the same steps. A rank's own time is its step without the waits; the slowest rank is the one with
the largest own time.

Shapes: R ranks, S steps, N collectives of all these steps.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import monotonic_ns, sleep
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor, distributed

from ..machine import usable_cores
from ..measure import spans
from ..measure.clocks import Reading, spread
from ..measure.profile_records import Collective, Communication, MeasuredRank, StepBudget
from .ranks import Ranks, host

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "reduce_scatter",
    "reduce_scatter_tensor",
)  # fmt: skip
OUTER = 0.2
"""Share of the steps left out at either end, by duration: a hiccup of the machine is nobody's fault."""
MARGIN_NS, SPIN_NS = 2_000_000, 200_000
"""How long before a common start ranks agree on it, and how much of that they spin instead of sleeping."""
QUEUED = "on a GPU the moment at which a rank reaches a collective is not known"
SEVERAL_HOSTS = "the clocks of several hosts differ"
APART = "the ranks recorded different collectives"
Times = NDArray[np.int64]


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
        input_index, async_index = 0 if name == "all_reduce" else 1, parameters.index("async_op")

        def argument(index: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return arguments[index] if len(arguments) > index else named.get(parameters[index])

        @functools.wraps(call)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self._count += 1
            sent = _bytes(argument(input_index, arguments, named))
            arrival = _Arrival(self, self._count, name, monotonic_ns(), sent)
            if not argument(async_index, arguments, named):
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
class RankReadings:
    """What a rank measured in its window."""

    clocked: list[Reading]
    waits: list[list[Wait]]


class SharedWindow:
    """The window of several ranks; each of them creates one."""

    def __init__(self, world: Ranks) -> None:
        self.world, self.log = world, WaitLog()
        self.hosts = len(set(world.all_gather(host())))
        self.watch, self.step = self.log.installed, self.log.step

    def meet(self) -> None:
        """Return on all ranks of a host at the same moment. A barrier is not enough: the first rank may leave it
        earlier by more than a short step takes."""
        start = self.world.maximum(monotonic_ns()) + MARGIN_NS
        while self.hosts == 1 and (left := start - monotonic_ns()) > 0:
            sleep(max(0, left - SPIN_NS) / 1e9)

    def join(self, budget: StepBudget, clocked: list[Reading], *, queued: bool) -> StepBudget:
        """The window of all ranks: step times are the longest of any rank, parts are those of the slowest rank."""
        world = self.world
        ranks = world.all_gather(RankReadings(clocked, self.log.steps))
        communication = summarize(ranks, hosts=self.hosts, queued=queued)
        slowest = world.broadcast(budget, source=communication.slowest)
        walls = np.array([[wall for wall, _ in rank.clocked] for rank in ranks]).max(0).tolist()
        if world.device == "cpu":
            communication.sharing = ceiling_shares(world.local_size, slowest.threads, usable_cores())
        return replace(slowest, step_ms=spread(walls), communication=communication)


def ceiling_shares(ranks: int, threads: int, cores: int) -> int:
    """By how much the ceilings of all cores are divided. With more ranks than cores a share is still a rank's threads:
    while the others wait, it has those cores for itself."""
    return max(1, min(ranks, cores // threads))


def summarize(ranks: list[RankReadings], *, hosts: int = 1, queued: bool = False) -> Communication:
    """The section `communication` of a profile: means over the middle steps, in ms per step."""
    walls_RS = np.array([[wall for wall, _ in rank.clocked] for rank in ranks])
    steps, count = _middle(walls_RS.max(0)), len(ranks)
    parts = [[rank.clocked[step][1] for step in steps] for rank in ranks]
    step_R = walls_RS[:, steps].mean(1) / 1e6
    exposed_R = np.array(
        [sum(ns for step in rank for name, ns in step.items() if _is_exchange(name)) for rank in parts]
    )
    exposed_R = exposed_R / len(steps) / 1e6
    waits = [[wait for step in steps for wait in rank.waits[step]] for rank in ranks]
    alike = len({tuple((wait.number, wait.what, wait.part) for wait in rank) for rank in waits}) == 1
    why = QUEUED if queued else SEVERAL_HOSTS if hosts > 1 else None if alike else APART
    late_R, awaited_R, rows = None, [None] * count, []
    if why is None:
        separated = _Separated.of(waits)
        # A wait is recorded slightly inside its span and must not exceed it.
        late_R = np.minimum(exposed_R, separated.late_RN.sum(1) / len(steps) / 1e6)
        awaited_R = (separated.awaited_R() / len(steps) / max(1, count - 1) / 1e6).tolist()
        rows = separated.rows(waits, len(steps))
    each = [
        MeasuredRank(
            rank=rank,
            step_ms=float(step_R[rank]),
            own_ms=float(step_R[rank] - exposed_R[rank]),
            exposed_ms=float(exposed_R[rank]),
            late_ms=None if late_R is None else float(late_R[rank]),
            moving_ms=None if late_R is None else float(exposed_R[rank] - late_R[rank]),
            awaited_ms=awaited_R[rank],
            largest_part=_largest(parts[rank]),
        )
        for rank in range(count)
    ]
    step_ms, exposed_ms = float(step_R.mean()), float(exposed_R.mean())
    late_ms = None if late_R is None else float(late_R.mean())
    return Communication(
        ranks=count,
        hosts=hosts,
        slowest=int((step_R - exposed_R).argmax()),
        steps=len(steps),
        step_ms=step_ms,
        own_ms=step_ms - exposed_ms,
        exposed_ms=exposed_ms,
        late_ms=late_ms,
        moving_ms=None if late_ms is None else exposed_ms - late_ms,
        exposed_share=exposed_ms / step_ms if step_ms else 0.0,
        not_told_apart=why,
        each=each,
        collectives=rows,
    )


def _middle(walls_S: Times) -> list[int]:
    """The steps that were neither among the longest nor among the shortest."""
    out = int(OUTER * len(walls_S))
    return sorted(np.argsort(walls_S, kind="stable")[out : len(walls_S) - out].tolist())


def _is_exchange(name: str) -> bool:
    return name.rpartition("_")[2] == spans.EXCHANGE


def _largest(parts: list[dict[str, int]]) -> str:
    """The part that takes most of a rank's own time."""
    total: defaultdict[str, int] = defaultdict(int)
    for step in parts:
        for name, ns in step.items():
            total[name] += 0 if _is_exchange(name) else ns
    return max(total, key=lambda name: total[name])


class _Separated(NamedTuple):
    """Waits in ns, and how long of each its rank waited for the last one to arrive."""

    waited_RN: Times
    late_RN: Times
    last_N: Times
    """The last rank to reach each collective."""

    @classmethod
    def of(cls, waits: list[list[Wait]]) -> _Separated:
        came_RN, began_RN, ended_RN = (
            np.array([[getattr(wait, moment) for wait in rank] for rank in waits], np.int64)
            for moment in ("came", "began", "ended")
        )
        late_RN = np.maximum(0, np.minimum(ended_RN, came_RN.max(0)) - began_RN)
        return cls(ended_RN - began_RN, late_RN, came_RN.argmax(0))

    def awaited_R(self) -> NDArray[np.float64]:
        """How long all others together waited for each rank."""
        awaited_R = np.zeros(len(self.late_RN))
        np.add.at(awaited_R, self.last_N, self.late_RN.sum(0))
        return awaited_R

    def rows(self, waits: list[list[Wait]], steps: int) -> list[Collective]:
        """Collectives by part and kind; times are means over the ranks."""
        groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for index, wait in enumerate(waits[0]):
            groups[wait.part, wait.what].append(index)
        per_step, rows = steps * len(waits), []
        for (part, what), indices in groups.items():
            own = _Separated(self.waited_RN[:, indices], self.late_RN[:, indices], self.last_N[indices])
            exposed, late = (float(ns.sum()) / per_step / 1e6 for ns in (own.waited_RN, own.late_RN))
            rows.append(
                Collective(
                    part=part,
                    what=what,
                    count=len(indices) / steps,
                    bytes=sum(rank[index].bytes for rank in waits for index in indices) / per_step,
                    exposed_ms=exposed,
                    late_ms=late,
                    moving_ms=exposed - late,
                    awaited_rank=int(own.awaited_R().argmax()),
                )
            )
        return sorted(rows, key=lambda row: -(row.exposed_ms or 0.0))
