"""Attributes every nanosecond of a step to one limit, from what was observed and the measured ceilings. Torch-free.

Each operator is classified by its own counted work. First the cost of calling it is taken off. What remains goes to the
roof that explains it: arithmetic, streaming, random rows, or data in a cache. Random rows are divided again, by the
line through the measured row widths: latency is what a row costs whatever its width, bandwidth what follows its bytes.
An operator that is far below every roof keeps its remaining time under its own name. Work that would take longer at
the ceiling than it took means that the ceiling does not apply, and is not believed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec.structs import asdict, replace

from ..ops.operators import PREFIX
from .ceilings import Ceilings
from .limit_kinds import DOES_NOT_APPLY, EXPLAINED, LIMITS, SMALL, TOO_LOW
from .records import Attribution, DividedOperator, Observed, Operator

BELIEVED = 1.5
"""Work at the ceiling may take this much longer than it took before the ceiling does not apply: ceilings are medians of
other work, and vary by less."""
MANY = 8
"""Bytes of this many times the largest cache come from memory, even if they are counted twice, read and written."""
CALLS = 4.0
"""Such an operator may take this many times the cost of the simplest call of its kind and still be only a call."""
MEMORY = ("bandwidth", "rows", "cache", "transfer")
"""Parts of an operator's time in which it reads or writes."""
INSIDE = 0.65
"""Part of a call's cost that is inside the operator; the rest is Python's way to it. Used where it was not measured."""


def attribute(observed: Observed, ceilings: Ceilings | None) -> Attribution:
    """Shares of the step by limit, which sum to 1, and each operator's time by limit.

    Without ceilings, operators cannot be divided: all of their time is under `operator`.
    """
    times: defaultdict[str, float] = defaultdict(float)
    for limit, ms in observed.waits.items():
        # Where no step was traced, what the thread computed is not known.
        times["operator" if limit == "unknown" else limit] += ms
    inside = observed.inside or INSIDE
    rows = []
    for operator in observed.operators:
        # Python's way to an operator looks like Python code, but is part of what calling it costs.
        if ceilings is not None and not operator.kernels and operator.kind != "function":
            called = operator.python_calls * (1 - inside) * _call_ns(operator, ceilings) / 1e6
            outside = min(times["python"], called)
            times["python"] -= outside
            times["dispatch"] += outside
        rows.append(classify(operator, ceilings, inside))
        for limit, ms in rows[-1].limits.items():
            times[limit] += ms
    whole = sum(times.values())
    return Attribution(
        shares={limit: times[limit] / whole if whole > 0 else 0.0 for limit in LIMITS},
        random=sum(row.random_ms for row in rows) / whole if whole > 0 else 0.0,
        operators=rows,
    )


def divided_ms(waits: dict[str, float], operators: Iterable[Operator]) -> float:
    """The time of a step that is divided among limits: without the time in which its thread waited for a core."""
    return sum(waits.values()) + sum(operator.ms for operator in operators)


def _call_ns(operator: Operator, ceilings: Ceilings) -> float:
    """What calling the operator once costs, from Python and inside it."""
    return ceilings.calls.get(operator.kind) or ceilings.calls["elementwise"]


def classify(operator: Operator, ceilings: Ceilings | None, inside: float) -> DividedOperator:
    """The operator with its time (ms per step) by limit, that of random rows from memory, and a note where a ceiling
    does not apply."""
    operator = _rows_by_time(operator, ceilings)
    parts, note = _divided(operator, ceilings, inside)
    limits = _without_rows(parts, operator, ceilings)
    return DividedOperator(**asdict(operator), limits=limits, random_ms=parts.get("rows", 0.0), note=note)


def _rows_by_time(operator: Operator, ceilings: Ceilings | None) -> Operator:
    """The operator with all its random rows from memory, if it took nearer to that than to what was counted.

    Rows of a table larger than the cache count as cached where they were used shortly before. A cache that is
    shared with other work, or holds less under this step than when its size was measured, has lost them by then.
    """
    rows, memory_rows, row_bytes = operator.rows, operator.memory_rows, operator.row_bytes or 0
    if ceilings is None or rows <= memory_rows or (operator.table_rows or 0) * row_bytes <= ceilings.cache_bytes:
        return operator
    memory = rows * ceilings.row_ns(row_bytes) / 1e6
    counted = (
        memory_rows * ceilings.row_ns(row_bytes) + (rows - memory_rows) * ceilings.row_ns(row_bytes, cached=True)
    ) / 1e6
    arithmetic = operator.flops / ceilings.product(operator.precision) * 1e3
    time = operator.ms * operator.parallel
    return replace(operator, memory_rows=rows) if arithmetic < counted and time**2 > counted * memory else operator


def _without_rows(parts: dict[str, float], operator: Operator, ceilings: Ceilings | None) -> dict[str, float]:
    """The time of random rows from memory, divided: an implementation can hide latency, but it moves all bytes."""
    if "rows" not in parts or ceilings is None:
        return parts
    limits = {limit: ms for limit, ms in parts.items() if limit != "rows"}
    together, row_bytes = operator.parallel, operator.row_bytes or 0
    of_bytes = 1 - ceilings.latency_share(row_bytes)
    at_ceiling = operator.memory_rows * ceilings.row_ns(row_bytes) / 1e6 / together
    moved = of_bytes * max(parts["rows"], at_ceiling)
    limits["bandwidth"] = limits.get("bandwidth", 0.0) + min(parts["rows"], moved)
    limits["latency"] = max(0.0, parts["rows"] - moved)
    return {limit: ms for limit, ms in limits.items() if ms > 0}


