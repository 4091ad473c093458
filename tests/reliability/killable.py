"""Runs the command in a process that a test may kill. A fork server has torch loaded, so that a start is cheap."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["killable_warm"])

Trouble = tuple[str, dict[str, Any]]
"""A function of killable_troubles and its arguments: a fault to inject into a child process."""


@functools.cache
def home() -> Path:
    """The children's cache folder, so that they compile once. It is created together with the fork server."""
    folder = Path(tempfile.mkdtemp(prefix="recperf-home-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # A fixture of a module may come before that of a test, which sets the folder.
    compiled = Path(os.environ.get("RECPERF_HOME", folder), "native")
    if compiled.is_symlink():  # As tests have it; chaos.py damages its compiled code.
        (folder / "native").symlink_to(compiled.resolve())
    # The server imports its preloaded modules by name, from the paths in the environment.
    own = map(str, Path(__file__).parents[:2])
    path = os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "RECPERF_HOME": str(folder), "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return folder


def _main(arguments: list[str], home_folder: str, log: str, troubles: list[Trouble]) -> None:
    os.environ["RECPERF_HOME"] = home_folder
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    import killable_troubles

    from recperf.cli import main

    for name, options in troubles:
        getattr(killable_troubles, name)(**options)
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Killable:
    """One `recperf` command in a separate process."""

    def __init__(self, arguments: list[str], log: Path, *troubles: Trouble) -> None:
        self.log = log
        self._from = log.stat().st_size if log.exists() else 0
        self.process = CONTEXT.Process(target=_main, args=(arguments, str(home()), str(log), list(troubles)))
        self.process.start()

    def wait(self, timeout: float = 600) -> int:
        """The exit code; negative for a signal."""
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            self.kill()
            raise AssertionError(f"the process hangs\n{self.output}")
        return code

    def kill(self) -> int:
        self.process.kill()
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        return code

    def until(self, holds: Callable[[], bool], timeout: float = 600) -> None:
        """Wait until a condition holds or the process has ended."""
        end = time.monotonic() + timeout
        while not holds() and self.alive:
            assert time.monotonic() < end, self.output
            time.sleep(0.002)

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def output(self) -> str:
        """The output of this process; others may have written to the same file before it."""
        return self.log.read_bytes()[self._from :].decode() if self.log.exists() else ""


def claims(folder: Path) -> dict[str, Any]:
    """What `recperf check` says of a finished run, by claim; what belongs to every run must hold."""
    from recperf.cli.check import report
    from recperf.runs.contract import ALWAYS

    rows = {claim.name: claim for claim in report(folder).claims}
    assert [rows[claim.name] for claim in ALWAYS if not rows[claim.name].holds] == []
    return {name: claim.holds for name, claim in rows.items()}


KILLED = -signal.SIGKILL
