"""Samples the stack of the step's thread: where Python, input and waits take their time, and which C code."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from threading import Lock, Thread, get_ident
from time import perf_counter_ns, sleep, thread_time_ns
from types import BuiltinFunctionType, FrameType, ModuleType
from typing import Any, NamedTuple

from .clocks import ThreadClock
from .places import LIBRARY, OPERATOR, ROOT, SWITCH_NS, USER, Position, Stack, Stacks

COST = 0.009
"""Share of the time that sampling may cost before the next sample; with the last one it stays below 1 %."""
LEAST_NS, FIRST_NS = 1_000_000, 10_000_000
"""The shortest time between samples, and the time of the first one, whose cost is not known before."""
PROMPT, LONG = 0.5 * SWITCH_NS, 2 * SWITCH_NS
"""A sampler that waits less for the interpreter found the thread in a C function that works without it, or off the CPU;
one that waits longer, in a C function that keeps it."""
MET = 3
"""Samples that show that a function works for long without the interpreter."""
OPERATORS = tuple(f"{ROOT}/{room}/" for room in ("ops", "measure", "execution"))
"""Files whose samples count as operators."""


class _Sample(NamedTuple):
    waiting: str
    at: Position
    stack: tuple[Position, ...]
    wall: int
    """ns since the sample before, for which it counts: a C function that keeps the interpreter delays it."""
    late: int
    """ns that the sampler waited for the interpreter."""
    off: bool
    """Whether the thread was off the CPU, and not for want of a core."""
    passing: bool = False
    """Whether the thread went on at once: it only gave the interpreter away for a moment."""
    step: int = 0


class SampledTime(NamedTuple):
    """Time that a sample stands for."""

    limit: str
    """What the thread did: a limit, `ranks`, or OPERATOR where it was in operators."""
    stack: Stack
    step: int
    ns: int
    counts: bool = True
    """Whether the sample itself is counted here: the time of one may be divided."""


class StackSampler:
    """A thread that looks at the stack of another; `waiting` returns what that waits for, "" for nothing."""

    def __init__(self, stacks: Stacks, waiting: Callable[[], str]) -> None:
        self.stacks, self._waiting = stacks, waiting
        self.samples: list[_Sample] = []
        self.wall_ns = self.cpu_ns = 0
        """Time in which the sampler was active, and what it took of it."""
        self._pending: list[_Sample] = []
        self._step = 0
        self._packages: dict[Position, dict[str, str]] = {}
        """The packages of the values that a position may use, by their names."""
        self._thread: Thread | None = None
        self._active = Lock()
        self._earliest, self._switch = SWITCH_NS, 0.0
        self._followed, self._state, self._queued = 0, -1, 0
        """The thread of the steps, the file that tells whether it runs, and what the sampler waited for a core."""

    def start(self) -> None:
        """Sample the calling thread from now on."""
        self.stop()
        self._followed = get_ident()
        with suppress(OSError):
            self._state = os.open("/proc/thread-self/stat", os.O_RDONLY)
        # The first samples take far longer than others.
        for _ in range(3):
            self._take(sys._getframe(), 0, SWITCH_NS, None)
        self._pending, self._packages = [], {}
        self._active = Lock()
        self._active.acquire()
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch, SWITCH_NS / 1e9))
        self._thread = Thread(target=self._run, args=(self._active,), daemon=True, name="recperf sampler")
        self._thread.start()

    def end_step(self, *, keep: bool) -> None:
        """The samples of the step count, or they do not."""
        pending, self._pending = self._pending, []
        self._step += 1
        self.samples += pending if keep else []

    def stop(self) -> None:
        if self._thread is not None:
            self._active.release()
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._switch)
            with suppress(OSError):
                os.close(self._state)
            self._state = -1

    @property
    def cost(self) -> float:
        """Share of the sampled time that sampling took."""
        return self.cpu_ns / self.wall_ns if self.wall_ns else 0.0

    def _run(self, active: Any) -> None:
        clock, began, earlier, self._queued = ThreadClock(), perf_counter_ns(), self.cpu_ns, 0
        last, due = began, began + FIRST_NS
        while not active.acquire(timeout=max(0, due - perf_counter_ns()) / 1e9):
            now = perf_counter_ns()
            self._take(sys._current_frames().get(self._followed), now - last, now - due, clock)
            last, self.cpu_ns = now, earlier + thread_time_ns()
            due = max(perf_counter_ns() + LEAST_NS, began + round(thread_time_ns() / COST))
        self.wall_ns += perf_counter_ns() - began
        clock.close()

    def _take(self, frame: FrameType | None, wall: int, late: int, clock: ThreadClock | None) -> None:
        if frame is None:
            return
        # Reading a file lets the thread run on, so everything of its frames is read before.
        at, stack, waiting = self.stacks.position(frame), self.stacks.of(frame), self._waiting()
        if at not in self._packages and self.stacks.file(frame.f_code.co_filename)[0] == USER:
            self._packages[at] = _packages(frame)
        self._earliest = min(self._earliest, late)
        late -= self._earliest
        if late > PROMPT and clock is not None:
            # What the sampler waited for a core, it did not wait for the interpreter.
            before, self._queued = self._queued, clock.now().waiting
            late = max(0, late - self._queued + before)
        off = late < PROMPT and self._is_off()
        passing = False
        if late < PROMPT and not off and clock is not None:
            # Such a thread is in a function that works without the interpreter for long, or only for an instant.
            sleep(0)
            passing = self.stacks.position(frame) != at
        self._pending.append(_Sample(waiting, at, stack, wall, late, off, passing, self._step))

    def _is_off(self) -> bool:
        try:
            return not os.pread(self._state, 64, 0).rpartition(b") ")[2].startswith(b"R")
        except OSError:
            # Not Linux, or the thread has ended.
            return False

    def times(self, operators: Iterable[Position]) -> tuple[list[SampledTime], dict[str, float]]:
        """What the samples stand for, and the time in C code by package; `operators` are the positions that call
        operators."""
        times: list[SampledTime] = []
        native: defaultdict[str, float] = defaultdict(float)
        positions = set(operators)
        # A thread that lost its core looks as if it stayed: a function that takes long is met again.
        stayed = Counter(sample.at for sample in self.samples if not sample.passing)
        for sample in self.samples:
            stack, file = self.stacks.stack(sample.stack), self.stacks.code(sample.at).co_filename
            if sample.waiting:
                times.append(SampledTime(sample.waiting, stack, sample.step, sample.wall))
            elif (
                sample.passing
                or (sample.late < PROMPT and not sample.off and stayed[sample.at] < MET)
                or sample.at in positions
                or "torchinductor" in file
                or file.startswith(OPERATORS)
            ):
                # The operator ended the sampler's wait: until then the thread interpreted what is before it.
                before = min(sample.late, SWITCH_NS, sample.wall)
                times.append(SampledTime("python", stack, sample.step, before))
                times.append(SampledTime(OPERATOR, stack, sample.step, sample.wall - before, counts=False))
            else:
                times.append(SampledTime("blocked" if sample.off else "python", stack, sample.step, sample.wall))
                native["" if sample.off else self._package(sample)] += sample.wall
        native.pop("", None)
        return times, dict(native)

    def _package(self, sample: _Sample) -> str:
        """The package whose C code the thread ran; empty for the interpreter's own."""
        code = self.stacks.code(sample.at)
        kind, file = self.stacks.file(code.co_filename)
        if kind != USER:
            return file.partition("/")[0] if self._native(file.partition("/")[0]) else ""
        line, end, column, end_column = next(islice(code.co_positions(), sample.at[1] // 2, None), (None,) * 4)
        if line is None or line != end or PROMPT < sample.late < LONG:
            return ""
        names = re.findall(r"(?<![.\w])[A-Za-z_]\w*", linecache.getline(code.co_filename, line)[column:end_column])
        used = (self._packages.get(sample.at, {}).get(name, "") for name in names)
        return next((package for package in used if self._native(package)), "")

    def _native(self, package: str) -> bool:
        path = getattr(sys.modules.get(package), "__file__", None)
        return path is not None and self.stacks.file(path)[0] == LIBRARY and _compiled(package)


def _packages(frame: FrameType) -> dict[str, str]:
    """The packages of the values that a frame names."""
    packages = {}
    for name in (*frame.f_code.co_names, *frame.f_code.co_varnames, *frame.f_code.co_freevars):
        value: Any = frame.f_locals.get(name, frame.f_globals.get(name))
        # Nothing of the value itself is asked: that may run code of the program.
        owner = value.__name__ if issubclass(type(value), ModuleType) else type(value).__module__
        packages[name] = str(value.__module__ if type(value) is BuiltinFunctionType else owner).partition(".")[0]
    return packages


@lru_cache
def _compiled(package: str) -> bool:
    """Whether a package has modules in C."""
    loaded = (module for name, module in list(sys.modules.items()) if f"{name}.".startswith(f"{package}."))
    return any(str(getattr(module, "__file__", "")).endswith((".so", ".pyd")) for module in loaded)
