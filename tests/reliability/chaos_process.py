"""A recperf command in a process that can be troubled at any moment: a fork of this one, which has torch loaded, or a
real start of Python."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a process to save and to end."""
TAIL = 4000
"""Characters of the output that a failure shows."""


class Failure(Exception):
    """What must not happen, by sort."""

    SORTS = ("mismatch", "traceback", "hang", "wrong exit code", "crash", "touched", "left alive")

    def __init__(self, sort: str, text: str) -> None:
        assert sort in self.SORTS
        super().__init__(text)
        self.sort, self.text = sort, text


def exit_code_of(number: int) -> int:
    """The documented exit code of a run that was asked to stop."""
    return 130 if number == signal.SIGINT else 75


class Process:
    """One command. Its output goes to the end of a log file, unless another file is given for either stream."""

    def __init__(self, pid: int, log: Path, begin: int) -> None:
        self.pid, self.log, self._begin = pid, log, begin
        self.sent: list[tuple[int, bool]] = []
        """Signals that were sent, and whether the process was listening for any at that time."""
        self._handle = os.pidfd_open(pid)
        self.code: int | None = None

    @classmethod
    def fork(
        cls,
        arguments: Sequence[str],
        log: Path,
        *,
        home: Path,
        troubles: Sequence[tuple[str, dict[str, Any]]] = (),
        stdout: str | None = None,
        stderr: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> Process:
        begin = log.stat().st_size if log.exists() else 0
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.environ.update({"RECPERF_HOME": str(home), **(environment or {})})
                code = _become(list(arguments), log, stdout or str(log), stderr or str(log), list(troubles))
            except BaseException:
                # What leaves the command would be printed by Python.
                with log.open("a") as file:
                    traceback.print_exc(file=file)
            finally:
                os._exit(code)
        return cls(pid, log, begin)

    @classmethod
    def start(cls, arguments: Sequence[str], log: Path, *, home: Path, **environment: str) -> Process:
        """Start Python anew, in a process group of its own."""
        begin = log.stat().st_size if log.exists() else 0
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "recperf", *arguments],
            {**os.environ, "RECPERF_HOME": str(home), **environment},
            file_actions=[(os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)],
            setpgroup=0,
        )
        return cls(pid, log, begin)

    def send(self, number: int, *, pid: int | None = None) -> None:
        """Send a signal to the process, or to one that it started."""
        listening = self.listening
        try:
            os.kill(pid or self.pid, number)
        except ProcessLookupError:
            return
        self.sent.append((number, listening))

    @property
    def listening(self) -> bool:
        """Whether the command has its handlers: Python itself handles Ctrl-C from its start on, but not SIGTERM."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
        return bool(masks) and bool(int(masks[0], 16) >> (signal.SIGTERM - 1) & 1)

    def ended(self, seconds: float) -> bool:
        """Wait at most so long for the end of the process."""
        if self.code is None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            if not poll.poll(max(0.0, seconds) * 1000):
                return False
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)
        return True

    def wait(self, limit: float) -> int:
        """The exit code, negative for a signal. A process that has not ended within the limit hangs."""
        if not self.ended(limit):
            # Let a fork write where it is; a real start has no handler and ends.
            os.kill(self.pid, signal.SIGQUIT)
            time.sleep(0.5)
            self.kill()
            raise Failure("hang", f"not ended after {limit:.0f} s\n{self.output}")
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        if not self.ended(0):
            os.kill(self.pid, signal.SIGKILL)
            self.ended(60)

    @property
    def output(self) -> str:
        """What this process printed; earlier ones may have written to the same file."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace") if self.log.exists() else ""


def _become(arguments: list[str], log: Path, stdout: str, stderr: str, troubles: list[Any]) -> int:
    """Be the command, as a fork; returns its exit code."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, target in ((1, stdout), (2, stderr)):
        os.dup2(os.open(target, append, 0o644), number)
    # Buffered as in a new process whose output is a file.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGQUIT, file=os.open(log, append), all_threads=True)
    import killable_troubles

    from recperf.__main__ import main

    for name, options in troubles:
        getattr(killable_troubles, name)(**options)
    sys.argv = ["recperf", *arguments]
    code = main()
    try:
        sys.stdout.flush()
    except OSError:
        # What Python's own end does where standard output cannot be written.
        return code or 120
    return code


def judge(process: Process, *, allowed: Sequence[int], printed: bool = True) -> int:
    """The exit code of a process that has ended as it may; anything else raises the failure.

    `printed`: whether its messages went to the log, so that there must be one line that says what is wrong.
    """
    code, output = process.code, process.output
    assert code is not None
    ending = f"exit {code} after signals {[signal.Signals(number).name for number, _ in process.sent]}"
    ending += f"\n{output[-TAIL:]}"
    if "Traceback (most recent call last)" in output or "Fatal Python error" in output:
        raise Failure("traceback", ending)
    if code < 0 and not any(number == -code for number, _ in process.sent):
        raise Failure("crash", ending)
    if code not in allowed:
        raise Failure("wrong exit code", f"{ending}\nallowed: {sorted(set(allowed))}")
    errors = [line for line in output.splitlines() if line.startswith(("error:", "interrupted"))]
    if printed and code > 0 and len(errors) != 1:
        raise Failure("wrong exit code", f"{len(errors)} lines say what is wrong\n{ending}")
    return code
