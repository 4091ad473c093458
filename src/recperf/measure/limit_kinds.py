"""What can limit a step. Each limit is declared here once: sentences, figures, colours, experiments and the list of
docs/limits.md follow from its fields, in this order. Torch-free.

A new limit needs a declaration here, a place where its time is measured (`Observed.waits`, or the limits of an
operator in attribution.py), and its line in docs/limits.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ..units import number, time

if TYPE_CHECKING:
    from .ceilings import Ceilings
    from .records import DividedOperator

Range = tuple[float, float]
"""The lowest and the highest time that is expected, in times of the unchanged one."""
SAME: Range = (1.0, 1.0)
EXPLAINED = 0.3
"""Share of an operator's time that a roof must explain to get all of it; below it is far from every roof."""
SMALL = 0.25
"""An operator whose work takes less than this part of a call's cost computes nothing to speak of."""
DOES_NOT_APPLY, TOO_LOW = "the ceiling does not apply", "the ceiling is too low"
"""Notes about an operator whose counted work does not fit a measured ceiling."""
REPLAY, HOT_IDS, GRAPH = "one batch from memory again and again", "ids of a few hot rows", "the step as a CUDA graph"
"""Experiments that remove a limit."""


class Evidence(Enum):
    """What tells the time of a limit."""

    THREAD = "clocks and sampled stacks of the step's thread; they hold beside other work too"
    IDLE = "the idle time of the device, by what the host did meanwhile"
    CALLS = "the number of calls, at the measured cost of a call of their kind"
    COPIES = "copies on the device that no kernel hides"
    WORK = "the counted work of each operator, at the measured ceilings"
    RANKS = "the time in collectives"


@dataclass(frozen=True, kw_only=True)
class Limit:
    name: str
    meaning: str
    """Its line in docs/limits.md and on pages."""
    sentence: str
    """States its share of a step: {share} is a percentage, {detail} a clause with figures or empty."""
    colour: str
    """Its colour on pages and pictures, one of those in runs/report/style.css."""
    evidence: Evidence
    twice_batch: Range = SAME
    """What twice the batch does to its time: large products use a device better."""
    half_threads: Callable[[Ceilings, Ceilings], float] | None = None
    """How many times as long its ceiling makes it, from the ceilings with all threads to those with half of them; None:
    threads do not matter."""
    removed_by: tuple[str, ...] = ()
    """The experiments after which nothing of it may be left."""
    rate: Callable[[DividedOperator, Ceilings], str] = lambda row, ceilings: ""
    """A clause about the operator that matters most: its rate and what the machine reaches."""
    native: str = ""
    """The sentence where most of its time is C code of the libraries {modules}."""


def _compute(row: DividedOperator, ceilings: Ceilings) -> str:
    if not row.flops:
        return ""
    precision = row.precision or "float32"
    threads = (
        f" with {ceilings.threads} thread{'s' if ceilings.threads > 1 else ''}" if ceilings.device == "cpu" else ""
    )
    text = (
        f", which computes {number(row.flops / row.ms * 1e3)}FLOP/s where this machine reaches "
        f"{number(ceilings.product(precision))}FLOP/s in {precision}{threads}"
    )
    faster = [f"{number(ceilings.flops[name])}FLOP/s in {name}" for name in ceilings.faster(precision)[:1]]
    return text + (f", {faster[0]}" if faster else ", and no more in a lower precision")


def _random_rows(row: DividedOperator, ceilings: Ceilings) -> str:
    if not row.memory_rows:
        return ""
    width = row.row_bytes or 0
    memory, latency = ceilings.row_ns(width) / 1e6, ceilings.latency_share(width)
    return (
        f": {row.memory_rows:,.0f} of {row.rows:,.0f} random rows of {width} bytes come from memory, at "
        f"{time(row.ms / row.rows)} a row (memory: {time(memory)}, of which {time(latency * memory)} "
        f"whatever the width and {time((1 - latency) * memory)} for the bytes)"
    )


def _bandwidth(row: DividedOperator, ceilings: Ceilings) -> str:
    if row.memory_rows or not row.bytes:
        return _random_rows(row, ceilings)
    new = row.new_bytes > row.memory_bytes / 2
    rate, ceiling = row.bytes / row.ms * 1e3, ceilings.first_touch if new else ceilings.stream
    if rate < EXPLAINED * ceiling:
        # Other bytes of the same operator make up its time: a rate over all of them would contradict the limit.
        return ""
    machine = f"this machine {'gets new memory at' if new else 'streams'} {number(ceiling)}B/s"
    text = f", at {number(rate)}B/s where {machine}"
    return text + (f"; {TOO_LOW}" if TOO_LOW in row.note else "")


def _transfer(row: DividedOperator, ceilings: Ceilings) -> str:
    return (
        f": rows in host memory, at {number(row.host_bytes / row.ms * 1e3)}B/s where the link reaches "
        f"{number(ceilings.link)}B/s"
    )


