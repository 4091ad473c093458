"""What each rank is doing, where others can read it after the rank is gone: a few bytes of a mapped file on its host.

RECPERF_RANKS names the folder where a launcher of ours reads it. Under torchrun alone the ranks of a host, which are
children of one process, meet in a folder named after that process and the moment it began.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..measure import spans

VARIABLE = "RECPERF_RANKS"
RUN = "run-of-the-ranks"
"""Which run the ranks are at: a restart goes on with it."""
_PROCESS, _DOING, _SPAN = slice(0, 12), slice(12, 132), slice(132, 200)
_SIZE = _SPAN.stop

_page: mmap.mmap | None = None


@dataclass(frozen=True)
class Note:
    """What a rank did last."""

    process: int = 0
    doing: str = "before it began"
    span: str = ""

    @property
    def facts(self) -> dict[str, object]:
        return {"last seen": self.doing, "last span": self.span or "none yet"}


class _Trail:
    """Hears spans and keeps the innermost open one on the page; where none is open, the last one that was."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page, self._open = page, [b"".ljust(_length(_SPAN))]
        self._written: dict[str, bytes] = {}

    def enter(self, name: str) -> None:
        text = self._written.get(name)
        if text is None:
            text = self._written[name] = _filled(name, _SPAN)
        self._open.append(text)
        self._page[_SPAN] = text

    def leave(self) -> None:
        left = self._open.pop()
        # Where an error goes up through it, it is the span in which the rank failed.
        if sys.exc_info()[0] is None:
            self._page[_SPAN] = self._open[-1] if len(self._open) > 1 else b"after " + left[: _length(_SPAN) - 6]


def launched() -> bool:
    """Whether a launcher of ours reads how ranks ended, and says it."""
    return bool(os.environ.get(VARIABLE))


def folder() -> Path | None:
    """Where the ranks of this host leave word; none where there is no place for it."""
    if launched():
        return Path(os.environ[VARIABLE])
    found = Path(tempfile.gettempdir()) / f"{_own()}{_named(os.getppid())}"
    try:
        found.mkdir(mode=0o700, exist_ok=True)
        about = found.lstat()
    except OSError:
        return None
    return found if about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode) else None


def _own() -> str:
    return f"recperf-ranks-{os.getuid()}-"


def _named(process: int) -> str:
    """A process by its number and when it began: the system gives numbers out again."""
    try:
        # The name of a program, in brackets, may have any letters; the moment is the 20th word behind it.
        began = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = "0"
    return f"{process}-{began}"


def _sweep() -> None:
    """Remove what the ranks of launchers that are gone have left."""
    if not Path("/proc/self").exists():
        return
    for found in Path(tempfile.gettempdir()).glob(f"{_own()}*"):
        launcher = found.name.removeprefix(_own())
        process = launcher.partition("-")[0]
        if process.isdigit() and _named(int(process)) != launcher:
            shutil.rmtree(found, ignore_errors=True)


def begin(rank: int) -> None:
    """Keep notes of this process from now on; what an earlier one of the same rank left is forgotten."""
    global _page
    place = folder()
    if place is None:
        return
    if not launched():
        _sweep()
    path = place / f"rank-{rank}.note"
    try:
        path.with_suffix(".json").unlink(missing_ok=True)
        path.write_bytes(_filled(str(os.getpid()), _PROCESS) + b"starting".ljust(_SIZE - _PROCESS.stop))
        with path.open("r+b") as file:
            _page = mmap.mmap(file.fileno(), _SIZE)
    except OSError:
        return
    spans.follow(_Trail(_page))


def end(rank: int, *, done: bool) -> None:
    """Take this rank's notes away where no launcher does it, and which run they were at where that is `done`."""
    place = folder()
    if place is not None and not launched():
        with contextlib.suppress(OSError):
            (place / f"rank-{rank}.note").unlink(missing_ok=True)
            (place / f"rank-{rank}.json").unlink(missing_ok=True)
            if done:
                (place / RUN).unlink(missing_ok=True)
            place.rmdir()


def note(text: str) -> None:
    """Costs a copy of some bytes; the system keeps them when the process dies."""
    if _page is not None:
        _page[_DOING] = _filled(text, _DOING)


def noted(place: Path, rank: int) -> Note:
    """What a rank was doing last."""
    try:
        content = (place / f"rank-{rank}.note").read_bytes()
        process, doing, span = (content[part].decode(errors="replace").strip() for part in (_PROCESS, _DOING, _SPAN))
        return Note(int(process), doing, span)
    except (OSError, ValueError):
        return Note()


def last(rank: int) -> Note:
    """What this very rank was doing last."""
    place = folder()
    return noted(place, rank) if place else Note()


def leave_word(rank: int, **facts: Any) -> None:
    """How a rank ended."""
    place = folder()
    if place is not None:
        with contextlib.suppress(OSError):
            draft = place / f"rank-{rank}.tmp"
            draft.write_text(json.dumps(facts))
            draft.replace(place / f"rank-{rank}.json")


def word(place: Path, rank: int) -> dict[str, Any] | None:
    try:
        found = json.loads((place / f"rank-{rank}.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def forget(place: Path) -> None:
    """Make room for the words of ranks that are started again; which run they are at stays."""
    for path in place.glob("rank-*"):
        path.unlink(missing_ok=True)


def leave_run(run: Path) -> None:
    """Which run this is, so that ranks that are started again go on with it."""
    place = folder()
    if place is not None:
        with contextlib.suppress(OSError):
            (place / RUN).write_text(str(run.resolve()))


def run_in(place: Path) -> Path | None:
    """The run that ranks left there."""
    try:
        return Path((place / RUN).read_text())
    except (OSError, ValueError):
        return None


def left_run() -> Path | None:
    """The run that these ranks were at before they were started again."""
    place = folder()
    # A shell that starts ranks may start others later; torchrun's agent starts the same ones again.
    return run_in(place) if place is not None and (launched() or job()) else None


def job() -> str:
    """What torchrun calls its job, the same on all hosts; nothing where torchrun did not start this."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def restarted() -> bool:
    """Whether torchrun has started the ranks again, as far as this host's agent knows: only the agents whose ranks
    failed count."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def same_job(noted: str) -> bool:
    """Whether a job noted earlier is this one. torchrun calls all jobs none that have no --rdzv-id."""
    return bool(noted) and noted == job() and (noted != "none" or restarted())


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _filled(text: str, part: slice) -> bytes:
    return text.encode()[: _length(part)].ljust(_length(part))
