"""Ceilings of a GPU: products, memory, caches, transfers, launches. Timed with events after flushing the L2."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import units
from .cpu import BAG, KNEE_ROW_BYTES, ROW_BYTES, copy, gather, knee_sizes, product, read, update
from .records import DeviceRates, Knee, Launch, PeakFigure, RowTable, RowTables
from .sampling import MIB, Sampler, allowed_bytes, bounded, calls, figure, knee_of, rate

Say = Callable[[str], None]

LAUNCHES = 200
"""Kernels per reading: fewer than the launch queue holds, so that the host never waits for the device."""
GRAPH = 500
"""Kernels of the graph that measures what a kernel costs at least."""
ADDITIONS = 50
KNEE_IDS = 1 << 18


def measure(sampler: Sampler, say: Say, note: Say) -> dict[str, DeviceRates]:
    """The ceilings of each kind of GPU by its name; of equal ones only the first is measured."""
    by_name: dict[str, DeviceRates] = {}
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        if name not in by_name:
            with torch.cuda.device(index):
                by_name[name] = Gpu(sampler, say, note).measure()
            torch.cuda.empty_cache()
    return by_name


class Gpu:
    """Measures the current device."""

    def __init__(self, sampler: Sampler, say: Say, note: Say) -> None:
        self.sampler, self.say, self.note = sampler, say, note
        self.effort = sampler.effort
        properties = torch.cuda.get_device_properties()
        self.name = properties.name
        self.l2_bytes = int(properties.L2_cache_size) or 64 * MIB
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.allowed = allowed_bytes(self.device)
        # Writing several times the size of the L2 evicts the data of the work, and keeps the device busy while the
        # host queues the timed work, so that no launch gap is timed.
        self.flush = torch.ones(bounded(4 * self.l2_bytes, self.allowed // 4) // 4, device=self.device)

    def measure(self) -> DeviceRates:
        self.say(f"{self.name}: launches and transfers")
        launch, transfer, calls_ns = self.launch(), self.transfers(), calls(self.sampler, self.device)
        self.say(f"{self.name}: matrix products")
        gemm, table = self.products(), self.memory_table()
        self.say(f"{self.name}: streaming and random rows, {units.size(table.numel() * 4)}")
        streams: dict[str, Any] = {
            kind.__name__: kind(self.sampler, table, self.timed, self.effort.seconds) for kind in (copy, read, update)
        }
        knee = self.knee(table)
        cached_table = table[: bounded(knee.bytes // 4, table.numel() * 4) // 4]
        return DeviceRates(
            l2_bytes=self.l2_bytes,
            launch=launch,
            transfer=transfer,
            calls=calls_ns,
            gemm=gemm,
            **streams,
            knee=knee,
            cached=self.cached(cached_table, launch.kernel.p50),
            gather=RowTables(
                cache=self.gather(cached_table, warm=lambda: cached_table.sum()),
                dram=self.gather(table, warm=lambda: None),
            ),
        )

    def memory_table(self) -> Tensor:
        """One buffer for everything that needs memory beyond the L2."""
        requested = max(self.effort.gpu_table_bytes, self.effort.caches * self.l2_bytes)
        size = bounded(requested, self.allowed // 2)
        if size < requested:
            self.note(
                f"{self.name}: memory is short: the table has {units.size(size)} instead of {units.size(requested)}"
            )
        return torch.ones(size // 4, device=self.device)

    def timed(self, work: Callable[[], object], warm: Callable[[], object] = lambda: None) -> Callable[[], float]:
        """One reading between two events, after flushing the L2 and warming what should be cached."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def once() -> float:
            self.flush.add_(1)
            warm()
            begin.record()
            work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e6

        return once

    def products(self) -> dict[str, PeakFigure]:
        before = torch.get_float32_matmul_precision()
        try:
            best = {}
            for name, dtype, precision in (
                ("float64", torch.float64, "highest"),
                ("float32", torch.float32, "highest"),
                ("tf32", torch.float32, "high"),
                ("bfloat16", torch.bfloat16, "highest"),
                ("float16", torch.float16, "highest"),
            ):
                torch.set_float32_matmul_precision(precision)
                best[name] = product(self.sampler, dtype, self.timed, self.device)
            return best
        finally:
            torch.set_float32_matmul_precision(before)

    def graph(self, work: Callable[[], object], count: int) -> list[float]:
        """ns of one of the calls in a CUDA graph; a first replay gives the host time to queue the timed one."""
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                work()
        return [ns / count for ns in self.sampler.readings(self.timed(graph.replay, graph.replay))]

    def cached(self, buffer: Tensor, kernel_ns: float) -> PeakFigure:
        """Additions whose tensors stay in the L2, less what any kernel of a graph costs."""
        half = buffer.numel() // 2
        target, source = buffer[:half], buffer[half : 2 * half]
        ns = [max(value - kernel_ns, value / 2) for value in self.graph(lambda: target.add_(source), ADDITIONS)]
        return rate(3 * half * 4, ns, "B/s", counted="2 reads + write", buffer_bytes=2 * half * 4, method="Tensor.add_")

    def knee(self, flat: Tensor) -> Knee:
        """ns per random row by the size of the table. Sums of bags write little, so that the table stays cached."""
        offsets = torch.arange(0, KNEE_IDS, BAG, device=self.device)
        some = torch.empty(KNEE_IDS, dtype=torch.int64, device=self.device)
        points = []
        for size in knee_sizes(bounded(self.l2_bytes // 32, flat.numel() * 4), flat.numel() * 4, 1):
            table = flat[: size // 4].view(-1, KNEE_ROW_BYTES // 4)

            def warm(table: Tensor = table) -> None:
                some.random_(0, table.shape[0], generator=self.generator)
                table.sum()

            def sums(table: Tensor = table) -> Tensor:
                return F.embedding_bag(some, table, offsets, mode="sum")

            ns = self.sampler.readings(self.timed(sums, warm))
            points.append(figure([value / KNEE_IDS for value in ns], "ns a lookup", table_bytes=size))
        return Knee(
            row_bytes=KNEE_ROW_BYTES,
            lookups=KNEE_IDS,
            method=f"embedding_bag, sums of {BAG}, fresh uniform ids",
            points=points,
            # Where random rows show no difference, the size that the driver reports is the only one there is.
            bytes=knee_of(points) or self.l2_bytes,
        )

    def gather(self, flat: Tensor, *, warm: Callable[[], object]) -> RowTable:
        largest = bounded(256 * MIB, self.allowed // 4)
        return gather(self.sampler, flat, ROW_BYTES, lambda row: min(1 << 20, largest // row), self.timed, warm)

    def transfers(self) -> dict[str, PeakFigure]:
        """Host to device and back, from pinned memory (by DMA) and from pageable memory (staged by the driver)."""
        size = bounded(self.effort.transfer_bytes, min(self.allowed, allowed_bytes() // 2))
        on_device = torch.ones(size // 4, device=self.device)
        rates = {}
        for name, pinned in (("pinned", True), ("pageable", False)):
            on_host = torch.ones(size // 4, pin_memory=pinned)
            copies: dict[str, Callable[[], object]] = {
                f"host_to_device_{name}": lambda host=on_host: on_device.copy_(host, non_blocking=True),  # type: ignore[misc]
                f"device_to_host_{name}": lambda host=on_host: host.copy_(on_device, non_blocking=True),  # type: ignore[misc]
            }
            for direction, work in copies.items():
                rates[direction] = rate(size, self.sampler.readings(self.timed(work)), "B/s", buffer_bytes=size)
        return rates

    def launch(self) -> Launch:
        """Host time to queue a kernel of one element, and its time inside a graph."""
        one = torch.ones(1, device=self.device)

        def queued() -> float:
            torch.cuda.synchronize()
            began = perf_counter_ns()
            for _ in range(LAUNCHES):
                one.add_(1)
            return (perf_counter_ns() - began) / LAUNCHES

        what = "add_ on one float32"
        return Launch(
            queue=figure(self.sampler.readings(queued), "ns", what=f"{what}, not waited for"),
            kernel=figure(self.graph(lambda: one.add_(1), GRAPH), "ns", what=f"{what}, in a CUDA graph"),
        )
