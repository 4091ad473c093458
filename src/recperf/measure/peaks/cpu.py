"""Ceilings of the CPU: matrix products, streams, random rows, the cache curve, and operator overhead."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ... import units
from .sampling import (
    MIB,
    Effort,
    Figure,
    Sampler,
    allowed_bytes,
    bounded,
    fastest_product,
    fastest_rate,
    figure,
    gather_row,
    rate,
)  # fmt: skip

T = TypeVar("T")
Say = Callable[[str], None]
Timed = Callable[[Callable[[], object]], Callable[[], float]]
"""Makes a function that runs some work once and returns its ns."""

ROW_BYTES = (32, 64, 128, 256, 512, 1024, 2048)
KNEE_ROW_BYTES = 256
KNEE_FROM = 32 << 10
KNEE_CALL = 512
"""Rows per call of the cache curve: their copies take 128 KiB and do not evict the table from the L2."""
KNEE_CALLS = 32
BAG = 32
"""Ids summed into one row where a gather does not write every row it reads."""
UNKNOWN_CACHE = 32 * MIB
RESERVE = 64 * MIB
"""Memory for ids and outputs."""


def measure(sampler: Sampler, facts: dict[str, Any], say: Say, note: Say) -> dict[str, Any]:
    """Every ceiling of the CPU, in the order that needs the least memory at a time."""
    last_cache = max(facts["caches"].values(), default=0)
    if not last_cache:
        last_cache = UNKNOWN_CACHE
        note(f"the system does not report its cache sizes; {units.size(UNKNOWN_CACHE)} assumed")
    rng = np.random.default_rng(0)
    say("operator overhead")
    figures: dict[str, Any] = {"dispatch": dispatch(sampler)}
    figures["gemm"] = products(sampler, say, note)
    table = memory_table(sampler.effort, last_cache, note)
    # The cache curve may need a larger table; everything else uses its first part.
    beyond = table[: bounded(_beyond(sampler.effort, last_cache), table.numel() * 4) // 4]
    say(f"streaming {units.size(beyond.numel() * 4)}")
    figures["copy"] = copy(sampler, beyond)
    figures["read"] = read(sampler, beyond)
    # An eighth of the last-level cache stays cached although ids and outputs pass through it.
    cached = beyond[: bounded(min(last_cache // 8, beyond.numel()), beyond.numel() * 4) // 4]
    figures["gather"] = {}
    for name, source in (("cache", cached), ("dram", beyond)):
        say(f"random rows, table of {units.size(source.numel() * 4)}")
        figures["gather"][name] = gather(sampler, source, rng)
    say(f"cache curve: {units.size(KNEE_FROM)} to {units.size(table.numel() * 4)}")
    figures["knee"] = knee(sampler, table.numpy(), last_cache, rng)
    return {name: figures[name] for name in ("gemm", "copy", "read", "gather", "knee", "dispatch")}


def timed(work: Callable[[T], object], prepare: Callable[[], T]) -> Callable[[], float]:
    """One reading; the preparation is not timed."""

    def once() -> float:
        prepared = prepare()
        began = perf_counter_ns()
        work(prepared)
        return perf_counter_ns() - began

    return once


def timed_alone(work: Callable[[], object]) -> Callable[[], float]:
    return timed(lambda _: work(), lambda: None)


def _beyond(effort: Effort, last_cache: int) -> int:
    return max(effort.table_bytes, effort.caches * last_cache)


def memory_table(effort: Effort, last_cache: int, note: Say) -> Tensor:
    """One buffer, with every page written, for everything that needs memory beyond the caches."""
    requested = max(_beyond(effort, last_cache), effort.knee_bytes)
    allowed = allowed_bytes()
    size = bounded(requested, allowed - min(RESERVE, allowed // 2))
    if size < requested:
        note(f"memory is short: the largest table has {units.size(size)} instead of {units.size(requested)}")
    if effort.caches and size < effort.caches * last_cache:
        note(f"that is only {size / last_cache:.2g} times the last-level cache: figures for memory are partly cached")
    return torch.ones(size // 4)


def dispatch(sampler: Sampler) -> dict[str, Figure]:
    """Time of an operator call with negligible arithmetic, including the Python loop around it."""
    one, weight = torch.ones(1), torch.ones(1, requires_grad=True)

    def adds() -> None:
        for _ in range(1000):
            one + one

    def steps() -> None:
        for _ in range(50):
            (weight + one).backward()  # type: ignore[no-untyped-call]

    plain = [ns / 1000 for ns in sampler.readings(timed_alone(adds))]
    trained = [ns / 50 for ns in sampler.readings(timed_alone(steps))]
    return {
        "op": figure(plain, "ns", what="add of two float32 tensors of 1 element"),
        "autograd": figure(trained, "ns", what="the same add, forward and backward()"),
    }


def products(sampler: Sampler, say: Say, note: Say) -> dict[str, Figure]:
    """The best rate of a square product by dtype; a dtype that torch cannot multiply here is left out."""
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        say(f"matrix products, {name}")
        try:
            best[name] = product(sampler, dtype)
        except RuntimeError as error:
            if dtype is torch.float32:
                raise
            note(f"no {name} product on this CPU: {str(error).splitlines()[0]}")
    return best


def product(sampler: Sampler, dtype: torch.dtype) -> Figure:
    """Doubles the side until it takes too long, then measures the last three sizes."""
    effort, generator = sampler.effort, torch.Generator().manual_seed(0)
    allowed, sides, side = allowed_bytes(), [], min(128, effort.product_side)

    def multiply(side: int) -> Callable[[], float]:
        a, b = (torch.rand(side, side, generator=generator).to(dtype) for _ in range(2))
        out = torch.empty(side, side, dtype=dtype)
        return timed_alone(lambda: torch.mm(a, b, out=out))

    while True:
        once = multiply(side)
        fastest = min(once() for _ in range(3))
        sides.append(side)
        # A doubled side is eight times the work, for the minimum number of readings and a warm-up.
        slow = 8 * fastest * (effort.least + 1) > effort.product_seconds * 1e9
        if slow or 2 * side > effort.product_side or 4 * (2 * side) ** 2 * 5 > allowed:
            break
        side *= 2
    return fastest_product(
        {s: sampler.readings(multiply(s), seconds=effort.product_seconds / 2, warm_ups=1) for s in sides[-3:]}
    )


def copy(sampler: Sampler, buffer: Tensor, timed: Timed = timed_alone, seconds: float | None = None) -> Figure:
    """Copies one half of the buffer to the other; reads and writes both count. `timed` makes a reading of the work."""
    half = buffer.numel() // 2
    source, target = buffer[:half], buffer[half : 2 * half]
    ns = sampler.readings(timed(lambda: target.copy_(source)), seconds=seconds or 4 * sampler.effort.seconds)
    return rate(2 * half * 4, ns, "B/s", counted="read + write", buffer_bytes=half * 4, method="Tensor.copy_")


def read(sampler: Sampler, buffer: Tensor, timed: Timed = timed_alone, seconds: float | None = None) -> Figure:
    """The fastest of several methods to read every byte once."""
    lines = buffer.view(1024, -1)
    methods: dict[str, Callable[[], object]] = {
        "sum of each of 1024 pieces": lambda: lines.sum(1),
        "maximum of each of 1024 pieces": lambda: lines.amax(1),
        "sum of all": buffer.sum,
    }
    seconds, size = seconds or 2 * sampler.effort.seconds, buffer.numel() * 4
    readings = {name: sampler.readings(timed(work), seconds=seconds) for name, work in methods.items()}
    return fastest_rate(size, readings, "B/s", counted="read", buffer_bytes=size)


def gather(sampler: Sampler, flat: Tensor, rng: np.random.Generator) -> dict[str, Any]:
    """Random rows of a table by row size, with new ids every time."""
    rows = [gather_rows(sampler, flat.view(-1, row_bytes // 4), rng) for row_bytes in ROW_BYTES]
    return {"table_bytes": flat.numel() * 4, "rows": rows}


def gather_rows(sampler: Sampler, table: Tensor, rng: np.random.Generator) -> dict[str, Any]:
    row_bytes = table.shape[1] * 4
    ids = min(sampler.effort.ids, max(1 << 12, (8 * MIB) // row_bytes))
    offsets, out = torch.arange(0, ids, BAG), torch.ones(ids, table.shape[1])
    plain, plain_out = table.numpy(), out.numpy()

    def fresh() -> Tensor:
        return torch.from_numpy(rng.integers(0, table.shape[0], ids))

    methods: dict[str, Callable[[Tensor], object]] = {
        "torch.index_select": lambda some: torch.index_select(table, 0, some, out=out),
        f"embedding_bag, sums of {BAG}": lambda some: F.embedding_bag(some, table, offsets, mode="sum"),
        "numpy.take, one thread": lambda some: plain.take(some.numpy(), axis=0, out=plain_out, mode="clip"),
    }
    return gather_row(row_bytes, ids, {name: sampler.readings(timed(work, fresh)) for name, work in methods.items()})


def knee(sampler: Sampler, flat: np.ndarray[Any, Any], last_cache: int, rng: np.random.Generator) -> dict[str, Any]:
    """ns per lookup by the size of the table, with one thread."""
    out = np.ones((KNEE_CALL, KNEE_ROW_BYTES // 4), dtype=np.float32)
    points = []
    for size in knee_sizes(flat.nbytes, sampler.effort.knee_points):
        table = flat[: size // 4].reshape(-1, KNEE_ROW_BYTES // 4)
        if size <= 2 * last_cache:
            # Random ids alone would need many repetitions to load a table that fits the cache.
            table.max()
        ns = sampler.readings(timed(*_lookups(table, out, rng)))
        points.append(figure([value / (KNEE_CALL * KNEE_CALLS) for value in ns], "ns a lookup", table_bytes=size))
    return {
        "row_bytes": KNEE_ROW_BYTES,
        "threads": 1,
        "lookups": KNEE_CALL * KNEE_CALLS,
        "method": f"numpy.take, {KNEE_CALL} rows a call, fresh uniform ids",
        "points": points,
    }


def _lookups(
    table: np.ndarray[Any, Any], out: np.ndarray[Any, Any], rng: np.random.Generator
) -> tuple[Callable[[np.ndarray[Any, Any]], None], Callable[[], np.ndarray[Any, Any]]]:
    def look_up(calls: np.ndarray[Any, Any]) -> None:
        for ids in calls:
            table.take(ids, axis=0, out=out, mode="clip")

    return look_up, lambda: rng.integers(0, table.shape[0], (KNEE_CALLS, KNEE_CALL))


def knee_sizes(largest: int, points: int) -> list[int]:
    """From 32 KiB to the largest, so many an octave, in whole rows."""
    sizes, step = [], 0
    while (size := KNEE_FROM * 2 ** (step / points)) < largest:
        sizes.append(int(size) // KNEE_ROW_BYTES * KNEE_ROW_BYTES)
        step += 1
    return [*sizes, largest]
