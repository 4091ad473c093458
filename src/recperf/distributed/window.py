"""A window of steps that several ranks measured together: which rank the others wait for, and what waiting costs.

Every rank measures the same steps, which begin at the same moment. A rank's own time is its step without the waits in
collectives; the slowest rank is the one with the largest own time. The part of a wait before the last rank reached the
collective is waiting for that rank (`late`), the rest is for bytes to move.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns, sleep

from msgspec.structs import replace

from ..machine import usable_cores
from ..measure.profile import Reading, overhead, spread
from ..measure.profile_records import Collective, Communication, MeasuredRank, StepBudget
from ..measure.spans import EXCHANGE
from .ranks import Ranks
from .waits import Clock, Wait, WaitLog, compare_clocks

OUTER = 0.2
"""Share of the steps left out at either end, by duration: a hiccup of the machine is nobody's fault."""
MARGIN_NS, SPIN_NS = 2_000_000, 200_000
"""How long before a common start ranks agree on it, and how much of that they spin instead of sleeping."""
QUEUED = "on a GPU the moment at which a rank reaches a collective is not known"
APART = "the ranks recorded different collectives"


@dataclass(frozen=True)
class RankReadings:
    """What a rank measured in its window."""

    clocked: list[Reading]
    plain: list[int]
    waits: list[list[Wait]]
    clock: Clock


class SharedWindow:
    """The window of several ranks; each of them creates one."""

    def __init__(self, world: Ranks) -> None:
        self.world, self.log, self.clock = world, WaitLog(), compare_clocks(world)
        self.watch, self.step = self.log.installed, self.log.step

    def meet(self) -> None:
        """Return on all ranks at the same moment. A barrier is not enough: the first rank may leave it earlier by more
        than a short step takes."""
        start = self.world.maximum(self._now()) + MARGIN_NS
        while (left := start - self._now()) > 0:
            sleep(max(0, left - SPIN_NS) / 1e9)

    def _now(self) -> int:
        return monotonic_ns() - self.clock.ahead_ns

    def join(self, budget: StepBudget, clocked: list[Reading], plain: list[int], *, queued: bool) -> StepBudget:
        """The window of all ranks: step times are the longest of any rank, parts are those of the slowest rank."""
        world = self.world
        ranks = world.all_gather(RankReadings(clocked, plain, self.log.steps, self.clock))
        communication = summarize(ranks, queued=queued)
        slowest = world.broadcast(budget, source=communication.slowest)
        walls = _longest(([wall for wall, _ in rank.clocked] for rank in ranks), len(ranks[0].clocked))
        plain = _longest((rank.plain for rank in ranks), len(ranks[0].plain))
        on_cpu = world.device == "cpu"
        if on_cpu:
            communication.sharing = ceiling_shares(world.local_size, slowest.threads, usable_cores())
        return replace(slowest, step_ms=spread(walls), overhead=overhead(walls, plain), communication=communication)


