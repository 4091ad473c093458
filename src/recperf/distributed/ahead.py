"""Ids on their way to the ranks that hold their rows, begun while the batch before theirs is computed.

An exchange has three parts: ranks tell each other how many ids they will send, send them, and the rows come back. The
first two need no weights, so those of the next batch can travel early: its counts while this batch's rows do, its ids
during this batch's forward and backward pass. Only the third waits for the update before it, and numbers stay the same
to the bit. TorchRec's own pipeline does this too, but takes the whole step with it; docs/distributed.md says what of
that does not fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Exchange:
    """Of one batch. Ranks begin theirs in the same order, and take each part of it at the same place."""

    def __init__(self, engine: Any, asked: Any, stream: torch.cuda.Stream | None) -> None:
        """`asked` are the ids as TorchRec's KeyedJaggedTensor; `stream` is the queue they travel in beside the main
        one, which CPUs have none of."""
        self._engine, self._stream = engine, stream
        self._context = engine.create_context()
        self._ids: Any = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            asked.record_stream(stream)
        with self._beside():
            self._counts = engine.input_dist(self._context, asked)

    def send(self) -> None:
        """The ids themselves, once all ranks know how many come."""
        if self._ids is None:
            with self._beside():
                self._ids = self._counts.wait()

    def receive(self) -> Any:
        """The ids that other ranks want rows of."""
        self.send()
        with self._beside():
            arrived = self._ids.wait()
        if self._stream is not None:
            main = torch.cuda.current_stream()
            main.wait_stream(self._stream)
            arrived.record_stream(main)
            self._context.record_stream(main)
        return arrived

    def rows(self, arrived: Any) -> Any:
        """What this rank asked for, looked up by those who have it; TorchRec's dictionary or keyed tensor."""
        with _quiet():
            return self._engine.compute_and_output_dist(self._context, arrived).wait()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        with _quiet(), torch.cuda.stream(self._stream):
            yield


class Ahead:
    """Looks rows up, and begins the exchange of at most one batch before it is looked up itself."""

    def __init__(self, engine: Any, asked: Callable[[Any], Any], place: torch.device) -> None:
        """`asked` makes a KeyedJaggedTensor of a batch."""
        self._engine, self._asked = engine, asked
        self._stream = torch.cuda.Stream(place) if place.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._following: Any = None
        self._begun: tuple[Any, Exchange] | None = None

    def follow(self, batch: Any) -> None:
        """Say which batch is trained on after the next one, if any: it is begun while that one is looked up."""
        self._following = batch

    def lookup(self, batch: Any, *, training: bool) -> Any:
        """The rows of a batch. One that only scores leaves alone what waits for training."""
        if not training:
            exchange = self._exchange(batch)
            return exchange.rows(exchange.receive())
        begun, following = self._begun, self._following
        self._begun = self._following = None
        # A batch is the one that was begun if it is the very same object; any other begins here.
        exchange = begun[1] if begun and begun[0] is batch else self._exchange(batch)
        arrived = exchange.receive()
        if following is not None:
            self._begun = following, self._exchange(following)
        found = exchange.rows(arrived)
        if self._begun:
            # Every rank has told its counts before it sent rows, so this waits for nobody.
            self._begun[1].send()
        return found

    def _exchange(self, batch: Any) -> Exchange:
        return Exchange(self._engine, self._asked(batch), self._stream)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
