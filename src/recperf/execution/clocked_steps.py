"""Steps of a workload after its training, and clocks that divide their time among their parts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import current
from ..distributed.shared_run import window_of
from ..distributed.shares import own_part
from ..measure.clocks import ClockReading, Reading, ThreadClock, components, spread, step_clock
from ..measure.cost import Cost
from ..measure.profile_records import IdFacts, StepBudget
from ..train.graph import GraphStep
from ..train.loop import Recipe, take_step
from .workload import Prepared, Trial

FEWEST = 5
"""Minimum number of steps in a window."""


class TrainingSteps:
    """Steps of a trial after its training, by this recipe. They change its weights but no result."""

    def __init__(self, prepared: Prepared, trial: Trial, recipe: Recipe) -> None:
        self.recipe, self.order, self.first_epoch = recipe, recipe.order, recipe.epochs
        self.device, self.precision = prepared.settings.device_name, prepared.settings.precision
        self.row_bytes, self.table_bytes = prepared.table_bytes()
        self.sync, self.cost = prepared.settings.sync, prepared.step_cost
        self.trial, self.world, self.ranks = trial, current(), window_of(current())
        self.alone = current().choose(True, several=False)
        # With the last learning rate of the schedule the update does its full work and hardly changes the weights.
        whole, rate = recipe.whole_step, recipe.learning_rate(recipe.steps - 1)
        self.clocked: Callable[[Iterator[Any]], Reading] | None = None
        """Times the parts of a CUDA graph; None where spans can time them."""
        self.eager: Callable[[Iterator[Any]], object] | None = None
        """Takes a step of a CUDA graph without the graph; None where there is none."""
        if isinstance(whole, GraphStep):
            self.eager = lambda batches: whole.eager(batches, rate)
            self.clocked = lambda batches: whole.clocked(batches, rate)

    def step(self, batches: Iterator[Any]) -> object:
        return take_step(self.recipe, batches, self.recipe.steps - 1)

    def rows_of(self, batch: Any) -> Tensor:
        return self.trial.rows_of(own_part(batch))

    def cost_of(self, batch: Any, ids: int, unique: int) -> dict[str, Cost]:
        return self.cost(own_part(batch), ids, unique)

    def tiers(self) -> Any:
        return self.trial.tiers()


class ClockedSteps:
    """Clocks steady steps on batches that training has not seen, without the time in which other work had their core.

    Ranks meet before each. Since a step may wait for work that the previous one began, one more step runs before them.
    Two that begin `later` by a different number of epochs share no ids.
    """

    def __init__(self, subject: TrainingSteps, *, later: int = 0) -> None:
        self.subject, self.sync = subject, subject.sync
        self._synchronize = subject.sync or (lambda: None)
        self.batches = endless(subject.order, subject.first_epoch + later)
        self.warmup = 0
        self.clocked: list[Reading] = []
        self.lookup_ns: list[int] = []
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

    def take_lookups(self, draw: Callable[[], Callable[[], object]], times: int) -> None:
        """Clock lookups by themselves, `times` times, each of rows that are drawn before; once more to warm up."""
        draw()()
        for _ in range(times):
            look_up = draw()
            self._synchronize()
            began = self._clock.now()
            began_ns = perf_counter_ns()
            look_up()
            self._synchronize()
            ns = perf_counter_ns() - began_ns
            self.lookup_ns.append(round(self._own_share(began) * ns))

    def keep(self, steps: list[int]) -> None:
        """Forget the times of all other steps and lookups; what was counted is a mean over all of them."""
        self.clocked = [self.clocked[step] for step in steps]
        self.lookup_ns = [self.lookup_ns[step] for step in steps if self.lookup_ns]

    def _own_share(self, began: ClockReading) -> float:
        """The part of the time since in which other work did not have this thread's core."""
        passed = self._clock.now().since(began)
        return min(1.0, max(passed.cpu, passed.wall - passed.waiting) / passed.wall)

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
        # Other work took the core at moments that do not depend on the part, but not while the thread itself computed.
        own = self._own_share(began)
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
            device=subject.device,
            steps=len(self.clocked),
            warmup=self.warmup,
            batch_size=round(self.samples / count),
            threads=torch.get_num_threads(),
            step_ms=spread([wall for wall, _ in self.clocked]),
            components=components(self.clocked, costs),
            ids=IdFacts(
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


def endless(order: Any, epoch: int) -> Generator[Any, None, None]:
    """Full batches of one epoch after another; the last batch of an epoch may be smaller and is left out."""
    while True:
        batches = order.batches(epoch)
        for _ in range(max(1, len(order) - 1)):
            yield next(batches)
        epoch += 1
