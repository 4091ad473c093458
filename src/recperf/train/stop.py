"""Stopping on a signal: while training the first one asks, the training saves and leaves; elsewhere there is nothing to
save, and it stops at once. A second Ctrl-C never waits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..errors import Interrupted, RecperfError, Stopped


class StopFlag:
    """Set by SIGTERM or Ctrl-C while installed; training asks it after every step."""

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
            raise self.error("; nothing that was trained is lost", "recperf run --resume RUN goes on with a run")

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Inside, a signal is only noted: whoever works there asks `received` and saves first."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def error(self, what: str, fix: str | None) -> RecperfError:
        """The exit that fits the signal."""
        if self.received == signal.SIGINT:
            return Interrupted(f"interrupted{what}", fix=fix)
        return Stopped(f"stopped by SIGTERM{what}", fix=fix)
