"""Ids and rows of sharded tables on their way between ranks.

A lookup in sharded tables has three exchanges: ranks tell each other how many ids they will send, send the ids, and the
rows come back. The first two need no weights, so those of the next batch can be sent early: its counts together with
this batch's rows, its ids during this batch's forward and backward pass, on a GPU after it is queued. Only the third
waits for the update before it, so all numbers stay the same to the bit. TorchRec's own pipeline does this too, but
takes over the whole step; docs/distributed.md says why that does not fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from .waits import exchange_span


class Exchange:
    """The exchanges of one batch. All ranks begin them in the same order."""

    def __init__(
        self, collection: Any, keyed: Callable[[], Any], stream: torch.cuda.Stream | None, ready: Any = None
    ) -> None:
        """`keyed` makes the KeyedJaggedTensor of the ids; `stream` is the CUDA stream in which they are sent, None on a
        CPU. `ready` is the event after which the batch is there; without it what the current stream does is awaited,
        and with that by the host, which reads in here how many ids there are."""
        self._collection, self._stream = collection, stream
        self._context = collection.create_context()
        self._ids: Any = None
        self._arrived: Any = None
        self._placed: list[tuple[Any, Callable[..., None]]] = []
        """For each lookup of the collection the numbers of its rows, and what is called when they were used."""
        if stream is not None and ready is None:
            stream.wait_stream(torch.cuda.current_stream())
        elif stream is not None:
            stream.wait_event(ready)
        with self._in_stream():
            ids = keyed()
            if stream is not None:
                ids.record_stream(stream)
            self._counts = collection.input_dist(self._context, ids)

    def send(self) -> None:
        """Send the ids, once all ranks know how many come."""
        if self._ids is None:
            # On a GPU the host waits here for the counts of all ranks.
            with self._in_stream(), self._waiting():
                self._ids = self._counts.wait()

    def place(self, *, required: bool = True) -> None:
        """Receive the ids whose rows other ranks want from this one, and place these rows; unless `required`, only
        those that the batch before leaves room for."""
        self.send()
        with self._in_stream():
            self._arrived = self._ids.wait() if self._arrived is None else self._arrived
            pairs = list(zip(self._collection._lookups, self._arrived))
            for lookup, ids in pairs[len(self._placed) :]:
                placed = lookup.place(ids, required=required)
                if placed is None:
                    return
                self._placed.append(placed)

    def receive(self) -> Any:
        """The numbers of the rows that other ranks want from this one."""
        self.place()
        numbers = type(self._arrived)([one for one, _ in self._placed])
        if self._stream is not None:
            main = torch.cuda.current_stream()
            with self._waiting():
                main.wait_stream(self._stream)
            numbers.record_stream(main)
            self._context.record_stream(main)
        return numbers

    def rows(self, numbers: Any) -> Any:
        """The rows of this rank's ids, looked up by the ranks that hold them; TorchRec's dictionary or keyed tensor."""
        with _no_warnings():
            return self._collection.compute_and_output_dist(self._context, numbers).wait()

    def finish(self, *, trained: bool = True) -> None:
        """Tell that the rows that were placed are no longer used."""
        placed, self._placed = self._placed, []
        for _, finish in placed:
            finish(trained=trained)

    def _waiting(self) -> AbstractContextManager[None]:
        """On a GPU the span in which the step waits for this exchange. On a CPU each collective has its own."""
        return nullcontext() if self._stream is None else exchange_span()

    @contextmanager
    def _in_stream(self) -> Iterator[None]:
        # Where a CUDA build of torch sees no GPU, even no stream would ask for the current device.
        with _no_warnings(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield


class Prefetch:
    """Looks up batches, and begins the exchange of the next batch before it is looked up."""

    def __init__(self, collection: Any, keyed: Callable[[Any], Any], device: torch.device) -> None:
        """`keyed` makes a KeyedJaggedTensor of a batch. Without a collection there is nothing to look up or to send."""
        self._collection, self._keyed = collection, keyed
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._next: tuple[Any, Any] | None = None
        self._begun: tuple[Any, Exchange] | None = None
        self._trained: Exchange | None = None
        """Of the batch that is being trained on."""

    def follow(self, batch: Any, ready: Any = None) -> None:
        """Announce the batch that training looks up after the next one; its exchange begins during the next lookup.
        `ready` is the event after which the batch is there, if another CUDA stream makes it."""
        self._next = None if batch is None else (batch, ready)

    def lookup(self, batch: Any) -> Any:
        """The rows of a batch, as TorchRec's dictionary or keyed tensor. With gradients enabled it is a training
        step's; an evaluation leaves the prefetched training batch alone."""
        if not torch.is_grad_enabled():
            exchange = self._exchange(batch)
            rows = exchange.rows(exchange.receive())
            exchange.finish(trained=False)
            return rows
        self.finish()
        begun, following = self._begun, self._next
        self._begun = self._next = None
        # Only the very object that was announced is the prefetched batch; any other begins here.
        if begun is not None and begun[0] is batch:
            exchange = begun[1]
        else:
            if begun is not None and self._stream is not None:
                # What the dropped exchange still reads is freed here.
                torch.cuda.current_stream().wait_stream(self._stream)
            if begun is not None:
                begun[1].finish(trained=False)
            exchange = self._exchange(batch)
        self._trained, numbers = exchange, exchange.receive()
        if following is not None:
            self._begun = following[0], self._exchange(*following)
        rows = exchange.rows(numbers)
        if self._begun and self._stream is None:
            # Every rank has sent its counts before it sent rows, so this waits for nobody.
            self._begun[1].send()
        return rows

    def send_ahead(self) -> None:
        """Send the ids of the announced batch and fetch the rows that are wanted from here, if there is room for them.
        On a GPU the host waits here for their counts, which come after everything that ranks sent each other before: a
        step calls this when its backward pass is queued, so that the GPU has work meanwhile."""
        if self._begun:
            self._begun[1].place(required=False)

    def finish(self) -> None:
        """Tell that the rows of the last training batch were updated, or never will be."""
        if self._trained is not None:
            self._trained.finish()
            self._trained = None

    def _exchange(self, batch: Any, ready: Any = None) -> Exchange:
        return Exchange(self._collection, lambda: self._keyed(batch), self._stream, ready)


def made_event(device: torch.device) -> Any:
    """An event after everything that is queued on the current CUDA stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
