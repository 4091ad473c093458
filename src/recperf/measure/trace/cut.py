"""A trace made small enough to open in a viewer: whole steps from the first on, as many as fit."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...errors import DataError
from ...files import writing
from .nesting import find_steps
from .read import KINDS, MARK, STEP_OF_TORCH, Host, collect
from .scan import Scan

ALWAYS, NEVER = -2, -1
"""Where an event stands that belongs to every cut (names of threads, marks that ranks are aligned by), or to none
(outside the steps)."""
_MARGIN = 0.97
"""Packed sizes are foreseen from the mean; a step may pack a little worse."""
_SAMPLE = 20_000_000
"""Characters packed to see how well a trace packs."""
Event = dict[str, Any]


def write_cut(source: Path, target: Path, megabytes: float, *, steps_name: str = "recperf.step") -> dict[str, Any]:
    """Write as many whole steps of a trace as fit into so many MB (10^6 bytes), packed if the name ends in .gz.

    A trace that fits as it is keeps everything. One whose first step alone does not fit is an error.
    """
    plan = _Plan(source, steps_name)
    packed = target.suffix == ".gz"
    sizes, ratio = plan.weigh(packed)
    limit = megabytes * 1e6
    recorded = max(1, len(plan.starts))
    kept = _fitting(sizes, limit / ratio * (_MARGIN if packed else 1.0))
    while True:
        if not kept:
            raise _too_large(source, ratio * (sizes.fixed + sizes.steps[0]), limit)
        size = _write(plan, target, kept, limit, packed)
        if size <= limit:
            break
        # Few steps, badly foreseen: go down in proportion, at least by one.
        now = min(kept, recorded)
        kept = min(now - 1, int(now * limit / size))
    return {"file": target.name, "bytes": size, "steps_kept": min(kept, recorded), "steps_recorded": recorded}


class _Sizes:
    """Characters each step would take."""

    def __init__(self, steps: int) -> None:
        self.fixed = 0
        self.steps = [0] * steps
        self.outside = 0


class _Plan:
    """Which step every event of a trace belongs to: that in which the host did it or launched it."""

    def __init__(self, source: Path, steps_name: str) -> None:
        self.source = source
        self.calls: dict[int, float] = {}
        self.ranges: dict[int, float] = {}
        ends: defaultdict[tuple[str, str], dict[str, Event]] = defaultdict(dict)
        found: list[Host] = find_steps(
            collect(self._first_pass((steps_name, STEP_OF_TORCH), ends), source).host, steps_name
        )
        self.starts = [step.start for step in found]
        self.end = found[-1].end if found else math.inf
        self.flows = {name: self._step_of_arrow(pair) for name, pair in ends.items()}
        self.header: Event = {}

    def _first_pass(self, names: tuple[str, ...], ends: dict[tuple[str, str], dict[str, Event]]) -> Iterator[Event]:
        """Notes when calls were made and where arrows end, and yields the events that may be steps."""
        for event in Scan(self.source).events():
            if event.get("ph") in ("s", "f"):
                ends[_flow(event)][event["ph"]] = event
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

    def _step_of_arrow(self, ends: dict[str, Event]) -> int:
        """The later of its ends; none without both of them inside steps."""
        steps = [self.step_of(event) for event in ends.values()]
        return max(steps) if len(steps) == 2 and min(steps) >= 0 else NEVER

    def events(self) -> Iterator[tuple[Event, int]]:
        """Every event with its step."""
        scan = Scan(self.source)
        for event in scan.events():
            arrow = event.get("ph") in ("s", "f")
            yield event, self.flows.get(_flow(event), NEVER) if arrow else self.step_of(event)
        self.header = {name: value for name, value in scan.header.items() if name != "traceName"}

    def weigh(self, packed: bool) -> tuple[_Sizes, float]:
        """What every step takes, and what packing makes of a character."""
        sizes = _Sizes(max(1, len(self.starts)))
        packer = zlib.compressobj(6)
        before = after = 0
        for event, step in self.events():
            text = finite_text(event)
            if step == ALWAYS:
                sizes.fixed += len(text) + 2
            elif step == NEVER:
                sizes.outside += len(text) + 2
            else:
                sizes.steps[step] += len(text) + 2
            if packed and before < _SAMPLE:
                before += len(text)
                after += len(packer.compress(text.encode()))
        sizes.fixed += len(finite_text(self.header)) + 100
        return sizes, (after + len(packer.flush())) / before if packed and before else 1.0


def _fitting(sizes: _Sizes, limit: float) -> int:
    """How many steps fit; one more than there are means that everything does."""
    total = float(sizes.fixed)
    for index, size in enumerate(sizes.steps):
        total += size
        if total > limit:
            return index
    return len(sizes.steps) + (total + sizes.outside <= limit)


def _write(plan: _Plan, target: Path, kept: int, limit: float, packed: bool) -> int:
    """The file's size. It appears under its name only when it is within the limit."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with writing(target):
        try:
            with opened(beside, packed) as file:
                _write_events(plan, file, kept, target.name)
            size = beside.stat().st_size
            if size <= limit:
                os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    return size


def opened(path: Path, packed: bool) -> IO[str]:
    return gzip.open(path, "wt", encoding="ascii", compresslevel=6) if packed else path.open("w", encoding="ascii")


def _write_events(plan: _Plan, file: IO[str], kept: int, name: str) -> None:
    everything = kept > max(1, len(plan.starts))
    file.write('{"traceEvents":[')
    between = "\n"
    for event, step in plan.events():
        # Outside the steps an arrow may lack an end, which viewers dislike; it says little there.
        outside = step == NEVER and everything and event.get("ph") not in ("s", "f")
        if step == ALWAYS or outside or 0 <= step < kept:
            file.write(between + finite_text(event))
            between = ",\n"
    file.write("\n],\n" + finite_text({**plan.header, "traceName": name})[1:] + "\n")


def _flow(event: Event) -> tuple[str, str]:
    return str(event.get("cat")), str(event.get("id"))


def finite_text(event: Event) -> str:
    try:
        return json.dumps(event, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(event), separators=(",", ":"))


def _finite(value: Any) -> Any:
    """Not-a-number is not JSON, and viewers stop at it."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _too_large(source: Path, one: float, limit: float) -> DataError:
    needed = math.ceil(one / 1e5) / 10
    return DataError(
        f"one step of the trace takes {needed:g} MB, more than the {limit / 1e6:g} MB it may have",
        where={"file": source},
        fix=f"allow {math.ceil(one / 1e6 + 0.5)} MB",
    )
