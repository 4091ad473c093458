"""Reads a trace into compact records of host events and device work.

Times are microseconds as in the file. Events of unknown kinds are counted and ignored.
"""

from __future__ import annotations

import re
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
OWN_RANGES = "recperf."
"""Begins the names of the ranges that recperf records."""
MARK = "recperf.mark"
"""Ranges before the steps that end when all ranks have reached a barrier."""
ABOUT = "recperf"
"""Field of the header in which recperf writes rank, run and host."""
MERGED = "merged"
"""Field in that which lists the ranks of a merged trace."""


LARGEST_NUMBER = 1 << 62
ELEMENT_BYTES = {
    name: size
    for size, names in {
        16: ("c10::complex<double>",),
        8: ("double", "long", "long int", "c10::complex<float>"),
        4: ("float", "int"),
        2: ("half", "bfloat16", "c10::half", "c10::bfloat16", "short", "short int"),
        1: ("bool", "byte", "char", "signed char", "unsigned char", "c10::float8_e4m3fn", "c10::float8_e5m2"),
    }.items()
    for name in names
}
"""Bytes of an element by the profiler's name of its type."""
_DEPENDS = re.compile(r"aten::(?:embedding|.*conv|.*pool|sort|topk|cumsum|repeat|expand|index)")


class Shapes(NamedTuple):
    """Sizes and element types of an operator's inputs."""

    dims: tuple[tuple[int, ...], ...]
    """The sizes of every tensor; empty for other inputs."""
    types: tuple[str, ...]
    lists: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """The sizes of the tensors in every list of tensors, in the order of the lists."""
    numbers: tuple[tuple[int, ...], ...] = ()
    """The integers among the inputs, by position; recorded only for operators whose work depends on them."""


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
    sequence: int | None = None
    """Connects an operator with the operator of the backward pass that autograd recorded for it."""


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
    untimed: int = 0
    """Number of those of known kinds, whose times are not valid."""


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
        start, length = number_of(event.get("ts")), number_of(event.get("dur", 0))
        if kind is None or start is None or length is None or length < 0:
            trace.ignored += 1
            trace.untimed += kind is not None
            continue
        _add(trace, event, kind, start, start + length, known)
    return trace


def _add(trace: Trace, event: dict[str, Any], kind: str, start: float, end: float, known: dict[str, Shapes]) -> None:
    args: dict[str, Any] = event["args"] if isinstance(event.get("args"), dict) else {}
    name = intern(str(event.get("name", "")))
    correlation = whole_of(args.get("correlation"))
    external = whole_of(args.get("External id", args.get("external id")))
    if kind in DEVICE:
        place = whole_of(args.get("device", event.get("pid"))) or 0
        stream = whole_of(args.get("stream", event.get("tid"))) or 0
        size = whole_of(args.get("bytes", args.get("Bytes"))) or _message_bytes(args)
        trace.device.append(Device(kind, name, start, end, place, stream, correlation, external, size))
        return
    thread = intern(f"{event.get('pid')}/{event.get('tid')}")
    if kind == "op" and name.startswith((STEP_OF_TORCH + "#", OWN_RANGES)):
        # Old versions of the profiler recorded steps as operators; ranges that cost little are recorded so too.
        kind = "range"
    shapes = _shapes(name, args, known) if kind in ("op", "range") else None
    sequence = whole_of(args.get("Sequence number"))
    into = trace.python if kind == "python" else trace.host
    into.append(Host(kind, name, start, end, thread, correlation, external, shapes, sequence))


def _shapes(name: str, args: dict[str, Any], known: dict[str, Shapes]) -> Shapes | None:
    dims = args.get("Input Dims", args.get("Input dims"))
    if not isinstance(dims, list):
        return None
    types, inputs = args.get("Input type"), args.get("Concrete Inputs")
    # Other operators have inputs that differ from call to call, such as the rate of an optimizer.
    numbers = inputs if isinstance(inputs, list) and _DEPENDS.match(name) else []
    key = f"{dims}{types}{numbers}"
    if key not in known:
        lists = (dim for dim in dims if isinstance(dim, list) and any(isinstance(n, list) for n in dim))
        known[key] = Shapes(
            tuple(_sizes(dim) for dim in dims),
            tuple(str(kind) for kind in types) if isinstance(types, list) else (),
            tuple(tuple(_sizes(dim) for dim in tensors) for tensors in lists),
            tuple(tuple(map(int, re.findall(r"-?\d{1,18}", str(value))))[:8] for value in numbers),
        )
    return known[key]


def _sizes(dim: Any) -> tuple[int, ...]:
    """The sizes of a tensor; empty for a list of tensors, which is a list of lists."""
    if not isinstance(dim, list) or any(isinstance(n, list) for n in dim):
        return ()
    return tuple(size for n in dim if (size := whole_of(n)) is not None and size >= 0)


def _message_bytes(args: dict[str, Any]) -> int:
    """The bytes that a kernel of a collective sends."""
    count = whole_of(args.get("In msg nelems")) or 0
    return max(0, count) * ELEMENT_BYTES.get(str(args.get("dtype")).lower(), 0)


def number_of(value: Any) -> float | None:
    """A number of a trace; None if it is none, or so large that sums would overflow."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    # NaN is not smaller than anything.
    return number if abs(number) < LARGEST_NUMBER else None


def whole_of(value: Any) -> int | None:
    """The same as an integer."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < LARGEST_NUMBER else None
