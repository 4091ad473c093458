"""A fork server with everything that commands and ranks import, and `python -c` as a fork of it: a start takes
milliseconds instead of seconds.

Run as a script, this is the process that a test starts: it asks the server for a fork that runs the program, passes
signals on to it, and ends as the fork does.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from functools import cache
from multiprocessing import forkserver, get_context, parent_process, reduction, resource_tracker
from pathlib import Path
from typing import Any

SERVER = forkserver.ForkServer()
"""A separate fork server: tests of kills have another one, with other imports."""
SERVER.set_forkserver_preload(["rank_warm"])
RUNS = "RECPERF_TEST_SERVER"
"""The variable that tells processes where the server listens, and where modules are."""


@cache
def home() -> Path:
    """The cache folder of the server's processes; the first call starts the server."""
    import atexit
    import shutil
    import tempfile
    from unittest import mock

    folder = Path(tempfile.mkdtemp(prefix="recperf-ranks-home-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compiled = Path(os.environ["RECPERF_HOME"], "native")
    if compiled.is_symlink():  # As tests have it; chaos.py damages its compiled code.
        (folder / "native").symlink_to(compiled.resolve())
    # The server imports what it preloads by name, along the path of the environment.
    own = [str(Path(__file__).parent / "distributed"), str(Path(__file__).parent)]
    path = os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "RECPERF_HOME": str(folder), "OMP_NUM_THREADS": "1"}):
        SERVER.ensure_running()
    address = SERVER._forkserver_address  # type: ignore[attr-defined]
    os.environ[RUNS] = json.dumps({"address": address, "path": [*own, *sys.path]})
    return folder


def python(program: str, *arguments: str) -> list[str]:
    """The command line of `python -c PROGRAM ARGUMENTS`, where the server runs as a fork of it."""
    start = ["-I", "-S", __file__] if RUNS in os.environ else ["-c"]
    return [sys.executable, *start, program, *arguments]


class _Streams:
    """Standard input, output and error of this process, for another one."""

    def __reduce__(self) -> Any:
        return _opened, tuple(reduction.DupFd(number) for number in range(3))


def _opened(*handles: Any) -> list[int]:
    return [handle.detach() for handle in handles]


def _run(program: str, arguments: list[str], environment: dict[str, str], folder: str, streams: Any) -> None:
    """Be `python -c PROGRAM ARGUMENTS`, killed where the process that asked for it is."""
    watched = parent_process().sentinel  # type: ignore[union-attr]
    fcntl.fcntl(watched, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(watched, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]
    fcntl.fcntl(watched, fcntl.F_SETFL, fcntl.fcntl(watched, fcntl.F_GETFL) | os.O_ASYNC)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    exec(program, {"__name__": "__main__"})


def _ask(program: str, *arguments: str) -> int:
    runs = json.loads(os.environ[RUNS])
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server.ensure_running = runs["address"], lambda: None
    # The server's own processes have what these stand for.
    server._forkserver_alive_fd = nothing = os.open(os.devnull, os.O_RDONLY)
    resource_tracker.getfd = lambda: nothing
    sys.path[:] = runs["path"]
    call = (program, list(arguments), dict(os.environ), os.getcwd(), _Streams())
    process = get_context("forkserver").Process(target=_run, args=call)
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    process.start()
    for number in numbers:
        signal.signal(number, lambda number, _: os.kill(process.pid or 0, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    process.join()
    code = process.exitcode or 0
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(_ask(*sys.argv[1:]))
