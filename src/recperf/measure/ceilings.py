"""What the device of a profile can do at best: the measured ceilings of its processor or its GPU. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .peaks.records import DeviceRates, Peaks, Rates, RowTable
from .profile_records import StepBudget

LINE = 64
"""Bytes of a cache line: a narrower row moves as many."""
WIDTHS = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by precision."""
UNKNOWN_CACHE_BYTES = 16 << 20
"""Bytes taken for cached where the caches of this machine were not measured."""


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one device; on a CPU with one number of threads, which every rate depends on."""

    device: str
    """"cpu", or the name of the GPU."""
    threads: int
    flops: dict[str, float]
    """FLOP/s of matrix products by precision: float64, float32, tf32, bfloat16, float16, where they were measured."""
    stream: float
    """B/s of the fastest stream through memory that was measured: a copy, a read or an update in place."""
    cached: float
    """B/s of an addition, reads plus write, whose tensors stay in the cache."""
    cache_bytes: int
    """Bytes of a table beyond which random rows come from memory rather than from a cache."""
    stream_cache_bytes: int
    """Bytes of both tensors of an addition beyond which they come from memory."""
    largest_cache: int
    """Bytes of the largest cache that the system reports, or `stream_cache_bytes` where that is larger."""
    rows_memory: tuple[tuple[int, float], ...]
    """(bytes of a row, ns per random row) from memory, ascending."""
    rows_cache: tuple[tuple[int, float], ...]
    """(bytes of a row, ns per random row) from a table that is well below `cache_bytes`, ascending."""
    calls: dict[str, float]
    """ns of a call that computes nothing to speak of, by kind of operator; see docs/limits.md."""
    first_touch: float
    """B/s of the first write to pages from the operating system, each of which is a page fault; on a GPU as `copy`."""
    special: float = 0.0
    """Evaluations per second of functions such as exp on data in the cache; 0 where they were not measured."""
    other_work: float = 0.0
    """Share of the cores that others took while the processor was measured."""
    kernel_ns: float = 0.0
    """GPU: from the start of an empty kernel of a CUDA graph to the start of the next one."""
    queue_ns: float = 0.0
    """GPU: host time to call an operator that queues one kernel."""
    adamw: float = 0.0
    """B/s of a fused AdamW, which computes more than a copy; 0: not measured."""
    link: float = 0.0
    """GPU: B/s of copies from pinned memory of the host; 0: not measured."""

    def row_ns(self, row_bytes: int, *, cached: bool = False) -> float:
        """ns of a random row of this size."""
        return _interpolated(self.rows_cache if cached else self.rows_memory, row_bytes)

    def latency_share(self, row_bytes: int) -> float:
        """The part of a random row's time from memory that does not depend on the bytes of the row.

        It is the intercept of the line that fits the measured widths best, relative errors counting equally. With one
        width nothing can be told apart: all of it is latency.
        """
        points = [(max(LINE, size), ns, ns**-2) for size, ns in self.rows_memory]
        total = sum(weight for *_, weight in points)
        size_mean = sum(weight * size for size, _, weight in points) / total
        ns_mean = sum(weight * ns for _, ns, weight in points) / total
        spread = sum(weight * (size - size_mean) ** 2 for size, _, weight in points)
        slope = sum(weight * (size - size_mean) * (ns - ns_mean) for size, ns, weight in points) / (spread or 1.0)
        intercept = ns_mean - slope * size_mean
        if slope <= 0 or intercept <= 0:
            return 1.0 if slope <= 0 else 0.0
        return intercept / (intercept + slope * max(LINE, row_bytes))

    def product(self, precision: str | None) -> float:
        """FLOP/s of matrix products in this precision; in float32 where it was not measured."""
        return self.flops.get(precision or "float32") or self.flops["float32"]

    def faster(self, precision: str | None) -> list[str]:
        """The precisions, not wider than this one, whose matrix products were measured to be faster; fastest first."""
        narrower = [name for name in self.flops if WIDTHS[name] <= WIDTHS[precision or "float32"]]
        ordered = sorted(narrower, key=lambda name: -self.flops[name])
        return [name for name in ordered if self.flops[name] > self.product(precision)]

    def shared(self, ranks: int) -> Ceilings:
        """The part of one of several ranks that use the processor at the same time."""
        if ranks == 1:
            return self
        return replace(
            self,
            flops={name: rate / ranks for name, rate in self.flops.items()},
            stream=self.stream / ranks,
            cached=self.cached / ranks,
            special=self.special / ranks,
            cache_bytes=self.cache_bytes // ranks,
            stream_cache_bytes=self.stream_cache_bytes // ranks,
            first_touch=self.first_touch / ranks,
            rows_memory=tuple((size, ns * ranks) for size, ns in self.rows_memory),
            rows_cache=tuple((size, ns * ranks) for size, ns in self.rows_cache),
        )


def ceilings_of(
    peaks: Peaks | None, *, device: str = "cpu", threads: int | None = None, ranks: int = 1
) -> Ceilings | None:
    """The ceilings of a device from the content of a peaks file.

    None where that device or that number of threads was not measured. Ranks that share a processor use all of its
    threads together: each has its part of those ceilings, whatever its own number of threads.
    """
    figures = _figures(peaks, device, None if ranks > 1 else threads)
    if figures is None or peaks is None:
        return None
    several = peaks.threads if ranks > 1 or threads is None or device != "cpu" else threads
    ceilings = _ceilings(device, several, *figures)
    return ceilings.shared(ranks) if device == "cpu" else ceilings


def cache_sizes_of(peaks: Peaks | None, device: str, *, threads: int | None = None, ranks: int = 1) -> tuple[int, int]:
    """The bytes beyond which random rows, and streams, come from the memory of a device."""
    ceilings = ceilings_of(peaks, device=device, threads=threads, ranks=ranks)
    return (
        (ceilings.cache_bytes, ceilings.stream_cache_bytes) if ceilings else (UNKNOWN_CACHE_BYTES, UNKNOWN_CACHE_BYTES)
    )


def _figures(peaks: Peaks | None, device: str, threads: int | None) -> tuple[Rates, DeviceRates] | None:
    """The figures of a device that depend on the number of threads, and those that do not; None if not measured."""
    if peaks is None:
        return None
    if device != "cpu":
        gpu = (peaks.gpu or {}).get(device)
        return (gpu, gpu) if gpu else None
    rates = peaks if threads in (None, peaks.threads) else peaks.other_threads.get(str(threads))
    return (rates, peaks) if rates else None


def measured_beside(peaks: Peaks | None, device: str, threads: int | None) -> float | None:
    """Share of the cores that others took while these ceilings were measured; None if not known, and for a GPU."""
    figures = _figures(peaks, device, threads)
    return figures and _beside(*figures)


def _beside(rates: Rates, common: DeviceRates) -> float | None:
    return common.other_work if rates.other_work is None else rates.other_work


def cache_holds(peaks: Peaks | None, device: str, bytes_: float) -> bool:
    """Whether random rows that take `bytes_` in total stay in the cache of a device, as measured."""
    figures = _figures(peaks, device, None)
    return figures is not None and bytes_ <= figures[1].knee.bytes


def hot_bytes(peaks: Peaks | None, device: str, threads: int | None) -> int | None:
    """Bytes of the measured table whose rows stay in the nearest cache of some size; None if not measured."""
    figures = _figures(peaks, device, threads)
    return None if figures is None else (figures[0].gather.near or figures[0].gather.cache).table_bytes


def ceilings_of_profile(profile: StepBudget, peaks: Peaks | None) -> Ceilings | None:
    """The ceilings of a profile's device with its number of threads; the part of one rank where several share it."""
    return ceilings_of(peaks, device=profile.device, threads=profile.threads, ranks=ranks_sharing(profile))


