"""Samples the stacks of processes that a program starts: workers of its DataLoader, and others.

The function of a process is replaced by one that also runs a sampler. It writes what it saw to a file in a folder of
the profiled process, twice a second and at its end. Torch-free.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import wraps
from linecache import getline
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock, Thread, get_ident
from time import monotonic, perf_counter_ns, thread_time_ns
from types import FrameType
from typing import Any, cast

import msgspec

from ..jsonfile import Number, Struct
from .intervals import of_samples
from .places import LIBRARY, SWITCH_NS, Frame, Stacks, place_in
from .records import Children, ChildTime, Observed, Place, PlaceShare
from .trace.read import grouped

COST, FIRST_NS, LEAST_NS = 0.009, 10_000_000, 2_000_000
"""Share of the time that sampling may cost, and the time of the first sample and between two."""
MOST = 1000
"""Samples of a process: then its sampler ends."""
SECONDS = 0.5
"""Between two times that a process writes what it saw."""
PROMPT_NS = 0.5 * SWITCH_NS
FEWEST = 10
FETCH, LOADER = "_utils/fetch.py", "_worker_loop"
WORKERS = "DataLoader workers"


class Sample(Struct, array_like=True):
    stack: int
    """Number of the stack, or -1 where the process waited for work."""
    work: int
    """Number of the piece of work, such as a batch."""
    wall: Number
    off: bool


class Seen(Struct):
    """What the sampler of a process saw."""

    what: str
    stacks: list[list[Frame]]
    samples: list[Sample]


class ChildSamplers(ExitStack):
    """Inside its `with` block processes that are started are sampled."""

    def __init__(self, kind: type[Sampled] | None = None) -> None:
        super().__init__()
        self.kind = kind or Sampled
        self.folder = Path()

    def __enter__(self) -> ChildSamplers:
        super().__enter__()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="recperf-")))
        start = BaseProcess.start

        @wraps(start)
        def sampled(process: Any) -> None:
            if process._target is not None and not isinstance(process._target, Sampled):
                loads = getattr(process._target, "__name__", "") == LOADER
                process._target = (Sampled if loads else self.kind)(process._target, self.folder)
            start(process)

        BaseProcess.start = sampled  # type: ignore[assignment, method-assign]
        self.callback(setattr, BaseProcess, "start", start)
        self.callback(self._read)
        self.seen: list[Seen] = []
        """What the processes saw until the block ended."""
        self.ranks: list[bytes] = []
        """What those of them saw that were ranks."""
        return self

    def _read(self) -> None:
        self.ranks = [path.read_bytes() for path in sorted(self.folder.glob("*.rank"))]
        for path in sorted(self.folder.glob("*.json")):
            with suppress(OSError, msgspec.DecodeError):
                self.seen.append(msgspec.json.decode(path.read_bytes(), type=Seen))


class Sampled:
    """The function of a process, with a sampler beside it."""

    def __init__(self, target: Callable[..., Any], folder: Path) -> None:
        self.target, self.folder = target, folder

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        sampler = _Sampler(getattr(self.target, "__name__", type(self.target).__name__), self.folder)
        try:
            return self.target(*arguments, **named)
        finally:
            sampler.stop()


class _Sampler:
    def __init__(self, name: str, folder: Path) -> None:
        self._loader = name == LOADER
        self._seen = Seen(WORKERS if self._loader else name, [], [])
        self._file = folder / f"{os.getpid()}.json"
        self._stacks, self._numbers = Stacks(), dict[tuple[Any, ...], int]()
        self._followed, self._state = get_ident(), -1
        with suppress(OSError):
            self._state = os.open("/proc/thread-self/stat", os.O_RDONLY)
        self._work, self._fetch, self._earliest, self._queued = 0, 0, SWITCH_NS, 0
        self._active = Lock()
        self._active.acquire()
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch, SWITCH_NS / 1e9))
        self._thread = Thread(target=self._run, daemon=True, name="recperf sampler")
        self._thread.start()

    def stop(self) -> None:
        self._active.release()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        began, written = perf_counter_ns(), monotonic()
        last, due, self._queued = began, began + FIRST_NS, _queued()
        while not self._active.acquire(timeout=max(0, due - perf_counter_ns()) / 1e9):
            now = perf_counter_ns()
            frame = sys._current_frames().get(self._followed)
            if frame is None or len(self._seen.samples) >= MOST:
                break
            self._take(frame, now - last, now - due)
            last = now
            if monotonic() - written > SECONDS:
                self._write()
                written = monotonic()
            due = max(perf_counter_ns() + LEAST_NS, began + round(thread_time_ns() / COST))
        sys.setswitchinterval(self._switch)
        self._write()

    def _write(self) -> None:
        # The folder may be gone: the profile ended before the process.
        with suppress(OSError):
            part = self._file.with_suffix(".part")
            part.write_bytes(msgspec.json.encode(self._seen))
            part.replace(self._file)

    def _take(self, frame: FrameType, wall: int, late: int) -> None:
        # What the sampler waited for a core, it did not wait for the interpreter.
        queued, self._queued = self._queued, _queued()
        late = max(0, late - self._queued + queued)
        self._earliest = min(self._earliest, late)
        off = late - self._earliest < PROMPT_NS and self._is_off()
        positions, fetch, inside = list[FrameType](), 0, frame
        before, outer = frame, cast(FrameType | None, frame)
        while outer is not None and outer.f_code is not Sampled.__call__.__code__:
            if self._stacks.file(outer.f_code.co_filename)[0]:
                positions.append(outer)
            if outer.f_code.co_filename.endswith(FETCH):
                fetch, inside = id(outer), before
            before, outer = outer, outer.f_back
        if fetch and not positions:
            # Torch makes a batch of the rows: what it calls first says so.
            positions = [inside]
        if not positions or (self._loader and not fetch):
            self._fetch = 0
            self._seen.samples.append(Sample(-1, self._work, wall, off))
            return
        if not self._loader or fetch != self._fetch:
            self._fetch = fetch
            self._work += 1
        key = tuple((one.f_code, one.f_lineno) for one in positions)
        if key not in self._numbers:
            self._numbers[key] = len(self._seen.stacks)
            self._seen.stacks.append([self._frame(one) for one in reversed(positions)])
        self._seen.samples.append(Sample(self._numbers[key], self._work, wall, off))

    def _frame(self, frame: FrameType) -> Frame:
        kind, file = self._stacks.file(frame.f_code.co_filename)
        place = Place(frame.f_code.co_name, file, frame.f_lineno)
        return Frame(kind or LIBRARY, file.partition("/")[0], place)

    def _is_off(self) -> bool:
        try:
            return not os.pread(self._state, 64, 0).rpartition(b") ")[2].startswith(b"R")
        except OSError:
            return False


def _queued() -> int:
    """ns that this thread waited for a core, where the system tells."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def children_of(seen: Iterable[Seen]) -> list[Children]:
    """The lines of each kind of process, largest first; intervals from all samples of the kind while it works."""
    result = []
    for what, processes in grouped(seen, lambda one: one.what).items():
        busy: list[tuple[Place | None, bool, int, float]] = []
        whole = 0.0
        for number, process in enumerate(processes):
            whole += sum(sample.wall for sample in process.samples)
            for sample in process.samples:
                if sample.stack >= 0:
                    place = place_in(tuple(process.stacks[sample.stack]), ())
                    busy.append((place, sample.off, sample.work * len(processes) + number, float(sample.wall)))
        every = [one[2:] for one in busy]
        working = sum(wall for _, wall in every)
        if len(busy) < FEWEST:
            continue
        rows = []
        for place, inside in grouped(busy, lambda one: one[0]).items():
            if place is None:
                continue
            wall = sum(one[3] for one in inside)
            low, high = of_samples([one[2:] for one in inside], every)
            off = sum(one[3] for one in inside if one[1]) / wall if wall else 0.0
            fields = (place.function, place.file, place.line)
            rows.append(ChildTime(*fields, share=wall / working, low=low, high=high, samples=len(inside), off=off))
        rows.sort(key=lambda row: -row.share)
        result.append(Children(what, len(processes), len(busy), working / whole, rows))
    return result


def add_children(observed: Observed, children: list[Children]) -> None:
    """Add what processes did. Where the step waits for workers that are busy, it waits for their lines."""
    observed.children = children
    workers = next((one for one in children if one.what == WORKERS), None)
    if workers is None:
        return
    places = [row for row in observed.places if row.limit != "input"]
    for row in observed.places:
        if row.limit != "input":
            continue
        low, high = (row.share, row.share) if row.low is None or row.high is None else (row.low, row.high)
        ends = row.share, low, high
        for line in workers.lines:
            place, parts = Place(line.function, line.file, line.line), (line.share, line.low, line.high)
            share, low, high = (end * workers.busy * part for end, part in zip(ends, parts, strict=True))
            source = getline(place.file, place.line).strip()
            places.append(PlaceShare("input", share, place, source, low, min(1.0, high), line.samples))
        share, low, high = (end * (1 - workers.busy) for end in ends)
        places.append(PlaceShare("input", share, row.place, row.source, low, high, row.samples))
    observed.places = places
