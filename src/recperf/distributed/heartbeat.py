"""Signs of life: how a rank notices that another one is gone or hangs while it waits for it on a GPU.

gloo reports a closed connection and a timeout to the caller. NCCL waits on the GPU for ever, and torch's watchdog of it
can only abort the process, which then cannot say which rank is missing. So each rank writes every second what it is
doing and how many NCCL collectives it has begun into the store in which the ranks met, and reads what the others wrote,
in threads that run while the rank itself waits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from . import progress
from .progress import Progress

SILENT_S = 20.0
"""Seconds without a sign of life after which a rank is missing: it was killed, stopped, or its host is gone."""
FAILED_S = 5.0
"""Seconds after which a rank follows one that failed: until then it may learn of it by a closed connection."""
RUNNING, ENDED, FAILED = "running", "ended", "failed"


@dataclass
class Sign:
    """What a rank wrote last, and the seconds since it changed."""

    number: int = 0
    state: str = RUNNING
    collectives: int = 0
    progress: Progress = field(default_factory=Progress)
    silent_s: float = 0.0
    waiting_s: float = 0.0
    """Since its number of collectives changed."""

    def update(self, written: list[Any]) -> None:
        number, self.state, collectives, activity, span = written
        self.silent_s = self.silent_s if number == self.number else 0.0
        self.waiting_s = self.waiting_s if collectives == self.collectives else 0.0
        self.number, self.collectives, self.progress = number, collectives, Progress(activity, span)


class Heartbeat:
    """The signs of life of all ranks, as one of them sees them.

    `lost` is called once, in a thread, with the ranks that are missing and the reason; with none where a rank has
    failed and says so itself.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, lost: Callable[[dict[int, Progress], str], None]
    ) -> None:
        self._store, self.rank, self._lost, self._stopped = store, rank, lost, Event()
        self._hang_s = timeout_s + FAILED_S
        self._keys = [f"alive/{other}" for other in range(size)]
        self.signs = [Sign() for _ in range(size)]
        # Every rank reads all signs: with many ranks less often.
        self.period_s = max(1.0, size / 64)
        self.count: Callable[[], int] = lambda: 0
        """The number of NCCL collectives that this rank has begun."""
        self.write()

    def start(self) -> None:
        # Two threads: the store does not answer if its host is gone.
        for work in (self._talk, self._watch):
            Thread(target=work, name=f"recperf-heartbeat-{work.__name__}", daemon=True).start()

    def stop(self, state: str) -> None:
        """Leave word that this rank has ended or failed."""
        if not self._stopped.is_set():
            self._stopped.set()
            with contextlib.suppress(RuntimeError, OSError):
                self.write(state)

    def write(self, state: str = RUNNING) -> None:
        last, own = progress.current(), self.signs[self.rank]
        collectives = own.collectives
        with contextlib.suppress(RuntimeError, ValueError):
            # At the end there is no process group any more to ask.
            collectives = self.count()
        written = [own.number + 1, state, collectives, last.activity, last.span]
        own.update(written)
        self._store.set(self._keys[self.rank], json.dumps(written))

    def read(self) -> None:
        for rank, text in enumerate(self._store.multi_get(self._keys)):
            if rank != self.rank:
                self.signs[rank].update(json.loads(text))

    def age(self, seconds: float) -> tuple[dict[int, Progress], str] | None:
        """Some seconds later: who is missing and why; None where all is well."""
        own = self.signs[self.rank]
        own.waiting_s += seconds
        others = {rank: sign for rank, sign in enumerate(self.signs) if rank != self.rank and sign.state != ENDED}
        for sign in others.values():
            sign.silent_s += seconds
            sign.waiting_s += seconds
        limit = max(SILENT_S, 3 * self.period_s)
        running = {rank: sign for rank, sign in others.items() if sign.state == RUNNING}
        silent = {rank: sign.progress for rank, sign in running.items() if sign.silent_s >= limit}
        if silent:
            return silent, f"no sign of life for {limit:.0f} s"
        behind = {
            rank: sign.progress
            for rank, sign in running.items()
            if sign.collectives < own.collectives and min(sign.waiting_s, own.waiting_s) >= self._hang_s
        }
        if behind:
            return behind, f"the other ranks have waited in a collective for {self._hang_s:.0f} s"
        failed = any(sign.state == FAILED and sign.silent_s >= FAILED_S for sign in others.values())
        return ({}, "another rank has failed") if failed else None

    def reports(self, missing: dict[int, Progress]) -> bool:
        """Whether this rank is the one to name those that are missing."""
        return self.rank == min(rank for rank in range(len(self.signs)) if rank not in missing)

    def _talk(self) -> None:
        while not self._stopped.wait(self.period_s):
            # A store that went away with its host leaves all other ranks silent.
            with contextlib.suppress(RuntimeError, OSError):
                self.write()
                self.read()

    def _watch(self) -> None:
        """Time is counted in turns, so that the time in which this process itself was stopped does not count."""
        while not self._stopped.wait(self.period_s):
            result = self.age(self.period_s)
            if result is not None:
                self._lost(*result)
                return
