"""Times a piece of work on a machine that may be busy: many readings, medians, repeated series. Also what calling an
operator costs whatever it computes, by kind: such a call works on tensors of one element.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from time import monotonic, perf_counter_ns
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec.structs import asdict, replace
from torch import Tensor
from torch.nn import functional as F

from ...jsonfile import Struct
from ...machine import available_bytes
from ...stop import poll
from .records import GatherRow, PeakFigure, Rates

R = TypeVar("R", bound=Rates)

NOISY = 0.25
"""Distance from p20 to p80 relative to the median above which a series is repeated."""

FLAT = 1.25
"""A curve whose times differ by less between its ends has no knee."""

WARM_UPS = 2

GRAIN = 1 << 16
"""Table sizes are whole multiples of this, so that rows of every size divide them."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure. Sizes are minima: large caches raise them, and the memory limits them."""

    seconds: float
    """Seconds for one series of readings."""
    least: int
    """Minimum number of readings in a series."""
    most: int
    """Maximum number of readings in a series."""
    tries: int
    """Maximum number of series of a noisy figure; the fastest counts."""
    patience: float
    """Seconds since the start after which no series is repeated."""
    repeat_seconds: float
    """Seconds for which everything is measured again and again beside much other work."""
    product_seconds: float
    """Seconds for one size of the square matrix products."""
    product_side: int
    """Largest side of the products."""
    caches: int
    """Minimum size of the memory table in last-level caches."""
    table_bytes: int
    """Minimum size of the memory table."""
    knee_bytes: int
    """Minimum size at which the cache curve ends."""
    knee_points: int
    """Sizes of the cache curve per doubling."""
    ids: int
    """Maximum number of rows of one gather on the CPU."""
    gpu_table_bytes: int
    """Minimum size of the table in GPU memory."""
    transfer_bytes: int
    """Size of the buffer copied between host and GPU."""


MIB = 1 << 20


def _effort(fields: dict[str, Any]) -> Effort:
    return Effort(**{k.replace("_mib", "_bytes"): MIB * v if k.endswith("_mib") else v for k, v in fields.items()})


_FILE = tomllib.loads(files(__package__).joinpath("efforts.toml").read_text(encoding="utf-8"))
QUICK, FULL, TINY = (_effort(_FILE[name]) for name in ("quick", "full", "tiny"))


