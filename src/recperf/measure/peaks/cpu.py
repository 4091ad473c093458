"""Ceilings of the CPU: matrix products, streams, random rows, the cache curves, and what calling operators costs."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from msgspec.structs import asdict
from msgspec.structs import replace as replace_fields
from torch import Tensor
from torch.nn import functional as F

from ... import units
from .records import GatherRow, HostRates, Knee, PeakFigure, Rates, RowTable, RowTables, StreamCurve
from .sampling import (
    MIB,
    Effort,
    Sampler,
    allowed_bytes,
    bounded,
    calls,
    fastest_product,
    fastest_rate,
    figure,
    gather_row,
    knee_of,
    rate,
)

Say = Callable[[str], None]
Timed = Callable[..., Callable[[], float]]
"""Makes a function that prepares, runs some work once and returns its ns."""

ROW_BYTES = (32, 64, 128, 256, 512, 1024, 2048)
FEWER_ROW_BYTES = (64, 256, 1024)
"""For further numbers of threads."""
SMALLEST_SIDE = 64
PRECISIONS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KNEE_ROW_BYTES = 256
KNEE_FROM = 32 << 10
KNEE_CALL = 512
"""Rows per call of the cache curve: their copies take 128 KiB and do not evict the table from the L2."""
KNEE_CALLS = 32
BAG = 32
"""Ids summed into one row where a gather does not write every row it reads."""
STREAM_FROM, STREAM_TO = 512 << 10, 256 * MIB
"""Sizes of the curve of streams; below them a call costs more than its bytes."""
NEW_PAGES = 16 * MIB
ADDITIONS = 20
UNKNOWN_CACHE = 32 * MIB
RESERVE = 64 * MIB
"""Memory for ids and outputs."""


def measure(sampler: Sampler, facts: dict[str, Any], others: Iterable[int], say: Say, note: Say) -> HostRates:
    """Every ceiling of the CPU with the current number of threads, and the rates with other numbers of threads."""
    say("calls of operators")
    call_figures = calls(sampler)
    last_cache = cache_size(facts, note)
    table = memory_table(sampler.effort, last_cache, note)
    say(f"cache curves: {units.size(KNEE_FROM)} to {units.size(table.numel() * 4)}")
    curves = knee(sampler, table.numpy(), last_cache, np.random.default_rng(0))
    curves.stream = stream_knee(sampler, table)
    derive_knee(curves)
    # The cache curve may need a larger table; everything else uses its first part.
    table = table[: bounded(_memory_table_bytes(sampler.effort, last_cache), table.numel() * 4) // 4]
    cached_sizes = cached_tables(facts, curves.bytes)
    measured = rates(sampler, table, cached_sizes, ROW_BYTES, say, note)
    by_threads = {str(threads): other_rates(sampler.effort, table, cached_sizes, threads, say) for threads in others}
    return HostRates(**asdict(measured), knee=curves, calls=call_figures, other_threads=by_threads)


def measure_threads(effort: Effort, facts: dict[str, Any], knee: int, threads: int, note: Say) -> Rates:
    """The rates with another number of threads, for ceilings that were measured earlier."""
    last_cache = cache_size(facts, lambda _: None)
    table = memory_table(replace(effort, knee_bytes=0), last_cache, note)
    return other_rates(effort, table, cached_tables(facts, knee), threads, lambda _: None)


def cached_tables(facts: dict[str, Any], knee: int) -> dict[str, int]:
    """Bytes of the tables whose rows stay in a cache: a quarter of the knee; half of the L2, which no core shares."""
    return {"cache": knee // 4, "near": min(knee // 4, facts["caches"].get("L2", 1 << 20) // 2)}


def other_rates(effort: Effort, table: Tensor, cached_sizes: dict[str, int], threads: int, say: Say) -> Rates:
    """In half the time or less, because it comes on top of other measurements."""
    seconds, products = effort.seconds / 2, effort.product_seconds / 2
    brief = replace(effort, seconds=seconds, product_seconds=products, least=max(3, effort.least // 2))
    with using_threads(threads):
        return rates(
            Sampler(brief), table, cached_sizes, FEWER_ROW_BYTES, lambda what: say(f"{what}, threads: {threads}")
        )


def rates(
    sampler: Sampler,
    table: Tensor,
    cached_sizes: dict[str, int],
    row_sizes: Iterable[int],
    say: Say,
    note: Say = lambda _: None,
) -> Rates:
    """The ceilings that depend on the number of threads, which is torch's current one."""
    say("matrix products")
    gemm, size = products(sampler, note), table.numel() * 4
    say(f"streaming {units.size(size)}")
    tables = {name: table[: bounded(table_bytes, size) // 4] for name, table_bytes in cached_sizes.items()}
    streams: dict[str, Any] = {
        "copy": copy(sampler, table),
        "read": read(sampler, table),
        "update": update(sampler, table),
        "first_touch": first_touch(sampler, min(NEW_PAGES, size)),
        "cached": cached(sampler, tables["cache"]),
        "special": special(sampler, tables["cache"]),
    }
    gathered, most = {}, sampler.effort.ids
    for name, source in (*tables.items(), ("dram", table)):
        say(f"random rows, table of {units.size(source.numel() * 4)}")
        widths = FEWER_ROW_BYTES if name == "near" else row_sizes
        gathered[name] = gather(sampler, source, widths, lambda row: min(most, max(1 << 12, 8 * MIB // row)))
    return Rates(gemm=gemm, **streams, gather=RowTables(**gathered))


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cache_size(facts: dict[str, Any], note: Say) -> int:
    """The largest cache that the system reports: it decides how large the largest table is, and nothing else."""
    largest = max(facts["caches"].values(), default=0)
    if not largest:
        note(f"the system does not report its cache sizes; {units.size(UNKNOWN_CACHE)} assumed")
    return int(largest or UNKNOWN_CACHE)


def timed(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """One reading; the preparation is not timed."""

    def once() -> float:
        prepare()
        began = perf_counter_ns()
        work()
        return perf_counter_ns() - began

    return once


def _memory_table_bytes(effort: Effort, last_cache: int) -> int:
    return max(effort.table_bytes, effort.caches * last_cache)


def memory_table(effort: Effort, last_cache: int, note: Say) -> Tensor:
    """One buffer, with every page written, for everything that needs memory beyond the caches."""
    requested = max(_memory_table_bytes(effort, last_cache), effort.knee_bytes)
    allowed = allowed_bytes()
    size = bounded(requested, allowed - min(RESERVE, allowed // 2))
    if size < requested:
        note(f"memory is short: the largest table has {units.size(size)} instead of {units.size(requested)}")
    if effort.caches and size < effort.caches * last_cache:
        note(f"that is only {size / last_cache:.2g} times the last-level cache: figures for memory are partly cached")
    return torch.ones(size // 4)


def products(sampler: Sampler, note: Say) -> dict[str, PeakFigure]:
    """The best rate of a square product by dtype; a dtype that torch cannot multiply here is left out."""
    best = {}
    for dtype in PRECISIONS:
        name = str(dtype).removeprefix("torch.")
        try:
            best[name] = product(sampler, dtype)
        except RuntimeError as error:
            if dtype is torch.float32:
                raise
            note(f"no {name} product on this CPU: {str(error).splitlines()[0]}")
    return best


def product(
    sampler: Sampler, dtype: torch.dtype, timed: Timed = timed, device: torch.device | str = "cpu"
) -> PeakFigure:
    """Doubles the side until it takes too long, then measures the last two sizes.

    Without instructions for its precision a product can be 200 times slower: it has one size and few readings.
    """
    effort, generator = sampler.effort, torch.Generator(device).manual_seed(0)
    allowed, sides, side = allowed_bytes(device), [], min(SMALLEST_SIDE, effort.product_side)

    def multiply(side: int) -> Callable[[], float]:
        a, b = (torch.rand(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
        out = torch.empty(side, side, dtype=dtype, device=device)
        return timed(lambda: torch.mm(a, b, out=out))

    while True:
        once = multiply(side)
        fastest = min(once() for _ in range(3))
        sides.append(side)
        # A doubled side is eight times the work, for the minimum number of readings and a warm-up.
        slow = 8 * fastest * (effort.least + 1) > effort.product_seconds * 1e9
        if slow or 2 * side > effort.product_side or 4 * (2 * side) ** 2 * 5 > allowed:
            break
        side *= 2
    seconds = effort.product_seconds / 2 if side > 2 * SMALLEST_SIDE else 0.0
    sides = sides[-2:] if seconds else sides[-1:]
    return fastest_product({s: sampler.readings(multiply(s), seconds=seconds, warm_ups=1) for s in sides})


def copy(sampler: Sampler, buffer: Tensor, timed: Timed = timed, seconds: float | None = None) -> PeakFigure:
    """Copies one half of the buffer to the other; reads and writes both count. `timed` makes a reading of the work."""
    half = buffer.numel() // 2
    source, target = buffer[:half], buffer[half : 2 * half]
    ns = sampler.readings(timed(lambda: target.copy_(source)), seconds=seconds or 4 * sampler.effort.seconds)
    return rate(2 * half * 4, ns, "B/s", counted="read + write", buffer_bytes=half * 4, method="Tensor.copy_")


def read(sampler: Sampler, buffer: Tensor, timed: Timed = timed, seconds: float | None = None) -> PeakFigure:
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


def update(sampler: Sampler, buffer: Tensor, timed: Timed = timed, seconds: float | None = None) -> PeakFigure:
    """The fastest of several methods to change arrays in place; a line that was read is written without another read.

    The values stay 1: every moment is the mean of ones, and the learning rate is 0.
    """
    weights, gradients, means, squares = ([array] for array in buffer.view(4, -1))
    steps = [torch.ones((), device=buffer.device)]
    options: dict[str, Any] = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    options |= {"amsgrad": False, "maximize": False}
    # Bytes of the buffer, and how many times each moves: AdamW only reads the gradient, one of its four arrays.
    methods: dict[str, tuple[float, Callable[[], object]]] = {
        "Tensor.mul_": (2, lambda: buffer.mul_(1.0)),
        "fused AdamW": (1.75, lambda: torch._fused_adamw_(weights, gradients, means, squares, [], steps, **options)),
    }
    seconds, size = seconds or 2 * sampler.effort.seconds, buffer.numel() * 4
    figures = [
        rate(passes * size, sampler.readings(timed(work), seconds=seconds), "B/s", buffer_bytes=size, method=name)
        for name, (passes, work) in methods.items()
    ]
    best = max(figures, key=lambda figure: figure.p50)
    return replace_fields(best, counted="read + write", adamw=figures[1].p50)


def first_touch(sampler: Sampler, size: int) -> PeakFigure:
    """The first write to memory that comes from the system: every page is a page fault."""

    def write() -> None:
        torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32).fill_(1.0)

    ns = sampler.readings(timed(write), warm_ups=1)
    return rate(size, ns, "B/s", counted="write", buffer_bytes=size, method="mmap, fill_")


def cached(sampler: Sampler, buffer: Tensor) -> PeakFigure:
    """Additions whose tensors stay in the cache."""
    half = buffer.numel() // 2
    ns = additions(sampler, buffer, ADDITIONS)
    return rate(3 * half * 4, ns, "B/s", counted="2 reads + write", buffer_bytes=2 * half * 4, method="Tensor.add_")


def special(sampler: Sampler, buffer: Tensor) -> PeakFigure:
    """Evaluations of the logistic function, the usual one that products do not contain, on tensors in the cache."""
    half = buffer.numel() // 2
    source, target = buffer[:half], torch.empty(half)
    ns = sampler.readings(timed(lambda: torch.sigmoid(source, out=target)))
    return rate(half, ns, "/s", counted="evaluations", buffer_bytes=2 * half * 4, method="torch.sigmoid")


def additions(sampler: Sampler, buffer: Tensor, calls: int) -> list[float]:
    """ns to add one half of the buffer to the other, less those of a call that adds one element."""
    half = buffer.numel() // 2

    def series(count: int, calls: int) -> list[float]:
        target, source = buffer[:count], buffer[half : half + count]

        def work() -> None:
            for _ in range(calls):
                target.add_(source)

        return [ns / calls for ns in sampler.readings(timed(work))]

    call = min(series(1, ADDITIONS))
    return [max(ns - call, ns / 2) for ns in series(half, calls)]


def gather(
    sampler: Sampler,
    flat: Tensor,
    row_sizes: Iterable[int],
    ids_of: Callable[[int], int],
    timed: Timed = timed,
    warm: Callable[[], object] = lambda: None,
) -> RowTable:
    """Random rows of a table by row size, with new ids every time; `ids_of` is their number by the bytes of a row."""
    generator = torch.Generator(flat.device).manual_seed(0)

    def gathered(row_bytes: int) -> GatherRow:
        table, ids = flat.view(-1, row_bytes // 4), ids_of(row_bytes)
        offsets = torch.arange(0, ids, BAG, device=flat.device)
        some = torch.zeros(ids, dtype=torch.int64, device=flat.device)
        out = torch.ones(ids, table.shape[1], device=flat.device)
        methods: dict[str, Callable[[], object]] = {
            "torch.index_select": lambda: torch.index_select(table, 0, some, out=out),
            f"embedding_bag, sums of {BAG}": lambda: F.embedding_bag(some, table, offsets, mode="sum"),
        }
        if flat.device.type == "cpu":
            plain, plain_ids, plain_out = table.numpy(), some.numpy(), out.numpy()
            methods["numpy.take, one thread"] = lambda: plain.take(plain_ids, axis=0, out=plain_out, mode="clip")

        def draw() -> None:
            some.random_(0, table.shape[0], generator=generator)
            warm()

        readings = {name: sampler.readings(timed(work, draw)) for name, work in methods.items()}
        return gather_row(row_bytes, ids, readings)

    return RowTable(flat.numel() * 4, [gathered(row_bytes) for row_bytes in row_sizes])


def knee(sampler: Sampler, flat: np.ndarray[Any, Any], last_cache: int, rng: np.random.Generator) -> Knee:
    """ns per lookup by the size of the table, with one thread."""
    out = np.ones((KNEE_CALL, KNEE_ROW_BYTES // 4), dtype=np.float32)
    points = []
    for size in knee_sizes(KNEE_FROM, flat.nbytes, sampler.effort.knee_points):
        table = flat[: size // 4].reshape(-1, KNEE_ROW_BYTES // 4)
        if size <= 2 * last_cache:
            # Random ids alone would need many repetitions to load a table that fits the cache.
            table.max()
        ids = np.zeros((KNEE_CALLS, KNEE_CALL), dtype=np.int64)

        def draw(ids: np.ndarray[Any, Any] = ids, rows: int = len(table)) -> None:
            ids[:] = rng.integers(0, rows, ids.shape)

        def look_up(ids: np.ndarray[Any, Any] = ids, table: np.ndarray[Any, Any] = table) -> None:
            for call in ids:
                table.take(call, axis=0, out=out, mode="clip")

        ns = sampler.readings(timed(look_up, draw))
        points.append(figure([value / (KNEE_CALL * KNEE_CALLS) for value in ns], "ns a lookup", table_bytes=size))
    return Knee(
        row_bytes=KNEE_ROW_BYTES,
        threads=1,
        lookups=KNEE_CALL * KNEE_CALLS,
        method=f"numpy.take, {KNEE_CALL} rows a call, fresh uniform ids",
        points=points,
        bytes=0,
    )


def stream_knee(sampler: Sampler, flat: Tensor) -> StreamCurve:
    """ns per KiB of an addition by the size of both tensors together, with torch's current number of threads."""
    points = []
    for size in knee_sizes(STREAM_FROM, min(STREAM_TO, flat.numel() * 4), sampler.effort.knee_points):
        ns = additions(sampler, flat[: size // 4], max(1, ADDITIONS * STREAM_FROM // size))
        points.append(figure([value * 1024 / size for value in ns], "ns a KiB", table_bytes=size))
    return StreamCurve(points, threads=torch.get_num_threads(), method="Tensor.add_, both tensors together")


def derive_knee(curves: Knee) -> None:
    """Where both curves leave the cache; streams that show no difference leave it where random rows do."""
    curves.bytes = knee_of(curves.points) or curves.points[-1].table_bytes
    if curves.stream is not None:
        curves.stream.bytes = knee_of(curves.stream.points) or curves.bytes


def knee_sizes(smallest: int, largest: int, points: int) -> list[int]:
    """Sizes from the smallest to the largest, `points` for each doubling, in whole rows."""
    sizes, step = [], 0
    while (size := smallest * 2 ** (step / points)) < largest:
        sizes.append(int(size) // KNEE_ROW_BYTES * KNEE_ROW_BYTES)
        step += 1
    return [*sizes, largest]
