"""Ending ranks that do not end by themselves: once one has failed, the others have nothing left to save."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import TracebackType

from ..errors import GateFailed, Interrupted, Stopped
from . import notes

END_S = 5.0
"""Seconds that ranks get to end by themselves once one of them has failed."""
_EVERY_S = 0.2
_CALM = (0, GateFailed.exit_code, Stopped.exit_code, Interrupted.exit_code)
"""Codes of ranks that went on to their end, or saved."""


class Watch:
    """Looks after the ranks that this process started, from a thread beside torchrun's agent."""

    def __init__(self, place: Path, ranks: int, end_s: float = END_S) -> None:
        self._place, self._ranks, self._end_s = place, ranks, end_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            if any(map(self._failed, range(self._ranks))):
                if not self._over.wait(self._end_s):
                    self._end()
                return

    def _failed(self, rank: int) -> bool:
        word = notes.word(self._place, rank)
        if word is not None:
            return word.get("code") not in _CALM
        process = notes.noted(self._place, rank).process
        return process > 0 and not _runs(process)

    def _end(self) -> None:
        for rank in range(self._ranks):
            process = notes.noted(self._place, rank).process
            if process > 0 and _runs(process):
                os.kill(process, signal.SIGKILL)


def _runs(process: int) -> bool:
    """Whether it is a child of this process that has not ended; its number may have been given to another one."""
    try:
        # The name of a program, in brackets, may have any letters; state and parent follow it.
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return False
    return state not in "ZX" and int(parent) == os.getpid()
