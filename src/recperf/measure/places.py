"""Places in the user's program: the function, file and line that runs, from the stack of the step's thread. Torch-free.

A place is the innermost frame of the user's own files. A frame at one line during the whole step, such as the call of a
library's training loop, says nothing: where only such frames are the user's, the place is in the library that runs
inside it.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from threading import Lock, Thread, get_ident
from time import perf_counter_ns, thread_time_ns
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

HIDDEN, LIBRARY, USER = range(3)
"""Kinds of files: torch, recperf and the standard library; other installed packages; the user's own."""
SURROUNDS = 0.95
"""A frame at one line for this share of the time surrounds the step."""
FEWEST = 10
"""Samples that tell which frames surround the step; with fewer, its operators tell."""
COST = 0.01
"""Share of the time that sampling may cost."""
LEAST_NS, FIRST_NS = 1_000_000, 2_000_000
"""The shortest time between samples, and the first one, before the cost of a sample is known."""
SWITCH_NS = 500_000
"""While the sampler runs, a thread that interprets gives the interpreter away after this time; only a C function keeps
it longer. By default it would keep it for 5 ms, or until its next operator, which would then get its time."""
NO_FILE = -1
ROOT = str(Path(__file__).parents[1])
BACKWARD = (0, 0)
"""Begins the stack of what autograd runs in its backward pass, where no Python function of the program is inside."""
_WRAPPERS = ("torch/_dynamo/eval_frame.py", "torch/_compile.py")

Position = tuple[int, int]
"""The identity of a code object and the offset of an instruction in it."""


class Place(NamedTuple):
    function: str
    file: str
    """Relative to the working directory, or to the folder from which it is imported."""
    line: int
    backward: bool = False
    """Whether it is the backward pass of what this line computes."""


class Frame(NamedTuple):
    kind: int
    package: str
    place: Place


def place_text(place: Mapping[str, Any] | None, *, width: int = 0, short: bool = False) -> str:
    """A place, such as `model.py:41 in forward`; if it is longer than `width`, without some of its folders; `short`
    without folders and function."""
    if place is None:
        return ""
    before, file = "backward of " if place["backward"] else "", str(place["file"])
    after = f":{place['line']}" + ("" if short else f" in {place['function']}")
    while "/" in file and (short or len(before + file + after) > width > 0):
        file = file.partition("/")[2]
    return before + file + after


Stack = tuple[Frame, ...]
"""The frames of users and libraries, outermost first."""


def place_in(stack: Stack, around: Stack) -> Place | None:
    """The place of a stack, given the frames around the whole step."""
    shared = 0
    while shared < min(len(stack), len(around)) and stack[shared] == around[shared]:
        shared += 1
    for part in (stack[shared:], stack):
        users = [frame for frame in part if frame.kind == USER]
        inside = users or [frame for frame in part if frame.package == part[0].package]
        if inside:
            return inside[-1].place
    return None


def surrounding(weights: Mapping[Stack, float], end: Stack | None = None) -> Stack:
    """The outermost frames that nearly all of the time is in; with `end`, the stack at the end of a step, only those
    that are in it too."""
    around: Stack = ()
    while True:
        depth = len(around)
        following: defaultdict[Frame, float] = defaultdict(float)
        for stack, weight in weights.items():
            if len(stack) > depth and stack[:depth] == around:
                following[stack[depth]] += weight
        frame = max(following, key=lambda frame: following[frame], default=None)
        if frame is None or following[frame] < SURROUNDS * sum(weights.values()):
            return around
        if end is not None and end[depth : depth + 1] != (frame,):
            return around
        around = (*around, frame)


