"""Divides the time of a training step among its parts, with clocks at the boundaries of its spans."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from time import perf_counter_ns
from typing import Any, Protocol

import torch
from torch import Tensor

from .clocks import ThreadClock, step_clock
from .cost import Cost
from .profile_records import SCHEMA, Component, Ids, StepBudget
from .records import Percentiles
from .spans import OTHER, phase_of
from .trace.nesting import spread as percentiles

FEWEST = 5
"""Minimum number of steps in a window."""
Reading = tuple[int, dict[str, int]]
"""Wall time of a step and of its parts, in ns."""
ClockedStep = Callable[[Iterator[Any]], Reading]


class Order(Protocol):
    def __len__(self) -> int: ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]: ...


class Subject(Protocol):
    """A training whose steps are measured. They change its weights but no result."""

    order: Order
    first_epoch: int
    """The first one that training did not use."""
    device: str
    precision: str
    row_bytes: int
    table_bytes: int
    sync: Callable[[], None] | None
    ranks: Any
    """The window of all ranks that take these steps together: `meet`, `watch`, `step` and `join`."""
    world: Any
    """The ranks that take the steps."""
    alone: bool
    """Whether there is one."""
    clocked: ClockedStep | None
    """Times the parts of a CUDA graph; None where spans can time them."""
    eager: Callable[[Iterator[Any]], object] | None
    """Takes a step of a CUDA graph without the graph; None where there is none."""

    def step(self, batches: Iterator[Any]) -> object: ...

    def rows_of(self, batch: Any) -> Tensor:
        """The table rows that a batch looks up."""
        ...

    def cost_of(self, batch: Any, ids: int, unique: int) -> dict[str, Cost]:
        """Counts the work of a step on a batch, by span."""
        ...

    def tiers(self) -> Any:
        """The rows of its tables, where these do not lie on the device, else None."""
        ...


class ClockedSteps:
    """Clocks steady steps on batches that training has not seen, without the time in which other work had their core.

    Ranks meet before each. Since a step may wait for work that the previous one began, one more step runs before them.
    Two that begin `later` by a different number of epochs share no ids.
    """

    def __init__(self, subject: Subject, *, later: int = 0) -> None:
        self.subject, self.sync = subject, subject.sync
        self._synchronize = subject.sync or (lambda: None)
        self.batches = endless(subject.order, subject.first_epoch + later)
        self.warmup = 0
        self.clocked: list[Reading] = []
        self.touched = torch.zeros(subject.table_bytes // subject.row_bytes, dtype=torch.bool)
        self.lookups = self.unique = self.samples = self.counted = 0
        self.costs: dict[str, Cost] = {}
        self._clock = ThreadClock()

    def warm(self, steps: int) -> None:
        """Take steps that are not measured."""
        for _ in range(steps):
            self.subject.step(self.batches)
        self.warmup += steps

    def warm_up(self, steps: int, *, seconds: float) -> int:
        """Warm up and return how many steps to clock: at most `steps`, fewer where they would take longer than that."""
        self.warm(2)
        self._synchronize()
        began = perf_counter_ns()
        self.warm(2)
        self._synchronize()
        each = (perf_counter_ns() - began) / 2e9
        # The warm-up is a quarter of them.
        steps = self.subject.world.maximum(max(FEWEST, min(steps, int(seconds / each / 1.25))))
        self.warm(max(0, steps // 4 - 4))
        return steps

    def take(self, steps: int) -> None:
        """Take that many clocked steps."""
        with self.subject.ranks.watch():
            self.warm(1)
            for _ in range(steps):
                self._take_clocked()

    def keep(self, steps: list[int]) -> None:
        """Forget the times of all other steps; what was counted is a mean over all of them."""
        self.clocked = [self.clocked[step] for step in steps]

    def _take_clocked(self) -> None:
        taken: list[Any] = []

        def batches() -> Iterator[Any]:
            for batch in self.batches:
                taken.append(batch)
                yield batch

        self.subject.ranks.meet()
        began = self._clock.now()
        with self.subject.ranks.step():
            wall, parts = (self.subject.clocked or self._clocked)(batches())
        # Other work took the core at moments that do not depend on the part.
        own = max(0.0, 1 - self._clock.now().since(began).waiting / wall)
        self.clocked.append((round(own * wall), {name: round(own * ns) for name, ns in parts.items()}))
        # Counted after the clock stopped, so that it costs no step anything.
        batch = taken[-1]
        rows = self.subject.rows_of(batch).cpu()
        distinct = torch.unique(rows)
        self.touched[distinct] = True
        self.lookups += rows.numel()
        self.unique += distinct.numel()
        self.counted += 1
        self.samples += len(batch)
        for name, cost in self.subject.cost_of(batch, rows.numel(), distinct.numel()).items():
            self.costs[name] = self.costs.get(name, Cost()) + cost

    def _clocked(self, batches: Iterator[Any]) -> Reading:
        clock = step_clock(self.sync)
        self._synchronize()
        clock.begin()
        self.subject.step(batches)
        return clock.end()

    def result(self) -> StepBudget:
        """The time of the steps of all ranks by part."""
        subject = self.subject
        # Batches that were prepared ahead may hold rows of tables in a cache.
        self.batches.close()
        self._clock.close()
        count = self.counted
        costs = {name: Cost(round(cost.flops / count), round(cost.bytes / count)) for name, cost in self.costs.items()}
        budget = StepBudget(
            schema=SCHEMA,
            device=subject.device,
            steps=len(self.clocked),
            warmup=self.warmup,
            batch_size=round(self.samples / count),
            threads=torch.get_num_threads(),
            step_ms=spread([wall for wall, _ in self.clocked]),
            components=components(self.clocked, costs),
            ids=Ids(
                lookups=self.lookups / count,
                unique_rows=self.unique / count,
                row_bytes=subject.row_bytes,
                working_set_bytes=subject.table_bytes,
                touched_bytes=int(self.touched.sum()) * subject.row_bytes,
            ),
            precision=subject.precision,
        )
        joined: StepBudget = subject.ranks.join(budget, self.clocked, queued=self.sync is not None)
        return joined


def endless(order: Order, epoch: int) -> Generator[Any, None, None]:
    """Full batches of one epoch after another; the last batch of an epoch may be smaller and is left out."""
    while True:
        batches = order.batches(epoch)
        for _ in range(max(1, len(order) - 1)):
            yield next(batches)
        epoch += 1


def spread(nanoseconds: list[int]) -> Percentiles:
    """p20, p50 and p80 in ms."""
    return percentiles([ns / 1e6 for ns in nanoseconds])


def components(clocked: list[tuple[int, dict[str, int]]], costs: dict[str, Cost]) -> list[Component]:
    """Each part with its time, its share (all sum to 1) and its counted work, in the order they first ran.

    Shares are of the sum of the medians, so that a few slow steps change no share and none contradicts a time. A cost
    with an undeclared name is an error.
    """
    names = list(dict.fromkeys(name for _, parts in clocked for name in parts))
    times = {name: spread([parts.get(name, 0) for _, parts in clocked]) for name in names}
    whole = sum(ms.p50 for ms in times.values()) or 1.0
    booked: dict[str, Cost] = {}
    for name, cost in costs.items():
        # Work whose own span was not opened counts for the span that names its phase, or for "other": none is lost.
        phase = phase_of(name)
        span = name if name in names else phase if phase in names else OTHER
        if span == name or cost != Cost():
            booked[span] = booked.get(span, Cost()) + cost
    rows = []
    for name in names:
        work = (booked[name].flops, booked[name].bytes) if name in booked else (None, None)
        rows.append(Component(name, phase_of(name), times[name], times[name].p50 / whole, *work))
    return rows