def _ceilings(device: str, threads: int, rates: Rates, common: DeviceRates) -> Ceilings:
    launch, cache_bytes = common.launch, common.knee.bytes
    stream_cache_bytes = common.knee.stream.bytes if common.knee.stream else cache_bytes
    reported = (common.machine.get("caches") if isinstance(common, Peaks) else None) or {"L2": common.l2_bytes}
    pinned = common.transfer.get("host_to_device_pinned")
    return Ceilings(
        device=device,
        threads=threads,
        flops={name: figure.p50 for name, figure in rates.gemm.items() if name in WIDTHS},
        cached=rates.cached.p50,
        stream=max(figure.p50 for figure in (rates.copy, rates.read, rates.update)),
        cache_bytes=cache_bytes,
        stream_cache_bytes=stream_cache_bytes,
        largest_cache=max(cache_bytes, stream_cache_bytes, *reported.values()),
        first_touch=(rates.first_touch or rates.copy).p50,
        rows_memory=_rows(rates.gather.dram),
        rows_cache=_rows(rates.gather.cache),
        calls={kind: figure.p50 for kind, figure in common.calls.items()},
        other_work=_beside(rates, common) or 0.0,
        special=rates.special.p50 if rates.special else 0.0,
        kernel_ns=launch.kernel.p50 if launch else 0.0,
        queue_ns=launch.queue.p50 if launch else 0.0,
        adamw=rates.update.adamw or 0.0,
        link=pinned.p50 if pinned else 0.0,
    )


def _rows(table: RowTable) -> tuple[tuple[int, float], ...]:
    """(bytes of a row, ns) ascending, of the fastest method for each width."""
    return tuple(sorted((row.row_bytes, row.ns.p50) for row in table.rows))


def ranks_sharing(profile: StepBudget) -> int:
    """Number of ranks that share the profile's processor."""
    return profile.communication.sharing if profile.communication else 1


def _interpolated(points: tuple[tuple[int, float], ...], row_bytes: int) -> float:
    if row_bytes <= points[0][0]:
        return points[0][1]
    for (size, time), (next_size, next_time) in zip(points, points[1:]):
        if row_bytes <= next_size:
            return time + (next_time - time) * (row_bytes - size) / (next_size - size)
    return points[-1][1] * row_bytes / points[-1][0]