class Stacks:
    """Reads stacks of Python frames. With `own`, the program is one of recperf's workloads."""

    def __init__(self, *, own: bool = False) -> None:
        measuring = [f"{ROOT}/{room}/" for room in ("measure", "execution", "cli")]
        self._hidden = (*_torch(), *(measuring if own else [f"{ROOT}/"]))
        self._kinds: dict[str, int] = {}
        self._codes: dict[int, CodeType] = {}
        self._known: dict[tuple[Position, ...], Stack] = {}

    def of(self, frame: FrameType | None) -> tuple[Position, ...]:
        """The positions in files of users and libraries, innermost first."""
        positions: list[Position] = []
        while frame is not None:
            code = frame.f_code
            kind = self._kinds.get(code.co_filename)
            if kind is None:
                kind = self._kinds[code.co_filename] = self.kind(code.co_filename)
            if kind:
                self._codes[id(code)] = code
                positions.append((id(code), frame.f_lasti))
            elif not positions and code.co_name == "_engine_run_backward":
                positions.append(BACKWARD)
            frame = frame.f_back
        return tuple(positions)

    def position(self, frame: FrameType) -> Position:
        """Where this frame is, whoever its file belongs to, without what torch puts around dispatch modes."""
        while frame.f_back is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
            frame = frame.f_back
        self._codes[id(frame.f_code)] = frame.f_code
        return id(frame.f_code), frame.f_lasti

    def code(self, identity: int) -> CodeType:
        return self._codes[identity]

    def stack(self, positions: tuple[Position, ...]) -> Stack:
        if positions not in self._known:
            outer_first = reversed(positions[positions[:1] == (BACKWARD,) :])
            self._known[positions] = tuple(self._frame(*position) for position in outer_first)
        return self._known[positions]

    def kind(self, file: str) -> int:
        if file.startswith("<"):
            return USER if file.startswith(("<ipython", "<stdin")) else HIDDEN
        if file.startswith(self._hidden) or "torchinductor" in file:
            return HIDDEN
        if any(f"/{folder}/" in file for folder in ("site-packages", "dist-packages")):
            return LIBRARY
        return HIDDEN if file.startswith(_standard()) else USER

    def _frame(self, identity: int, offset: int) -> Frame:
        code = self._codes[identity]
        lines = (line for start, end, line in code.co_lines() if line and start <= offset < end)
        kind = self.kind(code.co_filename)
        file = _relative(code.co_filename, to_folder=kind == USER)
        return Frame(kind, file.partition("/")[0], Place(code.co_name, file, next(lines, code.co_firstlineno)))


def _torch() -> list[str]:
    specs = [find_spec(name) for name in ("torch", "triton")]
    return [f"{Path(spec.origin).parent}/" for spec in specs if spec and spec.origin]


@lru_cache(maxsize=1)
def _standard() -> tuple[str, ...]:
    return tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))


def _relative(file: str, *, to_folder: bool) -> str:
    """The path from the working directory, if it is beneath that, or from the folder of the import path."""
    folders = sorted((folder for folder in sys.path if folder not in ("", "/")), key=len, reverse=True)
    for folder in ([str(Path.cwd())] if to_folder else []) + folders:
        if file.startswith(f"{folder.rstrip('/')}/"):
            return file[len(folder.rstrip("/")) + 1 :]
    return file


@lru_cache
def _compiled(package: str) -> bool:
    """Whether a package has modules in C."""
    loaded = (module for name, module in list(sys.modules.items()) if f"{name}.".startswith(f"{package}."))
    return any(str(getattr(module, "__file__", "")).endswith((".so", ".pyd")) for module in loaded)


def _packages(frame: FrameType) -> dict[str, str]:
    """The packages of the values that a frame names."""
    code, packages = frame.f_code, {}
    for name in (*code.co_names, *code.co_varnames, *code.co_freevars):
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        packages[name] = str(owner or type(value).__module__).partition(".")[0]
    return packages


def _in_c(late: int) -> bool:
    """Whether a thread that gave the interpreter to the sampler so late was in a C function: one that works without
    it, or one that keeps it. A thread that interprets gives it away after the time set for that."""
    return not 0.5 * SWITCH_NS < late < 2 * SWITCH_NS


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        # Not Linux.
        return NO_FILE


def _content(file: int) -> bytes:
    try:
        return os.pread(file, 96, 0) if file != NO_FILE else b""
    except OSError:
        # The thread has ended.
        return b""


def _closed(file: int) -> None:
    if file != NO_FILE:
        os.close(file)


class _Sample(NamedTuple):
    """What was seen of the thread, and for how long it is taken to have been there."""

    waiting: str
    at: Position
    stack: tuple[Position, ...]
    wall: int
    late: int
    """ns that the sampler waited for the interpreter."""
    off: bool
    """Whether the thread was off the CPU, and not for want of a core."""


