"""Reads a trace into compact records of host events and device work.

Times are microseconds as in the file. Events of unknown kinds are counted and ignored.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ...errors import DataError
from .file import Scan

K = TypeVar("K")
T = TypeVar("T")
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
STEP = "recperf.step"
PART = "recperf.part."
MODULE_OF_TORCH = "nn.Module: "
"""Begins the frame that torch records around the forward pass of a module, where it records stacks."""
ABOUT = "recperf"
"""Field of the header in which recperf writes rank, run and host."""
MERGED = "merged"
"""Field in that which lists the ranks of a merged trace."""
MOST = 3_000_000
"""Events held in memory, for which the analysis needs about 2 GB; of a longer trace the first steps are read."""
TEXT = 256
"""Characters of names and shapes that take as much memory as an event."""
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
_STEP = re.compile(rf"(?:{re.escape(STEP)}|{STEP_OF_TORCH}|Optimizer\.step)#")
_DEPENDS = re.compile(r"aten::(?:_?embedding|.*conv|.*pool|sort|topk|cumsum|repeat|expand|index)|fbgemm::.*embedding")
SPARSE = "sparse"
"""Stands for the type of a sparse tensor: its sizes are those of the whole, how much of it there is is not recorded."""


class TracedShapes(NamedTuple):
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
    shapes: TracedShapes | None
    sequence: int | None = None
    """Connects an operator with the operator of the backward pass that autograd recorded for it."""


class TracedDevice(NamedTuple):
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
    device: list[TracedDevice] = field(default_factory=list)
    events: int = 0
    """Number of events in the file."""
    ignored: int = 0
    """Number of timed events of unknown kinds or without valid times."""
    untimed: int = 0
    """Number of those of known kinds, whose times are not valid."""
    part: str = ""
    """Which steps were read, where not all; empty where all were."""


class _Texts(dict[str, str]):
    """Every name once, and every combination of shapes, with the number of their characters."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, TracedShapes] = {}
        self.characters = 0

    def __missing__(self, text: str) -> str:
        self.characters += len(text)
        self[text] = text
        return text


class _Reading:
    """Collects events. If there are more than `most`, only those that tell where steps end.

    With `end` only what the host began before that time and what the device did for it; with `late` device work is
    looked for until then.
    """

    def __init__(
        self, path: Path, most: float = math.inf, *, end: float = math.inf, late: float = math.inf, frames: bool = True
    ) -> None:
        self.trace, self.most, self.end, self.late, self.frames = Trace(path=path), most, end, late, frames
        self.whole = True
        self.work = self.python = 0
        """Numbers of Python frames and of other events."""
        self._texts = _Texts()

    def add(self, event: dict[str, Any], kind: str, start: float, end: float) -> None:
        if kind == "python":
            self.python += 1
        else:
            self.work += 1
        if start >= (self.late if kind in DEVICE else self.end) or (kind == "python" and not self.frames):
            return
        if not self.whole and (kind not in ("op", "range") or not _STEP.match(str(event.get("name", "")))):
            return
        trace = self.trace
        _add(trace, event, kind, start, end, self._texts)
        held = len(trace.host) + len(trace.python) + len(trace.device) + self._texts.characters // TEXT
        if held > self.most:
            if not self.whole:
                raise _too_many(trace.path, "steps", self.most)
            self.whole, self._texts = False, _Texts()
            trace.host = [event for event in trace.host if _STEP.match(event.name)]
            trace.python, trace.device = [], []

    def first_steps(self) -> tuple[_Reading, str]:
        """How to read as many of the first steps as fit, and what to say about it."""
        trace = self.trace
        steps = find_steps(trace.host) or optimizer_steps(trace.host)
        ends = [step.end for step in steps]
        for frames in (True, False):
            # Steps are taken for equally long; reading them allows for twice the events.
            count = int(0.9 * self.most * len(steps) / (self.work + frames * self.python))
            if count:
                break
        else:
            raise _too_many(trace.path, "events in a step" if steps else "events and no steps", self.most)
        frames = frames or not self.python
        # The device may be behind the host by as many steps again.
        late = ends[min(2 * count, len(ends)) - 1]
        text = f"the first {count:,} of {len(ends):,} steps were read, since the trace has {trace.events:,} events"
        return (
            _Reading(trace.path, 2 * self.most, end=ends[count - 1], late=late, frames=frames),
            text + ("" if frames else "; its Python frames were left out"),
        )


def read(path: Path, *, most: int = MOST) -> Trace:
    """Load a `.json` or `.json.gz` trace of torch.profiler, or any Chrome trace, which gives fewer details."""
    scan = Scan(Path(path))
    reading = _Reading(scan.path, most)
    trace = collect(scan.events(), scan.path, reading)
    if not reading.whole:
        events, ignored, untimed = trace.events, trace.ignored, trace.untimed
        reading, text = reading.first_steps()
        trace = collect(Scan(scan.path).events(), scan.path, reading)
        if not reading.whole:
            raise _too_many(scan.path, "events in the first steps", most)
        launched = {event.correlation for event in trace.host if event.kind == "call"}
        trace.device = [work for work in trace.device if work.start < reading.end or work.correlation in launched]
        trace.events, trace.ignored, trace.untimed, trace.part = events, ignored, untimed, text
    trace.header = scan.header
    return trace


