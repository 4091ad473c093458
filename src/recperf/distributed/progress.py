"""What a rank is doing and how it ended, in files that outlive it, in the folder that torch elastic gives each rank.

Every torchrun agent, ours in `recperf run --ranks` too, names an error file in TORCHELASTIC_ERROR_FILE:
<job>/attempt_<n>/<local rank>/error.json. A rank records its exit there in torch's format, so that torchrun prints it.
Torch has no record of what a killed or hung rank was doing, so its last step and span are written beside it, into a few
bytes of a mapped file that the system keeps when the process dies. Ranks that were started by hand have no such folder.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..jsonfile import load
from ..measure import spans

LAUNCHER = "recperf-ranks-"
"""Prefix of the job ids of `recperf run --ranks`, whose launcher reports how ranks ended."""
_ERROR_FILE, _PROGRESS_FILE, _RUN_FILE = "error.json", "progress", "run"
_DONE = ": done"
_ACTIVITY, _SPAN = slice(0, 120), slice(120, 188)

_page: mmap.mmap | None = None
_longest_step_s = 0.0


@dataclass(frozen=True)
class Progress:
    """What a rank did last."""

    activity: str = "before it started"
    span: str = ""

    @property
    def in_step(self) -> bool:
        """Whether it was in the middle of a training step."""
        return self.activity.startswith("step ") and not self.activity.endswith(_DONE)

    @property
    def facts(self) -> dict[str, object]:
        return {"last seen": self.activity, "last span": self.span or "none yet"}


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a rank ended."""

    code: int
    lost: str = ""
    """Why it lost the other ranks: they are "gone", or "silent"; empty where it ended by itself."""
    out_of_memory: bool = False
    message: str = ""
    time: float = field(default_factory=time.time)


class _LastSpan:
    """Writes the innermost open span to the page; where none is open, the last one that was."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page, self._open = page, [b"".ljust(_length(_SPAN))]
        self._encoded: dict[str, bytes] = {}

    def enter(self, name: str) -> None:
        text = self._encoded.get(name)
        if text is None:
            text = self._encoded[name] = _padded(name, _SPAN)
        self._open.append(text)
        self._page[_SPAN] = text

    def leave(self) -> None:
        left = self._open.pop()
        # While an error propagates, the page keeps the span in which the rank failed.
        if sys.exc_info()[0] is None:
            self._page[_SPAN] = self._open[-1] if len(self._open) > 1 else b"after " + left[: _length(_SPAN) - 6]


def job() -> str:
    """torchrun's id of its job, the same on all hosts; empty where torchrun did not start this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def launched() -> bool:
    """Whether `recperf run --ranks` started this rank, and reports how it ended."""
    return job().startswith(LAUNCHER)


def folder() -> Path | None:
    """This rank's folder; None where no agent gave it one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(path).parent if path else None


def meeting() -> str:
    """Where ranks meet: in a file that only this user can read, if `recperf run --ranks` started them, else in
    torchrun's store."""
    place = folder()
    return f"file://{place.parent / 'store'}" if launched() and place else "env://"


def begin(*, several: bool = False) -> None:
    """Record the progress of this process from now on: in its folder, or in memory if it is one of several ranks."""
    global _page
    place, first = folder(), b"starting".ljust(_SPAN.stop)
    if place is not None:
        path = place / _PROGRESS_FILE
        try:
            path.write_bytes(first)
            with path.open("r+b") as file:
                _page = mmap.mmap(file.fileno(), _SPAN.stop)
        except OSError:
            return
    elif several:
        _page = mmap.mmap(-1, _SPAN.stop)
        _page[:] = first
    if _page is not None:
        spans.follow(_LastSpan(_page))


def current() -> Progress:
    """What this rank is doing."""
    return _parsed(bytes(_page)) if _page is not None else Progress()


def note(activity: str) -> None:
    """Record what this rank does next; costs a copy of some bytes."""
    if _page is not None:
        _page[_ACTIVITY] = _padded(activity, _ACTIVITY)


def note_step(step: int, seconds: float) -> None:
    """Record that this rank has ended a training step, which took so long."""
    global _longest_step_s
    _longest_step_s = max(_longest_step_s, seconds)
    note(f"step {step}{_DONE}")


def longest_step_s() -> float:
    """The seconds of the longest training step that this process has ended; 0 where it has ended none."""
    return _longest_step_s


def read_progress(place: Path | None) -> Progress | None:
    """What the rank of a folder did last; None where it left nothing."""
    try:
        content = (place / _PROGRESS_FILE).read_bytes() if place else b""
    except OSError:
        return None
    last = _parsed(content)
    return last if last.activity else None


def _parsed(content: bytes) -> Progress:
    return Progress(*(content[part].decode(errors="replace").strip() for part in (_ACTIVITY, _SPAN)))


def record_exit(end: Exit) -> None:
    """Leave word of how this rank ends, in the format of torch's error files."""
    place = folder()
    if place is not None:
        details = {"message": end.message, "extraInfo": {"timestamp": str(int(end.time)), "recperf": asdict(end)}}
        with contextlib.suppress(OSError):
            draft = place / f"{_ERROR_FILE}.tmp"
            draft.write_text(json.dumps({"message": details}))
            draft.replace(place / _ERROR_FILE)


def read_exit(place: Path) -> Exit | None:
    """How the rank of a folder ended; None where it could not say."""
    try:
        return Exit(**load(place / _ERROR_FILE)["message"]["extraInfo"]["recperf"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def remember_run(run: Path) -> None:
    """Record on this host which run the job is at, so that ranks that are restarted resume it."""
    place = folder()
    if place is not None:
        with contextlib.suppress(OSError):
            # Several ranks of a host write the same.
            draft = place / f"{_RUN_FILE}.tmp"
            draft.write_text(str(run.resolve()))
            draft.replace(place.parents[1] / _RUN_FILE)


def remembered_run() -> Path | None:
    """The run that the ranks of this job on this host were at before they were restarted."""
    place = folder()
    try:
        return Path((place.parents[1] / _RUN_FILE).read_text()) if place else None
    except (OSError, ValueError):
        return None


def restarted() -> bool:
    """Whether torchrun has restarted the ranks of this host; an agent counts only failures of its own ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def same_job(other: str) -> bool:
    """Whether a recorded job id means this job. torchrun calls every job without --rdzv-id "none"."""
    return bool(other) and other == job() and (other != "none" or restarted())


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _padded(text: str, part: slice) -> bytes:
    return text.encode()[: _length(part)].ljust(_length(part))