class Sampler:
    """A thread that looks at the stack of the step's thread. A sample counts for the time since the one before it: a C
    function that keeps the interpreter delays it.

    `waiting` returns what the step waits for: "input", "" for nothing.
    """

    def __init__(self, stacks: Stacks, waiting: Callable[[], str]) -> None:
        self.stacks, self._waiting = stacks, waiting
        self.kept: list[_Sample] = []
        self.wall_ns = self.cpu_ns = 0
        """Time in which the sampler was active, and what it took of it."""
        self._pending: list[_Sample] = []
        self._packages: dict[Position, dict[str, str]] = {}
        """The packages of the values that a position may use, by their names."""
        self._earliest, self._queued = SWITCH_NS, 0
        self._followed, self._state = 0, NO_FILE
        """The thread of the steps, and the file that tells whether it runs."""
        self._thread: Thread | None = None
        self._active = Lock()
        self._switch = 0.0

    def start(self) -> None:
        """Sample the calling thread from now on."""
        self.stop()
        self._followed = get_ident()
        self._state = _opened("/proc/thread-self/stat")
        # The first samples take far longer than others.
        for _ in range(3):
            self._take(sys._getframe(), 0, SWITCH_NS)
        self._pending, self._packages = [], {}
        self._active = Lock()
        self._active.acquire()
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch, SWITCH_NS / 1e9))
        self._thread = Thread(target=self._run, args=(self._active,), daemon=True, name="recperf sampler")
        self._thread.start()

    def keep(self) -> None:
        """The step has ended, and its samples count."""
        pending, self._pending = self._pending, []
        self.kept += pending

    def drop(self) -> None:
        self._pending = []

    def stop(self) -> None:
        if self._thread is not None:
            self._active.release()
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._switch)
            _closed(self._state)

    @property
    def cost(self) -> float:
        """Share of the sampled time that sampling took."""
        return self.cpu_ns / self.wall_ns if self.wall_ns else 0.0

    def _run(self, active: Any) -> None:
        costs = deque([round(FIRST_NS * COST)], maxlen=9)
        began = last = perf_counter_ns()
        earlier, due = self.cpu_ns, began + FIRST_NS
        schedule, self._queued = _opened("/proc/thread-self/schedstat"), 0
        while not active.acquire(timeout=max(0, due - perf_counter_ns()) / 1e9):
            now = perf_counter_ns()
            frame = sys._current_frames().get(self._followed)
            self._take(frame, now - last, now - due, schedule)
            last, spent = now, earlier + thread_time_ns()
            costs.append(spent - self.cpu_ns)
            self.cpu_ns = spent
            due = perf_counter_ns() + max(LEAST_NS, round(sorted(costs)[len(costs) // 2] / COST))
        self.wall_ns += perf_counter_ns() - began
        _closed(schedule)

    def _take(self, frame: FrameType | None, wall: int, late: int, schedule: int = NO_FILE) -> None:
        if frame is None:
            return
        # Reading a file lets the thread run on, so everything of its frames is read before.
        at, stack, waiting, packages = self.stacks.position(frame), self.stacks.of(frame), self._waiting(), {}
        if at not in self._packages and self.stacks.kind(frame.f_code.co_filename) == USER:
            packages = _packages(frame)
        self._earliest = min(self._earliest, late)
        late -= self._earliest
        if late > 0.5 * SWITCH_NS and schedule != NO_FILE:
            # What the sampler waited for a core, it did not wait for the interpreter.
            before, self._queued = self._queued, int(_content(schedule).split()[1])
            late = max(0, late - self._queued + before)
        state = _content(self._state).rpartition(b") ")[2] if late < 0.5 * SWITCH_NS else b""
        if packages and _in_c(late):
            self._packages[at] = packages
        self._pending.append(_Sample(waiting, at, stack, wall, late, state[:1] not in (b"", b"R")))

    def _package(self, sample: _Sample) -> str:
        """The package whose C code the thread ran; empty for the interpreter's own."""
        code, offset = self.stacks.code(sample.at[0]), sample.at[1]
        if self.stacks.kind(code.co_filename) != USER:
            package = _relative(code.co_filename, to_folder=False).partition("/")[0]
            return package if self._native(package) else ""
        line, end, column, end_column = next(islice(code.co_positions(), offset // 2, None), (None,) * 4)
        if line is None or line != end or not _in_c(sample.late):
            return ""
        names = re.findall(r"(?<![.\w])[A-Za-z_]\w*", linecache.getline(code.co_filename, line)[column:end_column])
        used = (self._packages.get(sample.at, {}).get(name, "") for name in names)
        return next((package for package in used if self._native(package)), "")

    def _native(self, package: str) -> bool:
        file = getattr(sys.modules.get(package), "__file__", None)
        return file is not None and self.stacks.kind(file) == LIBRARY and _compiled(package)

    def times(self, operators: Iterable[Position]) -> tuple[dict[str, dict[Stack, float]], dict[str, float]]:
        """Time by limit and stack, and that in C code by package; `operators` are the positions that call operators."""
        positions = set(operators)
        own = tuple(f"{ROOT}/{room}/" for room in ("ops", "measure", "execution"))
        limits: dict[str, defaultdict[Stack, float]] = {
            limit: defaultdict(float) for limit in ("python", "input", "blocked", "operator")
        }
        native: defaultdict[str, float] = defaultdict(float)
        for sample in self.kept:
            stack = self.stacks.stack(sample.stack)
            file = self.stacks.code(sample.at[0]).co_filename
            if sample.waiting:
                limits.setdefault(sample.waiting, defaultdict(float))[stack] += sample.wall
            elif sample.at in positions or "torchinductor" in file or file.startswith(own):
                # The operator ended the sampler's wait: until then the thread interpreted what is before it.
                before = min(sample.late, SWITCH_NS, sample.wall)
                limits["python"][stack] += before
                limits["operator"][stack] += sample.wall - before
            elif sample.off:
                limits["blocked"][stack] += sample.wall
            else:
                limits["python"][stack] += sample.wall
                if package := self._package(sample):
                    native[package] += sample.wall
        return {limit: dict(stacks) for limit, stacks in limits.items()}, dict(native)
