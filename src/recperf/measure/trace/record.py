"""Record a trace of some steps with torch.profiler, steps and parts named so that analyse.py finds them."""

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
from ..spans import listen
from .read import ABOUT, MARK

STEP = "recperf.step"
PART = "recperf.part."
MARKS = 9
"""Barriers that ranks mark: enough for the one in the middle not to be a slow one."""


class _Ranges:
    """Shows every span to the profiler."""

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

    One more step runs first, without a name: the first under the profiler pays for its buffers, and belongs to no
    measurement. `step` is given 0 there, then 1, 2, ... The trace says `about` itself whose it is; where several ranks
    record together, `meet` waits for all of them, and the ends of some such waits are marked before the steps.
    """
    require_writable(path.parent)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    profiler = profile(activities=activities, record_shapes=True)
    with _without_chatter():
        profiler.start()
    before = listen(_Ranges())
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
            # Work that is still queued when the profiler stops would be missing from the trace.
            torch.cuda.synchronize()
    finally:
        listen(before)
        with _without_chatter():
            profiler.stop()
    profiler.export_chrome_trace(str(path))
    if not path.is_file():
        # The profiler only logs that it could not write.
        raise MachineError(f"cannot write {path.name}", where={"file": path}, fix="check the folder and free space")


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Keep the two lines out of stderr that the profiler's C++ half prints whatever its log level; pass on the rest."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            kept.seek(0)
            for line in kept:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