def _too_many(path: Path, what: str, most: float) -> DataError:
    return DataError(
        f"the trace has more than {most:,} {what}",
        where={"file": path},
        fix="record fewer steps, and call the profiler's step() after each; leave stacks out",
    )


def collect(events: Iterable[dict[str, Any]], path: Path, reading: _Reading | None = None) -> Trace:
    reading = reading or _Reading(path)
    trace = reading.trace
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
        reading.add(event, kind, start, start + length)
    return trace


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a key, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def summed(amounts: Iterable[tuple[K, float]]) -> defaultdict[K, float]:
    """The sum of the amounts of each key."""
    sums: defaultdict[K, float] = defaultdict(float)
    for key, amount in amounts:
        sums[key] += amount
    return sums


def _ranges(host: Iterable[Host], pattern: str) -> list[Host]:
    """The ranges whose names begin so, in order of time, of the thread that has most of them."""
    threads = grouped((e for e in host if e.kind == "range" and re.match(pattern, e.name)), lambda event: event.thread)
    most = max(threads.values(), key=len) if threads else []
    return sorted(most, key=lambda event: event.start)


def find_steps(host: Iterable[Host]) -> list[Host]:
    """The steps in order of time; ours are preferred to torch's own."""
    return _ranges(host, rf"{re.escape(STEP)}#\d+$") or _ranges(host, rf"{STEP_OF_TORCH}#\d+$")


def optimizer_steps(host: list[Host]) -> list[Host]:
    """Steps of a program that names none: each ends where the step of its last optimizer ends."""
    # Torch records a range around the step of an optimizer.
    ranges = _ranges(host, r"Optimizer\.step#")
    if not ranges:
        return []
    ends = [event for event in ranges if event.name == ranges[-1].name]
    begin = min(event.start for event in host if event.thread == ends[0].thread)
    starts = [begin, *(event.end for event in ends)]
    return [
        event._replace(name=f"{STEP_OF_TORCH}#{number}", start=start)
        for number, (start, event) in enumerate(zip(starts, ends))
    ]


def _add(trace: Trace, event: dict[str, Any], kind: str, start: float, end: float, texts: _Texts) -> None:
    args: dict[str, Any] = event["args"] if isinstance(event.get("args"), dict) else {}
    name = texts[str(event.get("name", ""))]
    correlation = whole_of(args.get("correlation"))
    external = whole_of(args.get("External id", args.get("external id")))
    if kind in DEVICE:
        place = whole_of(args.get("device", event.get("pid"))) or 0
        stream = whole_of(args.get("stream", event.get("tid"))) or 0
        size = whole_of(args.get("bytes", args.get("Bytes"))) or _message_bytes(args)
        trace.device.append(TracedDevice(kind, name, start, end, place, stream, correlation, external, size))
        return
    thread = texts[f"{event.get('pid')}/{event.get('tid')}"]
    if kind == "op" and name.startswith((STEP_OF_TORCH + "#", OWN_RANGES)):
        # Old versions of the profiler recorded steps as operators; ranges that cost little are recorded so too.
        kind = "range"
    shapes = _shapes(name, args, texts) if kind in ("op", "range") else None
    sequence = whole_of(args.get("Sequence number"))
    into = trace.python if kind == "python" else trace.host
    into.append(Host(kind, name, start, end, thread, correlation, external, shapes, sequence))
    if kind == "python" and name.startswith(MODULE_OF_TORCH):
        module = texts[name.removeprefix(MODULE_OF_TORCH)]
        trace.host.append(Host("range", module, start, end, thread, None, None, None))


def _shapes(name: str, args: dict[str, Any], texts: _Texts) -> TracedShapes | None:
    dims = args.get("Input Dims", args.get("Input dims"))
    if not isinstance(dims, list):
        return None
    types, inputs = args.get("Input type"), args.get("Concrete Inputs")
    # Other operators have inputs that differ from call to call, such as the rate of an optimizer.
    numbers = inputs if isinstance(inputs, list) and _DEPENDS.match(name) else []
    strides = args.get("Input Strides")
    if isinstance(strides, list) and isinstance(types, list) and len(strides) == len(types) == len(dims):
        types = [SPARSE if dim and not stride else kind for dim, stride, kind in zip(dims, strides, types)]
    key, known = texts[f"{dims}{types}{numbers}"], texts.shapes
    if key not in known:
        lists = (dim for dim in dims if isinstance(dim, list) and any(isinstance(n, list) for n in dim))
        known[key] = TracedShapes(
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


def facts_in(header: dict[str, Any], field: str = ABOUT) -> dict[str, Any]:
    """An object in the header of a trace; empty where there is none."""
    facts = header.get(field)
    return facts if isinstance(facts, dict) else {}


def rank_in(header: dict[str, Any]) -> tuple[int | None, int | None]:
    """The rank of a trace and the number of ranks, as recperf or torch writes them into its header."""
    ours, torchs = facts_in(header), facts_in(header, "distributedInfo")
    rank, ranks = ours.get("rank", torchs.get("rank")), ours.get("ranks", torchs.get("world_size"))
    return rank if isinstance(rank, int) else None, whole_of(ranks)


def number_of(value: Any) -> float | None:
    """A number of a trace; None if it is none, or so large that sums would overflow."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    # NaN is not smaller than anything.
    return number if abs(number) < LARGEST_NUMBER else None


def whole_of(value: Any) -> int | None:
    """An integer of a trace; None if it is none, or too large."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < LARGEST_NUMBER else None
