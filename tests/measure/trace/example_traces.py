"""Small traces written by hand in the shape torch.profiler gives them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
HOST, BACKWARD = 100, 200


def op(name: str, start: float, length: float, *, thread: int = HOST, external: int = 0, **args: Any) -> Event:
    return _event("cpu_op", name, start, length, thread, {"External id": external, **args})


def around(name: str, start: float, length: float, thread: int = HOST) -> Event:
    return _event("user_annotation", name, start, length, thread, {"External id": 0})


def call(name: str, start: float, length: float, correlation: int, thread: int = HOST) -> Event:
    return _event("cuda_runtime", name, start, length, thread, {"cbid": 211, "correlation": correlation})


def kernel(name: str, start: float, length: float, correlation: int, *, stream: int = 7, device: int = 0) -> Event:
    args = {"device": device, "stream": stream, "correlation": correlation, "grid": [1, 1, 1], "block": [128, 1, 1]}
    return {**_event("kernel", name, start, length, stream, args), "pid": device}


def copy(name: str, start: float, length: float, correlation: int, size: int, stream: int = 7) -> Event:
    args = {"device": 0, "stream": stream, "correlation": correlation, "bytes": size, "memory bandwidth (GB/s)": 1.0}
    cat = "gpu_memset" if name.startswith("Memset") else "gpu_memcpy"
    return {**_event(cat, name, start, length, stream, args), "pid": 0}


def flow(correlation: int, start: float, end: float, stream: int = 7) -> list[Event]:
    both = {"cat": "ac2g", "name": "ac2g", "id": correlation}
    return [
        {"ph": "s", **both, "pid": HOST, "tid": HOST, "ts": start},
        {"ph": "f", **both, "pid": 0, "tid": stream, "ts": end, "bp": "e"},
    ]


def _event(cat: str, name: str, start: float, length: float, thread: int, args: Event) -> Event:
    given = {"ts": start, "dur": length, "args": args}
    return {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": thread, **given}


def write(path: Path, events: list[Event], **header: Any) -> Path:
    names = [{"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "ts": 0.0, "args": {"name": "python"}}]
    text = json.dumps(
        {"schemaVersion": 1, **header, "traceEvents": [*names, *events], "traceName": str(path)}, indent=1
    )
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def gpu_step(number: int, at: float, first: int) -> list[Event]:
    """A step of 1000 us with every cause of idleness in it, all kernels of 100 us or 5 us.

    0-200 data; 210 copy to the device (pinned, runs 220-240); 250 mm launched, runs 260-360; 270 relu launched, runs
    365-370; 380-480 the backward thread launches two kernels with one graph call, running 500-600 and 603-703; 520 item
    waits until 710; 900 the update is launched, runs 905-1000.
    """
    return [
        around(f"recperf.step#{number}", at, 1000),
        around("recperf.part.data", at, 200),
        around("recperf.part.forward", at + 205, 170),
        op("aten::to", at + 206, 30, external=first),
        call("cudaMemcpyAsync", at + 210, 5, first),
        *flow(first, at + 210, at + 220),
        copy("Memcpy HtoD (Pinned -> Device)", at + 220, 20, first, 200_000),
        op("aten::linear", at + 245, 20),
        op("aten::mm", at + 247, 15, **{"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}),
        call("cudaLaunchKernel", at + 250, 6, first + 1),
        *flow(first + 1, at + 250, at + 260),
        kernel("gemm<64>", at + 260, 100, first + 1),
        op("aten::relu", at + 268, 20),
        call("cudaLaunchKernel", at + 270, 6, first + 2),
        *flow(first + 2, at + 270, at + 365),
        kernel("relu", at + 365, 5, first + 2),
        around("recperf.part.backward", at + 376, 120),
        op("autograd::engine::evaluate_function: X", at + 380, 100, thread=BACKWARD),
        call("cudaGraphLaunch", at + 390, 80, first + 3, thread=BACKWARD),
        *flow(first + 3, at + 390, at + 500),
        kernel("back", at + 500, 100, first + 3),
        kernel("back", at + 603, 100, first + 3),
        around("recperf.part.loss", at + 510, 210),
        op("aten::item", at + 515, 200),
        op("aten::_local_scalar_dense", at + 516, 198),
        call("cudaStreamSynchronize", at + 520, 190, first + 4),
        around("recperf.part.update", at + 880, 60),
        call("cuLaunchKernel", at + 900, 4, first + 5),
        *flow(first + 5, at + 900, at + 905),
        kernel("update", at + 905, 95, first + 5),
    ]


def record(step: Callable[[], object], steps: int, path: Path) -> None:
    """Record so many steps and write their trace."""
    from recperf.measure.clocks import Counts
    from recperf.measure.observing import Observer

    observer = Observer(cache_sizes=lambda _: (1 << 24, 1 << 24), counts=Counts(1, 1, steps, 2), spans=True)
    try:
        while not observer.done:
            step()
            observer.end_step()
    finally:
        observer.close()
    assert observer.recording is not None
    observer.recording.save(path)
