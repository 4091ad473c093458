"""Records steps with torch.profiler."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from ...files import write_atomic
from ...folders import temporary_folder
from .read import ABOUT, Trace, find_steps, read


class _Profiler(profile):
    """Torch's profiler, which imports torch's compiler to ask for its CUDA graphs: seconds, where nothing uses it."""

    def prepare_trace(self) -> None:
        if "torch._inductor" in sys.modules:
            super().prepare_trace()
            return
        self.profiler = torch.autograd.profiler.profile(
            use_device=self.use_device,
            record_shapes=True,
            use_kineto=True,
            experimental_config=self.experimental_config,
        )
        self.profiler._prepare_trace()  # type: ignore[no-untyped-call]


class Recording:
    """Steps recorded by torch.profiler: the operators of every thread, with their sizes. `about` goes into the header
    of the trace."""

    def __init__(self, *, cuda: bool, about: dict[str, Any] | None = None) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        try:
            every_thread = _ExperimentalConfig(profile_all_threads=True)
        except TypeError:  # This version of torch records only the thread that starts it.
            every_thread = None
        # With acc_events it would not warn, but build an object for every event when it stops.
        self._profiler: Any = _Profiler(activities=activities, record_shapes=True, experimental_config=every_thread)
        self._content = b""
        self.on_device = False
        """Whether kernels ran on a GPU."""
        # Torch prints lines and warnings when it starts.
        with filtered_stderr(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.start()
        self._profiler.add_metadata("torch_version", torch.__version__)
        if about is not None:
            self._profiler.add_metadata_json(ABOUT, json.dumps(about))

    def durations_us(self) -> list[float]:
        """End recording: the length of every event, without a trace."""
        self._end()
        return [event.duration_ns() / 1e3 for event in self._profiler.profiler.kineto_results.events()]

    def _end(self) -> None:
        with filtered_stderr():
            self._profiler.stop()

    def stop(self) -> None:
        """End recording. The trace is kept compressed: reading it would make the loop wait."""
        self._end()
        with temporary_folder() as folder:
            path = folder / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            content = path.read_bytes()
        self.on_device = b'"cat": "kernel"' in content
        self._content = gzip.compress(content, compresslevel=1)
        self._profiler = None

    def save(self, path: Path) -> int:
        """Write the trace, gzipped, and return its size."""
        write_atomic(path, self._content)
        return len(self._content)

    def trace(self, last: int | None = None) -> Trace:
        """The recorded trace; with `last`, only the last of its named steps are steps."""
        with temporary_folder() as folder:
            path = folder / "trace.json.gz"
            path.write_bytes(self._content)
            trace = read(path)
        if last:
            unused = {id(step) for step in find_steps(trace.host)[:-last]}
            trace.host = [event for event in trace.host if id(event) not in unused]
        return trace


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
