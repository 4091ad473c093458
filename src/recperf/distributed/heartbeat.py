"""Signs of life: how a rank notices that another one is gone or hangs while it waits for it on a GPU.

gloo reports a closed connection and a timeout to the caller. NCCL waits on the GPU for ever, and torch's watchdog of it
can only abort the process, which then cannot say which rank is missing. So each rank writes every second what it is
doing and how many collectives it has begun into the store in which the ranks met, and reads what the others wrote, in
threads that run while the rank itself waits.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

from . import progress
from .progress import Progress

SILENT_S = 20.0
"""Seconds without a sign of life after which a rank is missing: it was killed, stopped, or its host is gone."""
FAILED_S = 5.0
"""Seconds after which a rank follows one that failed: until then it may learn of it by a closed connection."""
STEP_S, STEP_TIMES = 45.0, 3.0
"""Seconds that ranks wait for one in the middle of a training step, or so many times its longest step so far. In the
first step of a process, which may compile, and between steps, where ranks load data, save and evaluate, they wait for
the timeout."""
RUNNING, ENDED, FAILED, LEFT = "running", "ended", "failed", "left"
"""A rank that failed has reported why; one that left leaves it to another to name those that are missing."""
_FOLLOW_S = {FAILED: FAILED_S, LEFT: SILENT_S}
_POLL_S = 0.05
Lost = Callable[[dict[int, Progress] | None, str], None]


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
    in_step_s: float = 0.0
    """The part of it in the middle of a training step."""
    longest_step_s: float = 0.0
    """Of the steps that it has ended; 0 where it has ended none."""

    def update(self, written: list[Any]) -> None:
        number, self.state, collectives, self.longest_step_s, activity, span = written
        self.silent_s = self.silent_s if number == self.number else 0.0
        if collectives != self.collectives:
            self.waiting_s = self.in_step_s = 0.0
        self.number, self.collectives, self.progress = number, collectives, Progress(activity, span)
        self.in_step_s = self.in_step_s if self.progress.in_step else 0.0

    def age(self, seconds: float) -> None:
        self.silent_s += seconds
        self.waiting_s += seconds
        self.in_step_s += seconds if self.progress.in_step else 0.0

    def late_s(self, timeout_s: float) -> float:
        """The seconds for which the others have waited too long for it; 0 where they wait on."""
        step_s = max(STEP_S, STEP_TIMES * self.longest_step_s)
        if self.longest_step_s and step_s <= self.in_step_s:
            return step_s
        return timeout_s if timeout_s <= self.waiting_s else 0.0


class Heartbeat:
    """The signs of life of all ranks, as one of them sees them.

    `lost` is called once, in a thread, with the ranks that are missing and the reason: with none where a rank has
    failed and says so itself, with None where the store does not answer, so that nothing is known of any rank.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, lost: Lost) -> None:
        self._store, self.rank, self._lost = store, rank, lost
        self._stopped, self._talking = Event(), Lock()
        self._hang_s = timeout_s + FAILED_S
        self._keys = [f"alive/{other}" for other in range(size)]
        self.signs = [Sign() for _ in range(size)]
        # Every rank reads all signs: with many ranks less often, and in a file, which keeps every sign, too.
        self.period_s = max(5.0 if progress.launched() else 1.0, size / 64)
        self._limit_s = max(SILENT_S, 3 * self.period_s)
        self._unanswered_s = 0.0
        """Since the store answered."""
        self.count: Callable[[], int] = lambda: 0
        """The number of collectives that this rank has begun."""
        self._write(RUNNING)

    def start(self) -> None:
        # Two threads: the store does not answer if its host is gone.
        for work in (self._talk, self._watch):
            Thread(target=work, name=f"recperf-heartbeat-{work.__name__}", daemon=True).start()

    def stop(self, state: str) -> None:
        """Record how this rank ended; nothing is written after that."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        # The thread that talks may wait for a store that never answers: then there is nobody to tell.
        if not self._talking.acquire(timeout=2 * self.period_s):
            return
        try:
            with contextlib.suppress(RuntimeError, OSError):
                self._write(state)
                if state == ENDED and self.rank == 0:
                    self._wait_for_others()
        finally:
            self._talking.release()

    def _wait_for_others(self) -> None:
        """The store of ranks that were started by hand ends with rank 0, so the others must have read that it ended."""
        end = time.monotonic() + 2 * self.period_s
        while time.monotonic() < end:
            self._read()
            if all(sign.state != RUNNING for sign in self.signs):
                return
            time.sleep(_POLL_S)

    def talk(self) -> None:
        """Write this rank's sign of life and read those of the others, unless this rank has ended."""
        with self._talking:
            if not self._stopped.is_set():
                self._write(RUNNING)
                self._read()

    def _write(self, state: str) -> None:
        last, own = progress.current(), self.signs[self.rank]
        collectives = own.collectives
        with contextlib.suppress(RuntimeError, ValueError):
            # At the end there is no process group any more to ask.
            collectives = self.count()
        written = [own.number + 1, state, collectives, progress.longest_step_s(), last.activity, last.span]
        own.update(written)
        self._store.set(self._keys[self.rank], json.dumps(written))

    def _read(self) -> None:
        for rank, text in enumerate(self._store.multi_get(self._keys)):
            if rank != self.rank:
                self.signs[rank].update(json.loads(text))
        self._unanswered_s = 0.0

    def age(self, seconds: float) -> tuple[dict[int, Progress] | None, str] | None:
        """Some seconds later: who is missing and why; None where all is well."""
        self._unanswered_s += seconds
        for sign in self.signs:
            sign.age(seconds)
        others = {rank: sign for rank, sign in enumerate(self.signs) if rank != self.rank and sign.state != ENDED}
        if any(sign.silent_s >= _FOLLOW_S.get(sign.state, float("inf")) for sign in others.values()):
            return {}, "another rank has failed"
        if self._unanswered_s > 2 * self.period_s:
            # What the others wrote is not known. A store that went away with a rank 0 that has ended is not missed.
            gone = self._unanswered_s >= self._limit_s and self.signs[0].state != ENDED
            return (
                (None, f"the store in which the ranks met gave no answer for {self._limit_s:.0f} s") if gone else None
            )
        return self._judge({rank: sign for rank, sign in others.items() if sign.state == RUNNING})

    def _judge(self, running: dict[int, Sign]) -> tuple[dict[int, Progress], str] | None:
        silent = {rank: sign.progress for rank, sign in running.items() if sign.silent_s >= self._limit_s}
        if silent:
            return silent, f"no sign of life for {self._limit_s:.0f} s"
        own = self.signs[self.rank]
        late = {rank: sign.late_s(self._hang_s) for rank, sign in running.items() if sign.collectives < own.collectives}
        behind = {rank: running[rank].progress for rank, limit in late.items() if 0.0 < limit <= own.waiting_s}
        if behind:
            return behind, f"the other ranks have waited in a collective for {min(late[rank] for rank in behind):.0f} s"
        return None

    def reports(self, missing: dict[int, Progress]) -> bool:
        """Whether this rank is the one to name those that are missing: the first that still runs, if none has failed,
        which has reported something."""
        running = (rank for rank, sign in enumerate(self.signs) if rank not in missing and sign.state == RUNNING)
        return self.rank == min((self.rank, *running)) and all(sign.state != FAILED for sign in self.signs)

    def _talk(self) -> None:
        while not self._stopped.wait(self.period_s):
            with contextlib.suppress(RuntimeError, OSError):
                self.talk()

    def _watch(self) -> None:
        """Time is counted in turns, so that the time in which this process itself was stopped does not count."""
        while not self._stopped.wait(self.period_s):
            result = self.age(self.period_s)
            if result is not None and not self._stopped.is_set():
                self._lost(*result)
                return
