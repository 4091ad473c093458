"""Reads a trace into compact records of host events and device work.

Times are microseconds as in the file. Events of unknown kinds are counted and ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from .file import LARGEST, Scan

KINDS = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "range",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "runtime": "call",
    "driver": "call",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "memcpy": "copy",
    "gpu_memset": "set",
    "memset": "set",
    "python_function": "python",
}
"""Our kinds by the profiler's categories in lower case, including those of old versions."""

SILENT = {"gpu_user_annotation", "trace", "overhead", "cuda_sync", "cuda_profiler_range"}
"""Categories of the profiler that repeat other events."""
DEVICE = ("kernel", "copy", "set")
STEP_OF_TORCH = "ProfilerStep"
MARK = "recperf.mark"
"""Ranges before the steps that end when all ranks have reached a barrier."""
ABOUT = "recperf"
"""Field of the header in which recperf writes rank, run and host."""
MERGED = "merged"
"""Field in that which lists the ranks of a merged trace."""


class Shapes(NamedTuple):
    """Sizes and element types of an operator's inputs."""

    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]


class Host(NamedTuple):
    """An event of a host thread: an operator, a named range, a call of the device runtime, or a Python frame."""

    kind: str
    name: str
    start: float
    end: float
    thread: str
    correlation: int | None
    external: int | None
    shapes: Shapes | None


class Device(NamedTuple):
    """Work on a device stream: a kernel, a copy or a fill."""

    kind: str
    name: str
    start: float
    end: float
    device: int
    stream: int
    correlation: int | None
    external: int | None
    bytes: int


@dataclass(kw_only=True)
class Trace:
    """The content of a trace file."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    """The fields next to the events: versions, properties of devices."""
    host: list[Host] = field(default_factory=list)
    """Operators, ranges and calls."""
    python: list[Host] = field(default_factory=list)
    """Python frames, if stacks were recorded."""
    device: list[Device] = field(default_factory=list)
    events: int = 0
    """Number of events in the file."""
    ignored: int = 0
    """Number of timed events of unknown kinds or without valid times."""


def read(path: Path, *, largest: int = LARGEST) -> Trace:
    """Load a `.json` or `.json.gz` trace of torch.profiler, or any Chrome trace, which gives fewer details."""
    scan = Scan(Path(path), largest=largest)
    trace = collect(scan.events(), scan.path)
    trace.header = scan.header
    return trace


def collect(events: Iterable[dict[str, Any]], path: Path) -> Trace:
    trace = Trace(path=path)
    known: dict[str, Shapes] = {}
    for event in events:
        trace.events += 1
        if event.get("ph") != "X":
            continue
        category = str(event.get("cat", "")).lower()
        if category in SILENT:
            continue
        kind = KINDS.get(category)
        start, length = _number(event.get("ts")), _number(event.get("dur", 0))
        if kind is None or start is None or length is None or length < 0:
            trace.ignored += 1
            continue
        _add(trace, event, kind, start, start + length, known)
    return trace


def _add(trace: Trace, event: dict[str, Any], kind: str, start: float, end: float, known: dict[str, Shapes]) -> None:
    args: dict[str, Any] = event["args"] if isinstance(event.get("args"), dict) else {}
    name = intern(str(event.get("name", "")))
    correlation = _whole(args.get("correlation"))
    external = _whole(args.get("External id", args.get("external id")))
    if kind in DEVICE:
        place = _whole(args.get("device", event.get("pid"))) or 0
        stream = _whole(args.get("stream", event.get("tid"))) or 0
        size = _whole(args.get("bytes", args.get("Bytes"))) or 0
        trace.device.append(Device(kind, name, start, end, place, stream, correlation, external, size))
        return
    thread = intern(f"{event.get('pid')}/{event.get('tid')}")
    if kind == "op" and name.startswith(STEP_OF_TORCH + "#"):
        # Old versions of the profiler recorded steps as operators.
        kind = "range"
    shapes = _shapes(args, known) if kind == "op" else None
    into = trace.python if kind == "python" else trace.host
    into.append(Host(kind, name, start, end, thread, correlation, external, shapes))


def _shapes(args: dict[str, Any], known: dict[str, Shapes]) -> Shapes | None:
    dims = args.get("Input Dims", args.get("Input dims"))
    if not isinstance(dims, list):
        return None
    types = args.get("Input type")
    key = f"{dims}{types}"
    if key not in known:
        sizes = tuple(tuple(n for n in _flat(dim) if n is not None) for dim in dims)
        names = tuple(str(kind) for kind in types) if isinstance(types, list) else ()
        known[key] = Shapes(sizes, names)
    return known[key]


def _flat(dim: Any) -> Iterable[int | None]:
    """The sizes of a tensor; empty for a list of tensors, which is a list of lists."""
    return [_whole(n) for n in dim] if isinstance(dim, list) and not any(isinstance(n, list) for n in dim) else []


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None
