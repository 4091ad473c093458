"""The shares of places in a step with their intervals: of operators from traced steps, of other time from samples.

A line's share by samples of its stack, whatever limits it, is a second measurement of the same: an interval that it
contradicts is widened until both fit. Torch-free.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from linecache import getline
from math import hypot
from typing import Any, NamedTuple

from msgspec.structs import asdict

from .attribution import divided_ms
from .intervals import Interval, of_samples, of_steps
from .places import BACKWARD, SWITCH_NS, Stack, place_in, place_text, surrounding
from .records import (
    DividedOperator,
    LineShare,
    NativeCode,
    Observed,
    Place,
    PlaceShare,
    PlaceTime,
    SampledStack,
    Sampling,
)
from .rows import name_places
from .timeline import WAITING, OperatorCall
from .trace.nesting import Nesting, TracedSteps, between
from .trace.read import Host, Trace, grouped, summed
from .trace.regions import TraceStacks

SMALLEST = 0.005
"""Share of a step from which a place is listed."""
FEWEST = 10
"""Samples that tell which frames surround the step; with fewer, its operators tell."""
STACKS = 400
"""Stacks that are stored; the others are joined by what the thread did."""


class Timed(NamedTuple):
    """Time of a limit at a place, in one step."""

    limit: str
    place: Place | None
    step: int
    time: float


class _Share(NamedTuple):
    share: float
    low: float
    high: float

    def plus(self, other: _Share) -> _Share:
        return _Share(*(one + more for one, more in zip(self, other, strict=True)))

    def within(self, of: float, varies: float, beside: float = 0.0) -> _Share:
        """A share of a part that is `of` the step, whose own length varies; `beside` is known of no sample."""
        if self.share <= 0:
            return _Share(0.0, 0.0, self.high * of + beside)
        below, above = hypot(1 - self.low / self.share, varies), hypot(self.high / self.share - 1, varies)
        share = self.share * of
        return _Share(share, max(0.0, share * (1 - below) - beside), min(1.0, share * (1 + above) + beside))


def place_rows(operators: list[DividedOperator], shares: dict[str, float], seen: Observed) -> list[PlaceTime]:
    """The places of a step by limit, largest first; `share` is that of the step. Operators have their own places, other
    time those of `seen`, as shares of their limit."""
    whole = divided_ms(seen.waits, seen.operators)
    if whole <= 0:
        return []
    # What a trace adds to a step is not divided as the step is; half of it may be taken from either side.
    slowed = min(0.5, abs(1 - seen.scale) / 2) if seen.scale else 0.0
    if seen.scale and seen.step_ms.p50:
        # Few steps are traced: they may be as unlike the others as these are among themselves.
        slowed = hypot(slowed, (seen.step_ms.p80 - seen.step_ms.p20) / 2 / seen.step_ms.p50)
    times: defaultdict[tuple[Place, str], _Share] = defaultdict(lambda: _Share(0.0, 0.0, 0.0))
    samples: Counter[tuple[Place, str]] = Counter()
    placed = ((row, limit, ms) for row in operators if row.place for limit, ms in row.limits.items())
    by_place = grouped(placed, lambda item: (item[0].place, item[1]))
    for (place, limit), items in by_place.items():
        share = sum(ms for _, _, ms in items) / whole
        each = _each_step([(row, ms) for row, _, ms in items], len(seen.traced_ms))
        low, high = of_steps(each, seen.traced_ms)
        mean = sum(each) / max(1e-9, sum(seen.traced_ms))
        around = _Share(1.0, low / mean, high / mean) if mean else _Share(1.0, 0.0, 1 / share if share else 1.0)
        assert place is not None
        times[place, limit] = around.within(share, slowed)
    outside = [sum(row.each_ms[at] for row in operators if row.each_ms) for at in range(len(seen.traced_ms))]
    python = of_steps([max(0.0, step - one) for step, one in zip(seen.traced_ms, outside)], seen.traced_ms)
    python_share = max(1e-9, 1 - sum(outside) / max(1e-9, sum(seen.traced_ms)))
    varies = {"python": hypot((python[1] - python[0]) / 2 / python_share, slowed), **seen.varies}
    switch = SWITCH_NS / 2e6 / seen.step_ms.p50 if seen.step_ms.p50 and seen.stacks else 0.0
    for one in seen.places:
        low, high = (one.share, one.share) if one.low is None or one.high is None else (one.low, one.high)
        beside = switch if one.limit in ("python", "blocked") else 0.0
        part = _Share(one.share, low, high).within(shares[one.limit], min(1.0, varies.get(one.limit, 0.0)), beside)
        times[one.place, one.limit] = times[one.place, one.limit].plus(part)
        samples[one.place, one.limit] += one.samples
    _agree(times, seen)
    known = bool(seen.traced_ms) or any(one.low is not None for one in seen.places)
    ordered = sorted(times.items(), key=lambda item: -item[1].share)
    return [
        PlaceTime(
            **asdict(place), limit=limit, share=one.share, ms=one.share * whole, samples=samples[place, limit],
            low=max(0.0, one.low) if known else None, high=min(1.0, one.high) if known else None,
        )
        for (place, limit), one in ordered
        if one.share >= SMALLEST
    ]  # fmt: skip


def _each_step(rows: Sequence[tuple[DividedOperator, float]], steps: int) -> list[float]:
    """The time of operators under a limit in each traced step: it has the same part of them in all steps."""
    each = [0.0] * steps
    for row, ms in rows:
        whole = sum(row.limits.values()) or 1.0
        for step, one in enumerate(row.each_ms[:steps]):
            each[step] += one * ms / whole
    return each


def _agree(times: dict[tuple[Place, str], _Share], seen: Observed) -> None:
    """Where a line's share by samples of all limits is another one, its Python follows the samples, at the cost of the
    Python of others, and its intervals are widened until both fit. A few long samples may make up most of the Python
    that is seen: all samples say more."""
    if seen.device != "cpu":
        return
    moved = 0.0
    spare: dict[tuple[Place, str], float] = {}
    for line in seen.lines:
        keys = [key for key in times if key[0] == line.place]
        share, low, high = (sum(times[key][at] for key in keys) for at in range(3))
        python = (line.place, "python")
        if line.share > share:
            spare[python] = line.share - share
        if not share or line.low <= share <= line.high:
            continue
        factor = line.share / share
        for key in keys:
            one = times[key]
            if low > line.high or high < line.low:
                one = one._replace(low=min(one.low, one.low * factor), high=max(one.high, one.high * factor))
            if key == python and share > line.high:
                less = min(one.share, share - line.high)
                moved += less
                one = one._replace(share=one.share - less, low=min(one.low, one.share - less))
            times[key] = one
    room = sum(spare.values())
    for key, most in spare.items():
        more = most * min(1.0, moved / room)
        one = times[key] if key in times else _Share(0.0, 0.0, 0.0)
        times[key] = _Share(one.share + more, one.low, max(one.high, one.share + more))


def shares_of(
    times: Iterable[Timed], interval: Callable[[list[tuple[int, float]], list[tuple[int, float]]], Interval]
) -> list[PlaceShare]:
    """Places outside of operators with their shares of a limit, from the time of each in every step; `interval` has
    those inside a place and all of the limit."""
    rows = []
    for limit, members in grouped(times, lambda one: one.limit).items():
        every = [(one.step, one.time) for one in members]
        whole = sum(time for _, time in every)
        for place, inside in grouped(members, lambda one: one.place).items():
            mine = [(one.step, one.time) for one in inside]
            time = sum(time for _, time in mine)
            if place and time > 0:
                low, high = interval(mine, every)
                source = getline(place.file, place.line).strip()
                rows.append(PlaceShare(limit, time / whole, place, source, low, high, len(mine)))
    order = list(dict.fromkeys(row.limit for row in rows))
    return sorted(rows, key=lambda row: (order.index(row.limit), -row.share))


def by_step(inside: list[tuple[int, float]], every: list[tuple[int, float]]) -> Interval:
    """The interval of a share from its time in each traced step."""
    parts, wholes = summed(inside), summed(every)
    return of_steps([parts[step] for step in wholes], list(wholes.values()))


def observer_places(observer: Any) -> Callable[[OperatorCall, Host], tuple[Place | None, bool]]:
    """A function that returns the place of a call of an Observer's counted step, and whether it is in a backward
    pass."""
    around = around_steps(observer)

    def own(call: OperatorCall, event: Host) -> tuple[Place | None, bool]:
        positions = call.work.stack if call.work else ()
        backward = call.work is not None and positions[:1] in ((), (BACKWARD,))
        return place_in(observer.stacks.stack(positions), around), backward

    return own


def around_steps(observer: Any) -> Stack:
    """The frames around all of the steps that an Observer saw."""
    stack = observer.stacks.stack
    positions = [sample.stack for sample in observer.sampler.samples]
    if len(positions) < FEWEST and observer.counter:
        positions = [work.stack for step in observer.counter.steps for work in step if work.stack]
    return surrounding(Counter(map(stack, positions)), stack(observer.end_stack))


def add_samples(result: Observed, observer: Any) -> None:
    """Add the places of the time outside of operators, the C code in it, all stacks, and what sampling cost."""
    sampler, around = observer.sampler, around_steps(observer)
    times, native = sampler.times(observer.counter.positions if observer.counter else ())
    python = sum(one.ns for one in times if one.limit == "python")
    outside = (
        Timed(one.limit, place_in(one.stack, around), one.step, one.ns)
        for one in times
        if one.limit in ("input", "python", "blocked") and one.ns
    )
    result.places = shares_of(outside, of_samples)
    modules = sorted(native, key=lambda name: -native[name])
    result.native = NativeCode(sum(native.values()) / python if python else 0.0, modules)
    result.sampling = Sampling(len(sampler.samples), sampler.cost)
    every = [(sample.step, float(sample.wall)) for sample in sampler.samples]
    at = [
        (place_in(sampler.stacks.stack(sample.stack), around), sample.step, float(sample.wall))
        for sample in sampler.samples
        if sample.stack[:1] != (BACKWARD,)
    ]
    whole = sum(wall for _, wall in every) or 1.0
    for place, inside in grouped(at, lambda one: one[0]).items():
        if place and len(every) >= FEWEST:
            share = sum(wall for _, _, wall in inside) / whole
            result.lines.append(LineShare(place, share, *of_samples([one[1:] for one in inside], every)))
    result.stacks = _stacks(times)


def _stacks(times: list[Any]) -> list[SampledStack]:
    """Equal stacks joined, largest first."""
    whole = sum(one.ns for one in times) or 1
    groups = grouped(times, lambda one: (one.stack, one.limit))
    rows = [
        SampledStack(
            [place_text(frame.place) for frame in stack], limit, sum(one.counts for one in members),
            sum(one.ns for one in members) / whole,
        )
        for (stack, limit), members in groups.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: -row.share)
    for limit, rest in grouped(rows[STACKS:], lambda row: row.limit).items():
        rows.append(SampledStack([], limit, sum(row.samples for row in rest), sum(row.share for row in rest)))
    return rows[:STACKS] + [row for row in rows[STACKS:] if not row.frames]


def folded(stacks: Iterable[SampledStack]) -> str:
    """Stacks as flame graph tools read them: frames from the outermost to what the thread did, and millionths of the
    sampled time."""
    lines = (
        f"{';'.join(text.replace(';', ',') for text in [*row.frames, f'[{row.limit}]'])} {round(1e6 * row.share)}\n"
        for row in stacks
    )
    return "".join(lines)


def trace_places(trace: Trace, nesting: Nesting, window: TracedSteps, calls: list[OperatorCall]) -> list[PlaceShare]:
    """Set the places of the calls of a trace, and return those of the time outside of operators, where it has Python
    stacks. On a device that is the time in which it is idle."""
    if not trace.python:
        return []
    stacks = TraceStacks(trace, nesting, window)
    name_places(nesting, calls, lambda _, event: stacks.at(event.thread, event.start))
    host = (event for event in nesting.events if event.kind in ("op", "call"))
    busy = [(event.start, event.end) for event in host if window.work or event.thread == nesting.thread]
    busy += [(work.start, work.end) for work in window.activity]
    covered = [*nesting.inputs, *busy, *((before, after) for (_, before), (after, _) in pairwise(window.steps))]
    times = [
        Timed(
            "blocked" if WAITING.match(event.name) and not window.work else "python", stacks.place(stack),
            window.step(start), us,
        )
        for event, stack, start, us in stacks.times(between(window.begin, window.end, covered))
    ]  # fmt: skip
    waits = (
        Timed("input", stacks.place(stack), window.step(start), us)
        for _, stack, start, us in stacks.times(nesting.inputs)
    )
    return shares_of([*times, *waits], by_step)
