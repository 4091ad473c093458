"""Second queues of a GPU, for work that nothing waits for until the end of a step.

A captured graph keeps the shape of its queues: weight gradients, for one, then run beside the chain of input gradients
that the step really waits for. Without a GPU, or outside a capture, everything stays in one queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStreams:
    """Named queues beside the current one; off, they are the current one."""

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._open: set[str] = set()
        self._kept: list[object] = []

    @contextmanager
    def aside(self, name: str, *reads: Tensor) -> Iterator[None]:
        """Queue what is inside beside the current queue, after all that is in it now.

        The tensors it reads stay alive until `join`: freed, their memory could be given to work that runs meanwhile.
        """
        if not self.on:
            yield
            return
        stream = self._streams.setdefault(name, torch.cuda.Stream())  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        self._open.add(name)
        self._kept += reads
        with torch.cuda.stream(stream):
            yield

    def keep(self, *things: object) -> None:
        """Hold on to what a lane reads until `join`, where whoever owns it lets go of it before."""
        if self._open:
            self._kept += things

    def join(self, name: str) -> None:
        """The current queue waits for a lane."""
        if name in self._open:
            torch.cuda.current_stream().wait_stream(self._streams[name])
            self._open.remove(name)
        if not self._open:
            self._kept.clear()

    def join_all(self) -> None:
        for name in sorted(self._open):
            self.join(name)
