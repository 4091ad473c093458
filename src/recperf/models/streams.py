"""Extra CUDA streams for work that no later kernel needs before the end of a step.

A captured CUDA graph records the streams: weight gradients, for example, then run in parallel with the chain of input
gradients, which is the critical path. Without a GPU, or outside a capture, everything stays on the current stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

FIRST = -2
"""Priority of the stream that captures a step; streams of lower numbers go first."""
PRIORITIES = {"ids": -3, "bottom": FIRST, "copies": FIRST, "weights": -1, "biases": -1, "data": -1}
"""Of side streams; of others it is 0, the last. Sorting ids takes few blocks and must not wait for lookups, which fill
the chip. Updates of tables fill it too: what else ends a step goes before them."""


class SideStreams:
    """Named streams beside the current one; where they are disabled, the current one serves."""

    def __init__(self, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._running: set[str] = set()
        self._held: list[object] = []
        self._forked: set[str] = set()

    @contextmanager
    def run_on(self, name: str, *reads: Tensor) -> Iterator[None]:
        """Launch the kernels of the body on a named stream, after everything that the current one holds now.

        The tensors that it reads stay alive until `join`: if freed, their memory could be reused by work that runs at
        the same time.
        """
        if not self.enabled:
            yield
            return
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(priority=PRIORITIES.get(name, 0))  # type: ignore[no-untyped-call]
        stream = self._streams[name]
        if name not in self._forked:
            stream.wait_stream(torch.cuda.current_stream())
        self._forked.discard(name)
        self._running.add(name)
        self._held += reads
        with torch.cuda.stream(stream):
            yield

    def fork(self, name: str) -> None:
        """Let the next body on a named stream begin after what the current one holds now, not at the time it runs: what
        that body reads must have been launched before. The last fork before the body counts."""
        self._forked.discard(name)
        with self.run_on(name):
            pass
        if self.enabled:
            self._forked.add(name)

    @contextmanager
    def run_after_all(self, name: str) -> Iterator[None]:
        """The same, after everything that all of these streams hold now."""
        with self.run_on(name):
            for other in sorted(self._running - {name}):
                torch.cuda.current_stream().wait_stream(self._streams[other])
            yield

    def hold(self, *objects: object) -> None:
        """Keep what a stream reads alive until `join`, where its owner drops it earlier."""
        if self._running:
            self._held += objects

    def join(self, name: str) -> None:
        """Make the current stream wait for a named one."""
        if name in self._running:
            torch.cuda.current_stream().wait_stream(self._streams[name])
            self._running.remove(name)
        self._forked.discard(name)
        if not self._running:
            self._held.clear()

    def join_all(self) -> None:
        for name in sorted(self._running):
            self.join(name)

    def forget(self) -> None:
        """Wait for nothing that was launched so far, as after a capture that failed."""
        self._running.clear()
        self._forked.clear()
        self._held.clear()
