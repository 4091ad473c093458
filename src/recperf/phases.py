"""The phases of a command: how long each of them takes, and what is under way for whoever shows it.

with Phases(show).current() as phases:
    with phase("baselines"):        # anywhere below
        working("baselines: EASE")
phases.seconds                      # adds up to the whole time; what is in no phase is "other"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Lock, Thread
from time import monotonic

OTHER = "other"
PATIENCE_S = 3.0
"""Work that takes longer is shown."""
AGAIN_S = 1.0
Show = Callable[[str, float], None]
"""Shows what is under way, and for how many seconds; an empty text takes it away."""


class Phases:
    """Divides the time since `began` among phases; one inside another takes its time away from it."""

    def __init__(self, show: Show | None = None, *, began: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._show, self._names = show, [OTHER]
        self._marked = monotonic() if began is None else began
        self._text, self._since = "", 0.0
        self._lock, self._ended = Lock(), Event()

    @contextmanager
    def current(self) -> Iterator[Phases]:
        """Inside, `phase` and `working` mean these phases."""
        token = _CURRENT.set(self)
        watch = Thread(target=self._watch, name="recperf progress", daemon=True) if self._show else None
        if watch is not None:
            watch.start()
        try:
            yield self
        finally:
            _CURRENT.reset(token)
            self.working("")
            self._ended.set()
            if watch is not None:
                watch.join()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.mark()
        self._names.append(name)
        try:
            yield
        finally:
            self.mark()
            self._names.pop()
            self.working("")

    def mark(self) -> None:
        """Count the time until now."""
        now, name = monotonic(), self._names[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._marked
        self._marked = now

    def working(self, text: str) -> None:
        with self._lock:
            if self._text and self._show and not text:
                self._show("", 0.0)
            self._text, self._since = text, monotonic()

    def _watch(self) -> None:
        """Show what has been under way for long."""
        while not self._ended.wait(AGAIN_S):
            with self._lock:
                seconds = monotonic() - self._since
                if self._text and self._show and seconds >= PATIENCE_S:
                    self._show(self._text, seconds)


_CURRENT: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextmanager
def phase(name: str, text: str = "") -> Iterator[None]:
    """A phase of the command that runs, if it has phases; `text` is shown where it takes long."""
    phases = _CURRENT.get()
    if phases is None:
        yield
        return
    with phases.phase(name):
        phases.working(text)
        yield


def spent(name: str) -> float:
    """Seconds that a phase of the command that runs has taken so far."""
    phases = _CURRENT.get()
    if phases is None:
        return 0.0
    phases.mark()
    return phases.seconds.get(name, 0.0)


def working(text: str) -> None:
    """Say what is under way, for the case that it takes long."""
    if (phases := _CURRENT.get()) is not None:
        phases.working(text)
