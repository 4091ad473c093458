"""The part of a trace that is analysed: whole steps of the host, and the device work they launched."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection
from statistics import quantiles

from ..records import Percentiles
from .nesting import NONE, Nesting
from .read import Device, Trace
from .records import Window

SMALL_US = 10.0
"""A kernel shorter than this takes about as long to launch as to run."""


class TracedSteps:
    """Begins when the first step has begun and the device has finished earlier work; ends when the last step and its
    device work have ended. So it is as long as the steps took, however far the host ran ahead.
    """

    def __init__(self, trace: Trace, nesting: Nesting, only: Collection[int] | None = None) -> None:
        """`only` are the numbers of the steps to look at, in a trace without a device; otherwise all of them."""
        self.nesting = nesting
        steps = [(step.start, step.end) for step in nesting.steps] or [_whole(trace)]
        steps = [step for number, step in enumerate(steps) if only is None or number in only]
        self.named = bool(nesting.steps)
        self.steps_from = nesting.steps_from if nesting.steps else "whole trace"
        self.count = len(steps)
        self.host_us = sum(end - start for start, end in steps)
        self.steps, self._starts = steps, [start for start, _ in steps]
        self.work: list[Device] = []
        """Device work that the steps launched, on every device, in order of time."""
        begin, end = steps[0][0], steps[-1][1]
        for work in sorted(trace.device, key=lambda work: (work.start, work.end)):
            at = self._launched(work)
            if self.holds(at):
                self.work.append(work)
                end = max(end, work.end)
            elif at < steps[0][0]:
                begin = max(begin, work.end)
        self.begin, self.end = min(begin, end), end
        self.device = _busiest(self.work)
        self.activity = [
            work
            for work in sorted(trace.device, key=lambda work: (work.start, work.end))
            if work.device == self.device and work.end > self.begin and work.start < self.end
        ]
        """Everything the busiest device did in the window, whoever launched it."""
        self._first: dict[int, Device] = {}
        for work in self.work:
            if work.correlation is not None:
                self._first.setdefault(work.correlation, work)

    def step(self, time: float) -> int:
        """The number of the step that a host time lies in, or NONE."""
        index = bisect_right(self._starts, time) - 1
        return index if index >= 0 and time <= self.steps[index][1] else NONE

    def holds(self, time: float) -> bool:
        """Whether a host time lies inside a step."""
        return self.step(time) != NONE

    def step_of(self, work: Device) -> int:
        """The step that launched device work."""
        return self.step(self._launched(work))

    def delay(self, work: Device) -> float | None:
        """Time from the end of the launch call to the start of the work. Only the first work of a call has one: the
        other kernels of a graph wait for their predecessors."""
        call = self.nesting.launch(work)
        if call == NONE or self.first_of_launch(work) is not work:
            return None
        return max(0.0, work.start - self.nesting.events[call].end)

    def first_of_launch(self, work: Device) -> Device:
        return work if work.correlation is None else self._first.get(work.correlation, work)

    def step_ms(self) -> list[float]:
        """The time of every step. Device work that outlasts its step belongs to it, and the next step begins later."""
        ends = [end for _, end in self.steps]
        for work in self.work:
            step = self.step_of(work)
            ends[step] = max(ends[step], work.end)
        times, before = [], self.begin
        for (start, _), end in zip(self.steps, ends):
            # A host that runs ahead begins a step while the device still works on the one before.
            begin = max(before, start)
            times.append(max(0.0, end - begin) / 1e3)
            before = max(end, begin)
        return times

    def summary(self) -> Window:
        return Window(
            steps=self.count,
            named=self.named,
            steps_from=self.steps_from,
            wall_ms=(self.end - self.begin) / 1e3 / self.count,
            host_ms=self.host_us / 1e3 / self.count,
            devices=len({work.device for work in self.work}),
            device=self.device,
        )

    def _launched(self, work: Device) -> float:
        origin = self.nesting.origin(work)
        return work.start if origin == NONE else self.nesting.events[origin].start


def _whole(trace: Trace) -> tuple[float, float]:
    times = [(event.start, event.end) for event in trace.host]
    times += [(work.start, work.end) for work in trace.device]
    return min(start for start, _ in times), max(end for _, end in times)


def _busiest(work: list[Device]) -> int | None:
    time: Counter[int] = Counter()
    for item in work:
        time[item.device] += max(1, round(1e3 * (item.end - item.start)))
    return time.most_common(1)[0][0] if time else None


def per_step(count: int, steps: int) -> int | float:
    """A count per step, as an integer where it divides evenly."""
    return count // steps if count % steps == 0 else count / steps


def spread(values: list[float]) -> Percentiles:
    """p20, p50 and p80; the values themselves where there are too few for a spread."""
    if len(values) < 2:
        return Percentiles(*[values[0] if values else 0.0] * 3)
    cuts = quantiles(values, n=10, method="inclusive")
    return Percentiles(cuts[1], cuts[4], cuts[7])