def ceiling_shares(ranks: int, threads: int, cores: int) -> int:
    """By how much the ceilings of all cores are divided. With more ranks than cores a share is still a rank's threads:
    while the others wait, it has those cores for itself."""
    return max(1, min(ranks, cores // threads))


def _longest(ranks: Iterable[Sequence[int]], steps: int) -> list[int]:
    listed = list(ranks)
    return [max(times[step] for times in listed) for step in range(steps)]


def summarize(ranks: list[RankReadings], *, queued: bool = False) -> Communication:
    """The section `communication` of a profile: means over the middle steps, in ms per step."""
    steps = _middle(_longest(([wall for wall, _ in rank.clocked] for rank in ranks), len(ranks[0].clocked)))
    why = QUEUED if queued else None if _alike(ranks) else APART
    lasts = None if why else _last(ranks, steps)
    each = [_of_rank(ranks, number, steps, lasts) for number in range(len(ranks))]
    step_ms, exposed_ms = _mean(row.step_ms for row in each), _mean(row.exposed_ms for row in each)
    late = None if lasts is None else _mean(row.late_ms or 0.0 for row in each)
    return Communication(
        ranks=len(ranks),
        hosts=len({rank.clock.host for rank in ranks}),
        slowest=max(each, key=lambda row: row.own_ms).rank,
        steps=len(steps),
        step_ms=step_ms,
        own_ms=_mean(row.own_ms for row in each),
        exposed_ms=exposed_ms,
        late_ms=late,
        moving_ms=None if late is None else exposed_ms - late,
        exposed_share=exposed_ms / step_ms if step_ms else 0.0,
        clock_error_ms=max(rank.clock.error_ns for rank in ranks) / 1e6,
        not_told_apart=why,
        each=each,
        collectives=[] if lasts is None else _rows(ranks, steps, lasts),
    )


def _middle(walls: list[int]) -> list[int]:
    """The steps that were neither among the longest nor among the shortest."""
    order = sorted(range(len(walls)), key=lambda step: walls[step])
    out = int(OUTER * len(walls))
    return sorted(order[out : len(walls) - out])


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _alike(ranks: list[RankReadings]) -> bool:
    """Whether all ranks recorded the same collectives in the same order."""
    seen = [[[(wait.number, wait.what, wait.part) for wait in step] for step in rank.waits] for rank in ranks]
    return all(other == seen[0] for other in seen[1:])


@dataclass(frozen=True)
class _Last:
    """The last rank to reach a collective."""

    rank: int
    came: int
    """By the clock of rank 0."""


def _last(ranks: list[RankReadings], steps: list[int]) -> dict[tuple[int, int], _Last]:
    """By step and position in it."""
    lasts = {}
    for step in steps:
        for place in range(len(ranks[0].waits[step])):
            came = [rank.waits[step][place].came - rank.clock.ahead_ns for rank in ranks]
            latest = max(range(len(ranks)), key=lambda number: came[number])
            lasts[step, place] = _Last(latest, came[latest])
    return lasts


def _late(wait: Wait, clock: Clock, last: _Last) -> int:
    """ns of a wait before the last rank arrived."""
    began, ended = wait.began - clock.ahead_ns, wait.ended - clock.ahead_ns
    return max(0, min(ended, last.came) - began)


def _of_rank(
    ranks: list[RankReadings], number: int, steps: list[int], lasts: Mapping[tuple[int, int], _Last] | None
) -> MeasuredRank:
    rank = ranks[number]
    walls = [rank.clocked[step][0] for step in steps]
    exposed = [
        sum(ns for name, ns in rank.clocked[step][1].items() if name.rpartition("_")[2] == EXCHANGE) for step in steps
    ]
    wall_ms, exposed_ms = _mean(walls) / 1e6, _mean(exposed) / 1e6
    late_ms = awaited_ms = None
    if lasts is not None:
        late = [_late(rank.waits[step][place], rank.clock, last) for (step, place), last in lasts.items()]
        # A wait is recorded slightly inside its span and must not exceed it.
        late_ms = min(exposed_ms, sum(late) / len(steps) / 1e6)
        awaited_ms = _awaited(ranks, number, lasts) / len(steps) / max(1, len(ranks) - 1) / 1e6
    return MeasuredRank(
        rank=number,
        step_ms=wall_ms,
        own_ms=wall_ms - exposed_ms,
        exposed_ms=exposed_ms,
        late_ms=late_ms,
        moving_ms=None if late_ms is None else exposed_ms - late_ms,
        awaited_ms=awaited_ms,
        largest_part=_largest([rank.clocked[step][1] for step in steps]),
    )


def _awaited(ranks: list[RankReadings], number: int, lasts: Mapping[tuple[int, int], _Last]) -> int:
    """ns that all others together waited for this rank."""
    return sum(
        _late(rank.waits[step][place], rank.clock, last)
        for (step, place), last in lasts.items()
        if last.rank == number
        for rank in ranks
    )


def _largest(parts: list[dict[str, int]]) -> str:
    """The part that takes most of a rank's own time."""
    total: defaultdict[str, int] = defaultdict(int)
    for step in parts:
        for name, ns in step.items():
            total[name] += ns if name.rpartition("_")[2] != EXCHANGE else 0
    return max(total, key=lambda name: total[name])


def _rows(ranks: list[RankReadings], steps: list[int], lasts: Mapping[tuple[int, int], _Last]) -> list[Collective]:
    """Collectives by part and kind; times are means over the ranks."""
    groups: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for step, place in lasts:
        wait = ranks[0].waits[step][place]
        groups[wait.part, wait.what].append((step, place))
    per_step = 1e6 * len(steps) * len(ranks)
    rows = []
    for (part, what), places in groups.items():
        waits = [(rank.waits[step][place], rank.clock, lasts[step, place]) for step, place in places for rank in ranks]
        exposed = sum(wait.ended - wait.began for wait, _, _ in waits) / per_step
        late = sum(_late(wait, clock, last) for wait, clock, last in waits) / per_step
        group = {place: lasts[place] for place in places}
        rows.append(
            Collective(
                part=part,
                what=what,
                count=len(places) / len(steps),
                bytes=sum(wait.bytes for wait, _, _ in waits) / len(steps) / len(ranks),
                exposed_ms=exposed,
                late_ms=late,
                moving_ms=exposed - late,
                awaited_rank=max(range(len(ranks)), key=lambda number: _awaited(ranks, number, group)),
            )
        )
    return sorted(rows, key=lambda row: -(row.exposed_ms or 0.0))
