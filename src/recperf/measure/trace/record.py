"""Records a trace of some steps with torch.profiler; steps and parts have the names that analyse.py expects."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...errors import MachineError
from ...files import require_writable
from ...ops.operators import hear_calls, recorded
from ..spans import listen
from .read import ABOUT, MARK

STEP = "recperf.step"
PART = "recperf.part."
MARKS = 9
"""Barriers that ranks mark: enough for the median not to be a slow one."""


class _Ranges:
    """Passes every span to the profiler as a named range."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def enter(self, name: str) -> None:
        span = record_function(PART + name)
        span.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(span)

    def leave(self) -> None:
        self._open.pop().__exit__(None, None, None)


def record(
    step: Callable[[int], object],
    steps: int,
    path: Path,
    cuda: bool,
    *,
    about: dict[str, Any] | None = None,
    meet: Callable[[], None] | None = None,
) -> None:
    """Profile `steps` calls of `step`, which must be warm, and write the Chrome trace to `path` (gzip if it ends so).

    One unnamed step runs first, because the first step under the profiler pays for its buffers. `step` receives 0 for
    it, then 1, 2, ... `about` is written into the header of the trace. Where several ranks record together, `meet` is a
    barrier, and the ends of some barriers are marked before the steps.
    """
    require_writable(path.parent)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    profiler = profile(activities=activities, record_shapes=True)
    with filtered_stderr():
        profiler.start()
    before = listen(_Ranges())
    hear_calls(recorded)
    try:
        profiler.add_metadata("torch_version", torch.__version__)
        if about is not None:
            profiler.add_metadata_json(ABOUT, json.dumps(about))
        step(0)
        for number in range(MARKS if meet else 0):
            with record_function(f"{MARK}#{number}"):
                meet() if meet else None
        for index in range(steps):
            with record_function(f"{STEP}#{index}"):
                step(index + 1)
        if cuda:
            # Work that is still queued when the profiler stops would be missing.
            torch.cuda.synchronize()
    finally:
        hear_calls(None)
        listen(before)
        with filtered_stderr():
            profiler.stop()
    profiler.export_chrome_trace(str(path))
    if not path.is_file():
        # The profiler only logs that it could not write the file.
        raise MachineError(f"cannot write {path.name}", where={"file": path}, fix="check the folder and free space")


@contextmanager
def filtered_stderr() -> Iterator[None]:
    """Drop the lines that the profiler's C++ part prints to stderr at any log level; pass on the others."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        stderr = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            for line in captured:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
