"""A trace as compact records: what the host did, what the device did, and which call started what.

Times are microseconds as the file gives them. Events that are none of ours to explain are counted and left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from .scan import LARGEST, Scan

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
"""The profiler's categories, those of its first years too, lower-cased, and what they are to us."""

SILENT = {"gpu_user_annotation", "trace", "overhead", "cuda_sync", "cuda_profiler_range"}
"""The profiler's own, which repeat what other events say."""
DEVICE = ("kernel", "copy", "set")
STEP_OF_TORCH = "ProfilerStep"
MARK = "recperf.mark"
"""Ranges before the steps that end when all ranks have come."""
ABOUT = "recperf"
"""Where in its header a trace of ours says whose it is."""


class Shapes(NamedTuple):
    """The inputs of an operator: sizes and element types, in order."""

    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]


class Host(NamedTuple):
    """A stretch of one host thread: an operator, a named range, a call into the device's runtime, a Python frame."""

    kind: str
    name: str
    start: float
    end: float
    thread: str
    correlation: int | None
    external: int | None
    shapes: Shapes | None


class Device(NamedTuple):
    """A stretch of one stream: a kernel, a copy or a fill."""

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
    """What a file held."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    """What stands beside the events: versions, the devices' properties."""
    host: list[Host] = field(default_factory=list)
    """Operators, ranges and calls."""
    python: list[Host] = field(default_factory=list)
    """Python frames, where the program recorded stacks."""
    device: list[Device] = field(default_factory=list)
    events: int = 0
    """Events in the file."""
    ignored: int = 0
    """Of those, stretches of time of unknown kinds, or without usable times."""


def read(path: Path, *, largest: int = LARGEST) -> Trace:
    """Load a trace: a `.json` or `.json.gz` of torch.profiler, or any Chrome trace, of which less will be known."""
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
        _sort(trace, event, kind, start, start + length, known)
    return trace


def _sort(trace: Trace, event: dict[str, Any], kind: str, start: float, end: float, known: dict[str, Shapes]) -> None:
    given = event.get("args")
    args: dict[str, Any] = given if isinstance(given, dict) else {}
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
        # The first versions of the profiler booked steps as operators.
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
    """One tensor's sizes; a list of tensors stands as a list of lists, whose sizes are not those of one tensor."""
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