def _divided(operator: Operator, ceilings: Ceilings | None, inside: float) -> tuple[dict[str, float], str]:
    """The time of an operator by limit, with random rows from memory as one part `rows`, and a note."""
    together = operator.parallel
    if together > 1:
        # Classified by the time it took in its own thread, then scaled to its share of the step.
        alone, note = _divided(replace(operator, ms=operator.ms * together, parallel=1.0), ceilings, inside)
        return {limit: ms / together for limit, ms in alone.items()}, note
    ms = operator.ms
    if operator.communication:
        return {"communication": ms}, ""
    if ceilings is None:
        return {"operator": ms}, ""
    limits: defaultdict[str, float] = defaultdict(float)
    if operator.kernels:
        call_ms = operator.kernels * ceilings.kernel_ns / 1e6
        dispatch = min(ms, call_ms)
    else:
        call_ms = operator.calls * _call_ns(operator, ceilings) / 1e6
        dispatch = min(ms, inside * call_ms)
        if operator.kind == "function":
            return {"dispatch": dispatch, "python": ms - dispatch}, ""
    roofs, note = _roofs(operator, ceilings, ms - dispatch)
    memory = sum(roofs[limit] for limit in MEMORY)
    work = max(roofs["compute"], memory)
    rest = ms - dispatch
    if work < SMALL * call_ms and ms <= CALLS * call_ms:
        limits["dispatch"] += ms
        return dict(limits), note
    limits["dispatch"] += dispatch
    if operator.by_name and not work:
        limits[operator.by_name] += rest
        return dict(limits), "kernels of a CUDA graph have no counted work: their names stand for it"
    if rest <= 0:
        return dict(limits), note
    explained = min(rest, max(roofs["compute"], memory))
    if explained >= EXPLAINED * rest:
        explained = rest
    if roofs["compute"] >= memory and explained:
        limits["compute"] += explained
    elif memory:
        for limit in MEMORY:
            limits[limit] += explained * roofs[limit] / memory
    limits["operator"] += rest - explained
    return {limit: time for limit, time in limits.items() if time > 0}, note


def _roofs(operator: Operator, ceilings: Ceilings, rest: float) -> tuple[dict[str, float], str]:
    """Time in ms that the operator's work takes at each ceiling, without those that cannot apply."""
    flops, special, precision = operator.flops, operator.special, operator.precision or "float32"
    rate = ceilings.flops.get(precision) or ceilings.flops["float32"]
    rows, row_bytes, memory_rows = operator.rows, operator.row_bytes or 0, operator.memory_rows
    streamed = max(0, operator.bytes - rows * row_bytes)
    memory_bytes = min(operator.memory_bytes, streamed)
    new_bytes = min(operator.new_bytes, memory_bytes)
    roofs = {
        "compute": (flops / rate + (special / ceilings.special if ceilings.special else 0.0)) * 1e3,
        "bandwidth": ((memory_bytes - new_bytes) / ceilings.stream + new_bytes / ceilings.first_touch) * 1e3,
        "rows": memory_rows * ceilings.row_ns(row_bytes) / 1e6 if memory_rows else 0.0,
        "cache": (streamed - memory_bytes) / ceilings.cached * 1e3,
        "transfer": operator.host_bytes / ceilings.link * 1e3 if ceilings.link else 0.0,
    }
    if rows > memory_rows:
        roofs["cache"] += (rows - memory_rows) * ceilings.row_ns(row_bytes, cached=True) / 1e6
    notes: list[str] = []
    if operator.fused:
        # A compiler needs at most the bytes of the operators it fused, and they are all that is known.
        roofs["bandwidth"] = min(roofs["bandwidth"], rest)
        return roofs, ""
    if roofs["compute"] > BELIEVED * rest and (flops or special):
        times = roofs["compute"] / max(rest, 1e-9)
        notes.append(f"{DOES_NOT_APPLY}: its arithmetic would take {times:.1f} times as long as measured")
        roofs["compute"] = 0.0
    in_cache = {
        "bandwidth": memory_bytes / ceilings.cached * 1e3,
        "rows": memory_rows * ceilings.row_ns(row_bytes, cached=True) / 1e6 if memory_rows else 0.0,
    }
    for limit, what in (("bandwidth", "bytes"), ("rows", "rows")):
        times = roofs[limit] / max(rest, 1e-9)
        if times <= BELIEVED:
            continue
        if limit == "bandwidth" and memory_bytes > MANY * ceilings.largest_cache * max(1, operator.calls):
            # No stream that was measured is as fast as memory.
            notes.append(f"{TOO_LOW}: the fastest measured stream takes {times:.1f} times as long")
            roofs[limit] = rest
            continue
        # Faster than the ceiling of memory: from a cache if the time is nearer to that, else prefetched. C code that
        # prefetches exceeds what torch reaches from memory and even from a cache: up to a stream's rate it is believed.
        own = limit == "rows" and ceilings.device == "cpu" and operator.name.startswith(PREFIX)
        streams = own and memory_rows * row_bytes / ceilings.stream * 1e3 <= rest
        table_bytes = (operator.table_rows or 0) * row_bytes
        if streams or rest**2 > roofs[limit] * in_cache[limit]:
            roofs[limit] = rest
        elif limit == "rows" and table_bytes > ceilings.largest_cache and rest > in_cache[limit]:
            # No cache holds such a table: as many rows come from memory as explain the time, the others from a cache.
            share = (rest - in_cache[limit]) / (roofs[limit] - in_cache[limit])
            roofs["cache"] += (1 - share) * in_cache[limit]
            roofs[limit] *= share
        else:
            notes.append(f"{DOES_NOT_APPLY}: its {what} would take {times:.1f} times as long from memory")
            roofs["cache"] += in_cache[limit]
            roofs[limit] = 0.0
    if roofs["cache"] > BELIEVED * rest and rest > 0:
        roofs["cache"] = rest
    return roofs, "; ".join(notes)
