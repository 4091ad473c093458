"""Places in the user's program: the function, file and line that runs, from Python stacks. Torch-free.

A place is the innermost frame of the user's own files. A frame at one line during the whole step, such as the call of a
library's training loop, says nothing: where only such frames are the user's, the place is in the library inside it.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from .records import Place

HIDDEN, LIBRARY, USER = range(3)
"""Kinds of files: torch, recperf and the standard library; other installed packages; the user's own."""
SURROUNDS = 0.95
"""A frame at one line for this share of the time surrounds the step."""
ROOT = str(Path(__file__).parents[1])
OPERATOR = "operators"
"""What a sampled thread did that was in operators."""
SWITCH_NS = 500_000
"""While the sampler runs, a thread that interprets gives the interpreter away after this time; only a C function keeps
it longer. By default it would keep it for 5 ms, or until its next operator, which would then get its time."""
BACKWARD = (0, 0)
"""Begins the stack of what autograd runs in its backward pass, where no Python function of the program is inside."""
_WRAPPERS = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "recperf/measure/counting.py")

Position = tuple[int, int]
"""The identity of a code object and the offset of an instruction in it."""


class Frame(NamedTuple):
    kind: int
    package: str
    place: Place


Stack = tuple[Frame, ...]
"""The frames of users and libraries, outermost first."""


def place_text(place: Place | None, *, width: int = 0, short: bool = False) -> str:
    """A place, such as `model.py:41 in forward`. Beyond `width` it loses folders; `short` has none, and no function."""
    if place is None:
        return ""
    before, file = "backward of " if place.backward else "", place.file
    after = f":{place.line}" + ("" if short else f" in {place.function}")
    while "/" in file.removeprefix("…/") and (short or len(before + file + after) > width > 0):
        file = "…/" + file.removeprefix("…/").partition("/")[2]
    return before + (file.removeprefix("…/") if short else file) + after


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
        specs = [find_spec(name) for name in ("torch", "triton")]
        rooms = [f"{ROOT}/{room}" for room in (("measure/", "execution/", "cli/", "__main__") if own else ("",))]
        self._hidden = (*(f"{Path(spec.origin).parent}/" for spec in specs if spec and spec.origin), *rooms)
        self._standard = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
        self._files: dict[str, tuple[int, str]] = {}
        self._codes: dict[int, CodeType] = {}
        self._known: dict[tuple[Position, ...], Stack] = {}

    def of(self, frame: FrameType | None) -> tuple[Position, ...]:
        """The positions in files of users and libraries, innermost first."""
        positions: list[Position] = []
        while frame is not None:
            code = frame.f_code
            kind, _ = self._files.get(code.co_filename) or self.file(code.co_filename)
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

    def code(self, position: Position) -> CodeType:
        return self._codes[position[0]]

    def stack(self, positions: tuple[Position, ...]) -> Stack:
        if positions not in self._known:
            outer_first = reversed(positions[positions[:1] == (BACKWARD,) :])
            self._known[positions] = tuple(self._frame(position) for position in outer_first)
        return self._known[positions]

    def _frame(self, position: Position) -> Frame:
        code = self.code(position)
        lines = (line for start, end, line in code.co_lines() if line and start <= position[1] < end)
        kind, file = self.file(code.co_filename)
        return Frame(kind, file.partition("/")[0], Place(code.co_name, file, next(lines, code.co_firstlineno)))

    def file(self, path: str) -> tuple[int, str]:
        """The kind of a file, and its path from the working directory or the folder from which it is imported. First
        asked while the program runs: the import path is that of the program."""
        if path not in self._files:
            kind = self._kind(path)
            folders = sorted((folder.rstrip("/") for folder in sys.path if folder), key=len, reverse=True)
            beneath = (
                folder for folder in [str(Path.cwd())] * (kind == USER) + folders if path.startswith(f"{folder}/")
            )
            self._files[path] = kind, path.removeprefix(f"{next(beneath, '')}/" if path.startswith("/") else "")
        return self._files[path]

    def _kind(self, path: str) -> int:
        if path.startswith("<"):
            return USER if path.startswith(("<ipython", "<stdin")) else HIDDEN
        if path.startswith(self._hidden) or "torchinductor" in path:
            return HIDDEN
        if "/site-packages/" in path or "/dist-packages/" in path:
            return LIBRARY
        return HIDDEN if path.startswith(self._standard) else USER