_DECLARED = (
    Limit(
        name="input",
        meaning="the step waits for its batch",
        sentence="The step waits for its next batch for {share} of its time{detail}.",
        colour="data",
        evidence=Evidence.THREAD,
        removed_by=(REPLAY,),
    ),
    Limit(
        name="blocked",
        meaning="the thread of the step is off the processor: it sleeps, or waits for a lock or a disk",
        sentence="The thread of the step is off the processor for {share} of the step, outside of waits for input, "
        "device and ranks{detail}.",
        colour="extra-3",
        evidence=Evidence.THREAD,
        twice_batch=(1.0, 2.0),
    ),
    Limit(
        name="python",
        meaning="the interpreter runs between operators",
        sentence="Python code between operators takes {share} of the step{detail}.",
        native="C code outside torch ({modules}), called from Python, takes most of the {share} of the step between "
        "operators{detail}.",
        colour="loss",
        evidence=Evidence.THREAD,
        twice_batch=(1.0, 2.0),
        removed_by=(GRAPH,),
    ),
    Limit(
        name="dispatch",
        meaning="calling operators costs more than what they compute",
        sentence="Operator overhead takes {share} of the step{detail}.",
        colour="interaction",
        evidence=Evidence.CALLS,
        # What an operator computes may be so much of what it costs to call it.
        twice_batch=(1.0, 1 + SMALL),
    ),
    Limit(
        name="launch",
        meaning="the device is idle because the host has not queued its next work",
        sentence="The device waits for the host's next kernel for {share} of the step{detail}.",
        colour="hash",
        evidence=Evidence.IDLE,
        removed_by=(GRAPH,),
    ),
    Limit(
        name="sync",
        meaning="the device is idle because the host waited for it",
        sentence="The device is idle for {share} of the step because the host waited for a value{detail}.",
        colour="sparse",
        evidence=Evidence.IDLE,
    ),
    Limit(
        name="transfer",
        meaning="copies between host and device that no computation hides",
        sentence="Copies between host and device that nothing hides take {share} of the step{detail}.",
        colour="extra-1",
        evidence=Evidence.COPIES,
        twice_batch=(1.5, 2.5),
        rate=_transfer,
    ),
    Limit(
        name="compute",
        meaning="the arithmetic units work at their measured rate",
        sentence="Arithmetic takes {share} of the step{detail}.",
        colour="top",
        evidence=Evidence.WORK,
        twice_batch=(1.5, 2.5),
        half_threads=lambda every, half: every.product("float32") / half.product("float32"),
        rate=_compute,
    ),
    Limit(
        name="bandwidth",
        meaning="bytes come from memory that no cache holds: streams, and random rows as far as their time follows "
        "their width",
        sentence="Moving bytes from memory takes {share} of the step{detail}.",
        colour="embedding",
        evidence=Evidence.WORK,
        twice_batch=(1.5, 2.5),
        half_threads=lambda every, half: every.stream / half.stream,
        rate=_bandwidth,
    ),
    Limit(
        name="latency",
        meaning="random rows come from memory, at a cost per row whatever its width",
        sentence="Waiting for random rows from memory, whatever their width, takes {share} of the step{detail}.",
        colour="update",
        evidence=Evidence.WORK,
        twice_batch=(1.5, 2.5),
        half_threads=lambda every, half: half.row_ns(64) / every.row_ns(64),
        removed_by=(HOT_IDS,),
        rate=_random_rows,
    ),
    Limit(
        name="cache",
        meaning="operators work on data that stays in a cache",
        sentence="Work on data in the caches takes {share} of the step{detail}.",
        colour="backward",
        evidence=Evidence.WORK,
        # What stays cached with half of the batch may not with all of it.
        twice_batch=(1.5, 3.5),
        half_threads=lambda every, half: every.cached / half.cached,
    ),
    Limit(
        name="communication",
        meaning="the step waits for other ranks or for their data",
        sentence="Waiting for other ranks takes {share} of the step{detail}.",
        colour="extra-2",
        evidence=Evidence.RANKS,
        twice_batch=(1.0, 2.0),
    ),
    Limit(
        name="operator",
        meaning="an operator takes its time although no ceiling explains it",
        sentence="Operators that no ceiling explains take {share} of the step{detail}.",
        colour="bottom",
        evidence=Evidence.WORK,
        twice_batch=(1.0, 3.0),
        half_threads=lambda every, half: 1.0,
        rate=lambda row, ceilings: f" ({time(row.ms)}, far below every ceiling)",
    ),
)
LIMITS = {limit.name: limit for limit in _DECLARED}


def limits_by(*evidence: Evidence) -> tuple[str, ...]:
    """The names of the limits whose time is told by such evidence."""
    return tuple(name for name, limit in LIMITS.items() if limit.evidence in evidence)
