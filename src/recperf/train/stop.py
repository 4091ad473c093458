"""Stopping on a signal: a training finishes its step, saves and stops; at any other time the process stops at once. A
second Ctrl-C always stops at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..errors import Interrupted, RecperfError, Stopped


class StopFlag:
    """Is set by SIGTERM or Ctrl-C inside its context; training checks it after every step."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._patient = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if not self._patient:
            raise self.error("; no completed training is lost", "recperf run --resume RUN continues a run")

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Inside, a signal only sets `received`: the code there checks it and saves before it stops."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def error(self, what: str, fix: str | None) -> RecperfError:
        """The error with the exit code of the signal."""
        if self.received == signal.SIGINT:
            return Interrupted(f"interrupted{what}", fix=fix)
        return Stopped(f"stopped by SIGTERM{what}", fix=fix)


class Terminated(BaseException):
    """SIGTERM arrived during a profile. Not an Exception, which some code in between would catch."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise as Ctrl-C does, so that incomplete files are removed: a profile cannot be resumed."""

    process = os.getpid()

    def leave(*_: object) -> None:
        if os.getpid() == process:
            raise Terminated
        # A worker that was forked meanwhile and is terminated by its owner.
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except Terminated:
        raise Stopped("stopped by SIGTERM before the profile was complete", fix="run the profile again") from None
    finally:
        signal.signal(signal.SIGTERM, before)
