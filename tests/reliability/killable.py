"""Running the command in a process that a test may kill. A fork server holds torch, so that each start is cheap."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["recperf.workloads.execute", "recperf.workloads.clicks", "recperf.cli.run", "recperf.train.checkpoint_dcp"]
)


def _main(words: list[str], environment: dict[str, str], log: str, die_at: tuple[str, int] | None) -> None:
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    if die_at:
        _arm(*die_at)
    from recperf.cli import main

    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _arm(name: str, call: int) -> None:
    """Kill this process without warning at the n-th call of a function of `os`, before it takes effect."""
    original: Any = getattr(os, name)
    seen = 0

    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(os, name, dying)


class Killable:
    """One `recperf` command in a process of its own."""

    def __init__(self, words: list[str], log: Path, *, die_at: tuple[str, int] | None = None) -> None:
        self.log = log
        environment = {"RECPERF_HOME": os.environ["RECPERF_HOME"]}
        self.process = CONTEXT.Process(target=_main, args=(words, environment, str(log), die_at))
        self.process.start()

    def wait(self, timeout: float = 120) -> int:
        """The exit code; negative for a signal."""
        self.process.join(timeout)
        code = self.process.exitcode
        assert code is not None, "it hangs"
        return code

    def signal(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def output(self) -> str:
        return self.log.read_text()
