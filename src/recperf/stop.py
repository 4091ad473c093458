"""Stopping on a signal: a handler only remembers it, and code that takes long polls where it can stop cleanly.
Processes that this one starts end with it.

Nothing is raised from a handler, except in a launcher of ranks, so that no import, save or write ends in its middle. A
second Ctrl-C ends the process at once. Importing this imports nothing slow: `recperf` listens before it imports
anything else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from subprocess import CompletedProcess
    from types import FrameType
    from typing import Any

    from .errors import RecperfError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and what schedulers, a closed terminal or a dropped connection send: each stops a command cleanly."""
_SHOW_CURSOR = b"\x1b[?25h\n"


class StopFlag:
    """Remembers the first signal that asked this process to stop."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.ends_at_once = False
        """A signal ends the process in the handler: for commands that have nothing to save."""
        self._calls: list[Callable[[], None]] = []
        self._raised: Callable[[int], Exception] | None = None
        self._cleanups: list[Callable[[], object]] = []
        self._deferred = 0
        self._what, self._fix = "", None  # type: tuple[str, str | None]
        self._process = 0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers. A signal that the parent process ignores, as nohup does with SIGHUP, stays ignored."""
        self._process = os.getpid()
        # None arrives between the first handler and the last: all of them are installed, or none.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before.setdefault(number, signal.signal(number, self._receive))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    @contextmanager
    def listening(self) -> Iterator[StopFlag]:
        """Listen inside, unless this process does already or this is not its main thread, where Python allows none."""
        import threading

        if self._process == os.getpid() or threading.current_thread() is not threading.main_thread():
            yield self
            return
        self.received, self._before = None, {}
        self.listen()
        try:
            yield self
        finally:
            self._process, self.ends_at_once, self.received = 0, False, None
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A worker process that was forked meanwhile and is ended by its owner.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif self.ends_at_once or (self.received is not None and self._again(number)):
            self.received = number
            self._exit()
        elif self.received is None:
            self.received = number
            if not self._deferred:
                for call in self._calls:
                    with suppress(Exception):
                        call()
            if self._raised is not None:
                raise self._raised(number)

    def _again(self, number: int) -> bool:
        """Whether a further signal ends the process at once: a second Ctrl-C, also to a launcher, which then ends, so
        that its ranks receive SIGTERM."""
        return number == signal.SIGINT or (self.received == signal.SIGINT and number == signal.SIGTERM)

    def _exit(self) -> None:
        # The newest first: what writes into a folder ends before the folder is removed.
        for call in (*self._calls, *reversed(self._cleanups)):
            with suppress(Exception):
                call()
        interrupted = self.received == signal.SIGINT
        text = "interrupted" if interrupted else f"stopped by {name_of(self.received)}"
        for stream, line in ((1, _SHOW_CURSOR), (2, f"error: {text}{self._what}\n".encode())):
            try:
                if stream == 2 or os.isatty(stream):
                    os.write(stream, line)
            except OSError:
                pass
        os._exit(130 if interrupted else 75)

    def ignore(self) -> None:
        """Ignore further signals: the exit code is decided, and the interpreter's end would restore their defaults."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def poll(self) -> None:
        """Raise the error of a received signal, except inside `deferred`, and in a thread that works for the main one,
        such as a save in the background: the main thread ends it."""
        if self.received is not None and not self._deferred and current_thread() is main_thread():
            raise self.error()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, `poll` does nothing: the code there checks `received` and saves before it stops."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, `poll` raises even in `deferred`: for work that can be abandoned and done again after a resume."""
        deferred, self._deferred = self._deferred, 0
        try:
            yield
        finally:
            self._deferred = deferred

    @contextmanager
    def calling(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Inside, a signal also calls `interrupt`, which makes a long call of a library return early."""
        self._calls.append(interrupt)
        try:
            yield
        finally:
            self._calls.remove(interrupt)

    @contextmanager
    def raising(self, error: Callable[[int], Exception]) -> Iterator[None]:
        """Inside, the first signal is also raised, as the exception on which a library ends what it has started."""
        self._raised = error
        try:
            self.poll()
            yield
        finally:
            self._raised = None

    @contextmanager
    def before_exit(self, cleanup: Callable[[], object]) -> Iterator[None]:
        """Inside, a signal that ends the process at once first calls `cleanup`: no draft and no child remains."""
        self._cleanups.append(cleanup)
        try:
            yield
        finally:
            self._cleanups.remove(cleanup)

    @contextmanager
    def explained(self, what: str, fix: str | None = None) -> Iterator[None]:
        """Inside, the error of a signal says `what` became of the work, and how to continue it."""
        before = self._what, self._fix
        self._what, self._fix = what, fix
        try:
            yield
        finally:
            self._what, self._fix = before

    def explain(self, what: str) -> None:
        """Inside `explained`: what became of the work, from here on."""
        self._what = what

    @contextmanager
    def default_signals(self) -> Iterator[None]:
        """Run a program of the user inside: Ctrl-C raises KeyboardInterrupt in it, other signals end the process."""
        if self._process != os.getpid():
            yield
            return
        self.ends_at_once = True
        self.poll()
        if signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            self.ends_at_once = False
            if signal.SIGINT in self._before:
                signal.signal(signal.SIGINT, self._receive)

    def error(self, what: str | None = None, fix: str | None = None) -> RecperfError:
        """The error with the exit code of the received signal."""
        from .errors import Interrupted, Stopped

        if what is None:
            what, fix = self._what, self._fix
        if self.received == signal.SIGINT:
            return Interrupted(f"interrupted{what}", fix=fix)
        return Stopped(f"stopped by {name_of(self.received)}{what}", fix=fix)


FLAG = StopFlag()
"""The flag of this process."""

poll = FLAG.poll


def name_of(number: int | None) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def call(
    command: list[str], *, timeout_s: float | None = None, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run a program and return its exit code and output. A signal, an error or a timeout ends it and its children."""
    from subprocess import DEVNULL, PIPE, CompletedProcess, Popen

    # A group of its own, so that all of its processes can be killed together: they would hold the pipes open.
    process = Popen(
        child(command), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, errors="replace", env=environment,
        process_group=0,
    )  # fmt: skip

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    try:
        with FLAG.calling(kill):
            FLAG.poll()
            output, messages = process.communicate(timeout=timeout_s)
    except BaseException:
        kill()
        process.communicate()
        raise
    FLAG.poll()
    return CompletedProcess(command, process.returncode, output, messages)


def child(command: list[str]) -> list[str]:
    """The command line that starts a program as a child which ends with this process, even where this one is killed."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Let the system send this process a signal when the thread that started it ends, or now if the parent has
    ended."""
    import ctypes

    # Only Linux has it.
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        signal.raise_signal(number)


POINTS: dict[str, str] = {
    "save: begun": "an empty draft",
    "save: tensors written": "a draft without its manifest",
    "save: manifest written": "a complete draft without its final name",
    "save: draft synced": "a complete draft on disk without its final name",
    "save: damaged one set aside": "a complete draft, and a damaged checkpoint of the same step moved out of its way",
    "save: renamed": "the new checkpoint, which a power failure may still undo",
    "save: folder synced": "the new checkpoint, not read back yet, and the older ones",
    "save: verified": "the new checkpoint, which index.json does not name yet, and the older ones",
    "save: indexed": "the new checkpoint and the older ones",
    "prune: begun": "more checkpoints than keep_last allows",
    "prune: set aside": "an old checkpoint without its name",
    "prune: removed": "perhaps more old checkpoints, and drafts of killed processes",
    "prune: done": "the checkpoints that stay and nothing else",
    "window: left": "a window's last batch trained on, and a log without it",
    "window: logged": "a window's last batch trained on, and a log with it",
    "window: entered": "the first batch of a window made, and not trained on",
    "evaluation: due": "a state without a score",
    "evaluation: first batch scored": "some rows scored, nothing logged",
    "evaluation: scored": "all rows scored, no score logged",
    "evaluation: logged": "a score in the log, and no checkpoint with it",
}
"""Named moments at which a kill does the most harm, and what it leaves behind there; tests stop a run at each."""

listener: Callable[[str], None] | None = None
"""Is called at every moment; only tests set it."""


def reached(name: str) -> None:
    """Does nothing unless a test listens."""
    if listener is not None:
        if name not in POINTS:
            raise KeyError(f"{name!r} is not among stop.POINTS")
        listener(name)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
