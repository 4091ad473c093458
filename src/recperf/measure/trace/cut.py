"""Makes a trace small enough for a viewer: as many whole steps from the first on as fit."""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import DataError
from .file import Event, Scan, event_text, write_trace
from .read import KINDS, MARK, STEP_OF_TORCH, collect, find_steps

ALWAYS, NEVER = -2, -1
"""Steps of events that belong to every cut (names of threads, marks that align ranks) and to none (outside steps)."""
_MARGIN = 0.97
"""Gzipped sizes are estimated from the mean; a step may compress a little worse."""
_SAMPLE = 20_000_000
"""Characters compressed to estimate the ratio."""


def write_cut(source: Path, target: Path, megabytes: float, *, steps_name: str = "recperf.step") -> dict[str, Any]:
    """Write as many whole steps of a trace as fit into that many MB (10^6 bytes), gzipped if the name ends in .gz.

    A trace that fits is written whole. If not even the first step fits, that is an error.
    """
    steps = _Steps(source, steps_name)
    packed = target.suffix == ".gz"
    sizes, ratio = steps.sizes(packed)
    limit = megabytes * 1e6
    recorded = max(1, len(steps.starts))
    count = _fitting(sizes, limit / ratio * (_MARGIN if packed else 1.0))
    while True:
        if not count:
            raise _too_large(source, ratio * (sizes[ALWAYS] + sizes[0]), limit)
        size = write_trace(target, steps.first(count), lambda: steps.header, limit=limit)
        if size <= limit:
            break
        # The estimate was too low: reduce in proportion, at least by one.
        now = min(count, recorded)
        count = min(now - 1, int(now * limit / size))
    return {"file": target.name, "bytes": size, "steps_kept": min(count, recorded), "steps_recorded": recorded}


class _Steps:
    """Assigns every event of a trace to the step in which the host executed or launched it."""

    def __init__(self, source: Path, steps_name: str) -> None:
        self.source = source
        self.calls: dict[int, float] = {}
        self.ranges: dict[int, float] = {}
        self.header: Event = {}
        flows: defaultdict[tuple[str, str], dict[str, Event]] = defaultdict(dict)
        candidates = collect(self._first_pass((steps_name, STEP_OF_TORCH), flows), source).host
        steps = find_steps(candidates, steps_name)
        self.starts = [step.start for step in steps]
        self.end = steps[-1].end if steps else math.inf
        self.flows = {name: self._step_of_flow(ends) for name, ends in flows.items()}

    def _first_pass(self, names: tuple[str, ...], flows: dict[tuple[str, str], dict[str, Event]]) -> Iterator[Event]:
        """Records the times of calls and the ends of flows, and yields the events that may be steps."""
        for event in Scan(self.source).events():
            if event.get("ph") in ("s", "f"):
                flows[_flow(event)][event["ph"]] = event
            args = event.get("args")
            kind = KINDS.get(str(event.get("cat", "")).lower())
            if not isinstance(args, dict) or not isinstance(event.get("ts"), int | float):
                continue
            if kind == "call" and isinstance(args.get("correlation"), int):
                self.calls[args["correlation"]] = event["ts"]
            elif kind == "range" and isinstance(args.get("External id"), int):
                self.ranges[args["External id"]] = event["ts"]
            if kind in ("range", "op") and str(event.get("name")).startswith(names):
                yield event

    def step_of(self, event: Event) -> int:
        time = event.get("ts")
        if event.get("ph") == "M" or not isinstance(time, int | float) or str(event.get("name")).startswith(MARK):
            return ALWAYS
        if not self.starts:
            return 0
        args = event.get("args")
        if isinstance(args, dict):
            time = self.calls.get(args.get("correlation", NEVER), time)
            if event.get("cat") == "gpu_user_annotation":
                time = self.ranges.get(args.get("External id", NEVER), time)
        if event.get("ph") == "f" and event.get("cat") == "ac2g":
            time = self.calls.get(event.get("id", NEVER), time)
        return bisect_right(self.starts, time) - 1 if time <= self.end else NEVER

    def _step_of_flow(self, ends: dict[str, Event]) -> int:
        """The later step of its two ends; NEVER unless both are inside steps."""
        steps = [self.step_of(event) for event in ends.values()]
        return max(steps) if len(steps) == 2 and min(steps) >= 0 else NEVER

    def events(self) -> Iterator[tuple[Event, int]]:
        """Every event with its step."""
        scan = Scan(self.source)
        for event in scan.events():
            is_flow = event.get("ph") in ("s", "f")
            yield event, self.flows.get(_flow(event), NEVER) if is_flow else self.step_of(event)
        self.header = scan.header

    def first(self, count: int) -> Iterator[Event]:
        """The events of the first `count` steps; all events if there are fewer steps than that."""
        everything = count > max(1, len(self.starts))
        for event, step in self.events():
            # Outside the steps a flow may lack an end, which viewers reject.
            outside = step == NEVER and everything and event.get("ph") not in ("s", "f")
            if step == ALWAYS or outside or 0 <= step < count:
                yield event

    def sizes(self, packed: bool) -> tuple[dict[int, int], float]:
        """Characters of the events of each step, and the compression ratio."""
        sizes: defaultdict[int, int] = defaultdict(int)
        compressor = zlib.compressobj(6)
        before = after = 0
        for event, step in self.events():
            text = event_text(event)
            sizes[step] += len(text) + 2
            if packed and before < _SAMPLE:
                before += len(text)
                after += len(compressor.compress(text.encode()))
        sizes[ALWAYS] += len(event_text(self.header)) + 100
        for step in range(max(1, len(self.starts))):
            sizes[step] += 0
        return sizes, (after + len(compressor.flush())) / before if packed and before else 1.0


def _fitting(sizes: dict[int, int], limit: float) -> int:
    """How many steps fit; one more than recorded if everything does."""
    steps = max(sizes) + 1
    total = float(sizes[ALWAYS])
    for step in range(steps):
        total += sizes[step]
        if total > limit:
            return step
    return steps + (total + sizes.get(NEVER, 0) <= limit)


def _flow(event: Event) -> tuple[str, str]:
    return str(event.get("cat")), str(event.get("id"))


def _too_large(source: Path, first_step: float, limit: float) -> DataError:
    needed = math.ceil(first_step / 1e5) / 10
    return DataError(
        f"one step of the trace takes {needed:g} MB, more than the limit of {limit / 1e6:g} MB",
        where={"file": source},
        fix=f"allow {math.ceil(first_step / 1e6 + 0.5)} MB",
    )