class Sampler:
    """Takes readings within the limits of an effort."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self._began = monotonic()

    def readings(
        self, once: Callable[[], float], *, seconds: float | None = None, warm_ups: int = WARM_UPS
    ) -> list[float]:
        """Readings of `once`, in ns; of several series the one with the lowest median.

        A ceiling is what the machine can do at best, so a series that other processes slowed down can be dropped.
        """
        best: list[float] = []
        for _ in range(self.effort.tries):
            for _ in range(warm_ups):
                once()
            series = self._series(once, self.effort.seconds if seconds is None else seconds)
            if not best or np.median(series) < np.median(best):
                best = series
            if spread(best) <= NOISY or monotonic() - self._began > self.effort.patience:
                break
        return best

    def _series(self, once: Callable[[], float], seconds: float) -> list[float]:
        series: list[float] = []
        until = monotonic() + seconds
        while len(series) < self.effort.least or (len(series) < self.effort.most and monotonic() < until):
            poll()
            series.append(once())
        return series


def allowed_bytes(device: torch.device | str = "cpu") -> int:
    """Memory that a measurement may allocate: a quarter of what is available."""
    on_gpu = torch.device(device).type == "cuda"
    return int(torch.cuda.mem_get_info(device)[0] if on_gpu else available_bytes()) // 4


def bounded(requested: int, allowed: int) -> int:
    """The requested bytes, or the allowed ones if fewer, in whole grains and at least one grain."""
    return max(GRAIN, min(requested, allowed) // GRAIN * GRAIN)


def spread(values: Sequence[float]) -> float:
    low, middle, high = np.percentile(values, (20, 50, 80))
    return float((high - low) / middle)


def figure(values: Sequence[float], unit: str, **more: Any) -> PeakFigure:
    low, middle, high = (float(value) for value in np.percentile(values, (20, 50, 80)))
    return PeakFigure(low, middle, high, n=len(values), unit=unit, **more)


def rate(amount: float, ns: Sequence[float], unit: str, **more: Any) -> PeakFigure:
    """Times of an amount of work, as a rate per second."""
    return figure([amount * 1e9 / value for value in ns], unit, **more)


def fastest_rate(amount: float, readings: dict[str, list[float]], unit: str, **more: Any) -> PeakFigure:
    """The rate of the fastest of several methods for the same work."""
    method = _fastest(readings)
    return rate(amount, readings[method], unit, **more, method=method)


def fastest_product(readings: dict[int, list[float]]) -> PeakFigure:
    """The best rate of square matrix products, from their times by side."""
    rates = [rate(2 * side**3, ns, "FLOP/s", shape=[side, side, side]) for side, ns in readings.items()]
    return max(rates, key=lambda figure: figure.p50)


def _fastest(readings: dict[str, list[float]]) -> str:
    return min(readings, key=lambda name: float(np.median(readings[name])))


def gather_row(row_bytes: int, ids: int, readings: dict[str, list[float]]) -> GatherRow:
    """The fastest of several methods to gather rows, as ns per row."""
    method = _fastest(readings)
    ns = [value / ids for value in readings[method]]
    return GatherRow(
        row_bytes=row_bytes,
        ids=ids,
        method=method,
        methods={name: float(np.median(values)) / ids for name, values in readings.items()},
        ns=figure(ns, "ns a row"),
    )


def knee_of(points: Sequence[PeakFigure]) -> int | None:
    """The size at which a curve of times by `table_bytes` leaves the cache; None for a flat curve.

    There a time lies midway between the fastest and that of memory, the median of the two largest octaves: half of what
    memory costs more than the cache is paid. Between points the logarithm of the size is interpolated. A running median
    of three removes single points that other work disturbed.
    """
    sizes, ns = [point.table_bytes for point in points], [point.p50 for point in points]
    smooth = [ns[0], *(float(np.median(ns[i - 1 : i + 2])) for i in range(1, len(ns) - 1)), ns[-1]]
    cache = min(smooth)
    memory = float(np.median([value for size, value in zip(sizes, ns) if 4 * size >= sizes[-1]]))
    if memory < FLAT * cache:
        return None
    middle = (cache + memory) / 2
    last = max((index for index, value in enumerate(smooth[:-1]) if value <= middle), default=0)
    low, high = smooth[last], smooth[last + 1]
    part = min(1.0, max(0.0, (middle - low) / (high - low))) if high > low else 0.0
    return int(sizes[last] * (sizes[last + 1] / sizes[last]) ** part)


def better(first: Any, second: Any) -> Any:
    """The faster figure of two measurements, figure by figure."""
    if second is None:
        return first
    if isinstance(first, list):
        return [better(one, other) for one, other in zip(first, second, strict=True)]
    if isinstance(first, dict):
        return {key: better(value, second[key]) if key in second else value for key, value in first.items()}
    if isinstance(first, PeakFigure):
        lower_is_better = first.unit.startswith("ns")
        return second if (second.p50 < first.p50) == lower_is_better else first
    if isinstance(first, GatherRow):
        # The method and the figure of a gather belong together.
        faster, other = (second, first) if second.ns.p50 < first.ns.p50 else (first, second)
        fastest = {name: min(ns, other.methods.get(name, ns)) for name, ns in faster.methods.items()}
        return replace(faster, methods=fastest)
    if isinstance(first, Struct):
        return replace(first, **{name: better(value, getattr(second, name)) for name, value in asdict(first).items()})
    return first


def at_least(figures: R, others: Iterable[Rates]) -> R:
    """Rates that are no lower than those with fewer threads.

    Beside other work threads wait for one that does not run: a product can be 100 times slower than with one thread.
    """
    for fewer in others:
        rates = {name: value for name, value in asdict(fewer).items() if name not in ("gather", "other_work")}
        figures = replace(figures, **{name: better(getattr(figures, name), value) for name, value in rates.items()})
    return figures


CALLS = 100
"""Calls per reading. On a GPU fewer than its queue holds, so that the host never waits for the device."""
SHORT, LONG = 8, 64
"""Nodes of the two backward passes whose difference is the time of a node."""


def calls(sampler: Sampler, device: torch.device | str = "cpu") -> dict[str, PeakFigure]:
    """ns of one call from Python by kind of operator; on a GPU the host's time to queue it."""
    one, matrix = torch.ones(1, device=device), torch.ones(1, 1, device=device)
    weight, target = torch.ones(1, device=device, requires_grad=True), torch.ones(1, device=device)
    ids, offsets = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    kinds: dict[str, tuple[str, Callable[[], object]]] = {
        "elementwise": ("add", lambda: one + one),
        "elementwise_grad": ("add to a parameter, forward", lambda: weight + one),
        "view": ("transpose", lambda: matrix.t()),
        "product": ("addmm", lambda: torch.addmm(one, matrix, matrix)),
        "reduction": ("sum", lambda: one.sum()),
        "index": ("index_select of one row", lambda: torch.index_select(matrix, 0, ids)),
        "embedding_bag": ("embedding_bag of one id", lambda: F.embedding_bag(ids, matrix, offsets, mode="sum")),
        "allocate": ("empty", lambda: torch.empty(1, device=device)),
        "copy": ("copy_", lambda: target.copy_(one)),
    }
    empty = min(sampler.readings(_repeated(lambda: None, device)))
    figures = {}
    for kind, (what, call) in kinds.items():
        # The operators are wrapped in a function here; a program calls them directly.
        ns = [max(1.0, value - empty) for value in sampler.readings(_repeated(call, device))]
        figures[kind] = figure(ns, "ns", what=what)
    return figures | _backward(sampler, weight, one)


def _repeated(call: Callable[[], object], device: torch.device | str) -> Callable[[], float]:
    def once() -> float:
        synchronize(device)
        began = perf_counter_ns()
        for _ in range(CALLS):
            call()
        return (perf_counter_ns() - began) / CALLS

    return once


def _backward(sampler: Sampler, weight: Tensor, one: Tensor) -> dict[str, PeakFigure]:
    """Starting a backward pass, and each of its nodes: from chains of additions of two lengths."""

    def backward(nodes: int) -> Callable[[], float]:
        def once() -> float:
            weight.grad = None
            result = weight
            for _ in range(nodes):
                result = result + one
            synchronize(weight.device)
            began = perf_counter_ns()
            result.backward()  # type: ignore[no-untyped-call]
            return perf_counter_ns() - began

        return once

    short, long = (sorted(sampler.readings(backward(nodes))) for nodes in (SHORT, LONG))
    nodes = [max(1.0, (slow - fast) / (LONG - SHORT)) for fast, slow in zip(short, long)]
    starts = [max(1.0, fast - SHORT * node) for fast, node in zip(short, nodes)]
    return {
        "node": figure(nodes, "ns", what="one node of a backward pass"),
        "backward": figure(starts, "ns", what="starting a backward pass"),
    }


def synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
