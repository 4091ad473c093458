"""Readings of work on a GPU by events in its own queue, on a CPU by the host's clock; several ways take turns."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from time import perf_counter

import torch

Work = Callable[[], object]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(work: Work, device: torch.device) -> float:
    """Seconds of one call by the host's clock, the queue empty before and after: the first call, compiling included."""
    wait(device)
    began = perf_counter()
    work()
    wait(device)
    return perf_counter() - began


def batch(work: Work, calls: int, device: torch.device) -> float:
    """Seconds of a call, from so many queued one after the other."""
    if device.type != "cuda":
        began = perf_counter()
        for _ in range(calls):
            work()
        return (perf_counter() - began) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / calls


def captured(work: Work, calls: int, device: torch.device) -> Work:
    """A CUDA graph of so many calls on the current stream, which must not be the default one: launching a kernel costs
    the host nothing then. What the calls return is overwritten by the next replay."""
    work()
    wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        for _ in range(calls):
            work()
    return graph.replay


def readings(
    ways: dict[str, Work], device: torch.device, *, samples: int, seconds: float, warm_up: int = 3
) -> dict[str, list[float]]:
    """Seconds of a call by way. Each of the `samples` is a batch of calls that takes about `seconds`; the ways take
    turns, so that whatever else happens, the clock of the GPU among it, hits all."""
    for work in ways.values():
        for _ in range(warm_up):
            work()
    wait(device)
    calls = {name: max(1, math.ceil(seconds / batch(work, 2, device))) for name, work in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(samples):
            for name, work in ways.items():
                found[name].append(batch(work, calls[name], device))
    finally:
        if collecting:
            gc.enable()
    return found


def peak_memory(work: Work, device: torch.device) -> int | None:
    """Most bytes torch held on a GPU during a call, all that was there before included; none on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    wait(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device)
