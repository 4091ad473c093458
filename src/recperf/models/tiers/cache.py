"""Rows of embedding tables in a cache on the device, in front of a store that holds all of them.

A batch is placed before it is used: its rows get slots of the cache, those that are missing are fetched, and rows that
no batch in flight uses make room for them. Training then reads and updates slots, so that it computes what it would
compute with all rows on the device. A row that was never trained has its initial value, computed when it is needed.

Rows of all tables have one numbering, a table's after those of the table before. A record is a row's weights and its
optimizer state, which always move together.

Shapes: R rows of all tables, S slots, N rows of a batch, M rows that the cache lacks, D weights of a row, K numbers of
its state, W = D + K.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import MachineError
from ...machine import process_memory
from ...units import size
from .config import TablesConfig
from .slots import Longs, Placed, Slots, Traffic
from .store import RowStore

POLL_S = 1e-3
"""How often a batch that waits for room looks whether another one is finished."""
Initial = Callable[[str, Tensor], Tensor]
"""Computes the initial weights of rows of the table with a name, on the device of the rows."""
Memory = Callable[[int], Sequence[Tensor]]
"""Makes tensors for a number of slots: of weights, and of each state, with a number for a row or several."""


class TieredRows:
    """A cache of rows on a device, and the store behind it. One thread places batches while another trains."""

    def __init__(
        self,
        tables: Mapping[str, int],
        store: RowStore,
        *,
        dim: int,
        slots: int,
        config: TablesConfig,
        device: torch.device,
        memory: Memory | None = None,
    ) -> None:
        """`memory` makes the tensors of the cache, if whoever trains the rows has its own."""
        self.tables, self.store, self.dim, self.config = dict(tables), store, dim, config
        self.device, self.cuda = device, device.type == "cuda"
        self.initial: Initial
        """Set by the tables whose rows these are."""
        counts = list(tables.values())
        self.starts = dict(zip(tables, np.cumsum([0, *counts[:-1]]).tolist()))
        rows, slots = sum(counts), min(slots, sum(counts))
        self.slots = Slots(rows, slots, frequent=config.eviction == "frequent")
        # Zeros that nobody wrote take no memory.
        self.trained_R = np.zeros(rows, np.bool_)
        """Whether each row was ever trained or loaded; others have their initial values."""
        state = store.width - dim
        cached = memory(slots) if memory else [torch.empty(slots, width, device=device) for width in (dim, state)]
        self.cached = [column if column.dim() == 2 else column[:, None] for column in cached]
        """The weights in the cache, and one or more tensors of their state: together the columns of a record."""
        self._count = 0
        self.traffic = Traffic()
        self._active: dict[int, Placed] = {}
        """Batches that are placed and not finished, by their numbers."""
        self._ends: dict[int, Any] = {}
        """Events after finished batches that the device may not have reached yet."""
        self._loaded: Any = None
        """The event after the last rows were put into slots."""
        self._returning: list[tuple[Longs, Tensor, Any]] = []
        """Rows that left and are not in the store yet: numbers, records in host memory, the event after the copy."""
        self._staging: tuple[Tensor, Any] = torch.empty(0), None
        self._finished: deque[tuple[Placed, Any]] = deque()
        """Batches that are finished and whose slots were not released yet, each with the event after it."""
        self._turn = threading.Condition()
        self._last_end: Any = None
        """The newest of the events that placing has waited for; another stream has to wait for it too."""
        self._peeked: Any = None
        """The event after rows were last read outside of a placed batch."""
        self._failure: Exception | None = None
        self._ended = False

    @property
    def cache_SD(self) -> Tensor:
        return self.cached[0]

    @property
    def state_SK(self) -> Tensor:
        return self.cached[1]

    @property
    def record_bytes(self) -> int:
        return 4 * self.store.width

    @property
    def cache_bytes(self) -> int:
        return len(self.slots) * self.record_bytes

    def place(self, rows: Mapping[str, Tensor] | Tensor, owner: object) -> Placed:
        """Bring the distinct rows of a batch into the cache, where they stay until it is finished: those of each table,
        or in the numbering of all tables."""
        placed = self.try_place(rows, owner)
        if placed is None:
            raise self._too_small(len(self._numbered(rows)))
        if not isinstance(rows, Tensor):
            parts = torch.split(placed.index_N, [len(rows_U) for rows_U in rows.values()])
            placed.slots = dict(zip(rows, parts))
        return placed

    def try_place(self, rows: Mapping[str, Tensor] | Tensor, owner: object) -> Placed | None:
        """The same, but None where batches of others use too many slots."""
        rows_N = self._numbered(rows)
        began = perf_counter()
        with self._guarded():
            pinned = self._pin(rows_N, owner)
            if pinned is None:
                return None
            slots_N, missing_N = pinned
            self._count += 1
            free_M = slots_N[missing_N]
            leaving = free_M[self.slots.row_S[free_M] >= 0]
            self._wait_for_device(leaving)
            self._exchange(rows_N[missing_N], free_M, leaving)
            self.slots.use(slots_N, self._count)
            self.traffic.batches += 1
            self.traffic.rows += len(rows_N)
            self.traffic.hits += len(rows_N) - len(free_M)
            placed = Placed(self._count, owner, self._index(slots_N), rows_N, slots_N)
            self._active[placed.number] = placed
            self.traffic.busy_s += perf_counter() - began
        return placed

    def _pin(self, rows_N: Longs, owner: object) -> tuple[Longs, NDArray[np.bool_]] | None:
        """`Slots.pin`; where too many slots are in use, waits for earlier batches of the same owner to be finished."""
        while True:
            self._collect()
            pinned = self.slots.pin(rows_N)
            if pinned is not None or not any(placed.owner is owner for placed in self._active.values()):
                return pinned
            if self._ended:
                raise RuntimeError("the tables were closed while a batch waited for room")
            began = perf_counter()
            # Whoever finishes a batch does not wait for the lock, so nobody can notify this thread.
            self._turn.wait(POLL_S)
            self.traffic.wait_s += perf_counter() - began

    def _too_small(self, rows: int) -> MachineError:
        others = int((self.slots.pins_S > 0).sum())
        used = f", of which {others:,} hold rows of other batches" if others else ""
        enough = size(2 * (rows + others) * self.record_bytes).replace(" ", "")
        return MachineError(
            f"a batch uses {rows:,} rows; the {size(self.cache_bytes)} for rows in use hold {len(self.slots):,}{used}",
            fix=f"--tables.{'device-bytes' if self.cuda else 'resident'} {enough}, or smaller batches",
        )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Hold the lock. After an error rows that left may be lost, so nothing may be read any more."""
        with self._turn:
            if self._failure is not None:
                raise self._failure
            try:
                yield
            except Exception as error:
                self._failure = error
                raise

    def _wait_for_device(self, leaving: Longs) -> None:
        """Let the current stream wait until the device no longer reads or writes the leaving slots, and until rows that
        another stream was loading are there."""
        if not self.cuda:
            return
        if len(leaving):
            last = int(self.slots.last_S[leaving].max())
            for number in [number for number in self._ends if number <= last]:
                self._last_end = self._ends.pop(number)
        for event in (self._loaded, self._last_end, self._peeked):
            if event is not None:
                event.wait()

    def finish(self, placed: Placed, *, trained: bool = True) -> None:
        """Its rows may leave once the device has executed what is queued so far. Never waits, not even while another
        thread reads rows from a disk."""
        event = None
        if self.cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        placed.finished, placed.trained = True, trained
        self._finished.append((placed, event))

    def _collect(self) -> None:
        """Release the slots of finished batches, and forget events that the device has passed."""
        while self._finished:
            placed, event = self._finished.popleft()
            if self._active.pop(placed.number, None) is None:
                continue
            if placed.trained:
                self.trained_R[placed.rows_N] = True
            self.slots.unpin(placed.slots_N)
            if event is not None:
                self._ends[placed.number] = event
        while self._ends and self._ends[oldest := next(iter(self._ends))].query():
            del self._ends[oldest]

    def waited(self, seconds: float) -> None:
        """Count the time that a step waited for its batch."""
        self.traffic.exposed_s += seconds

    def facts(self, traffic: Traffic) -> dict[str, Any]:
        """What a profile records of its traffic."""
        facts = {"placement": self.store.kind, "cache_bytes": self.cache_bytes, "process": process_memory()}
        return {**facts, **traffic.of_a_batch()}

    def require_in_flight(self, placed: Placed | None) -> None:
        """Fail unless the rows of a batch are still in the cache."""
        if placed is None or placed.finished:
            raise RuntimeError("the rows of this batch may have left the cache: use batches one after the other")

    def records(self, rows: Mapping[str, Tensor] | Tensor) -> Tensor:
        """Weights and state of rows, on the device; those outside the cache stay outside."""
        rows_N = self._numbered(rows)
        with self._guarded():
            self._write_back()
            if self._loaded is not None:
                self._loaded.wait()
            out_NW = torch.empty(len(rows_N), self.store.width, device=self.device)
            slots_N = self.slots.of(rows_N)
            cached_N = slots_N >= 0
            indices, slots = self._index(np.flatnonzero(cached_N)), self._index(slots_N[cached_N])
            out_NW[indices] = self._of_slots(slots)
            self._read(rows_N[~cached_N], np.flatnonzero(~cached_N), self._columns(out_NW))
            if self.cuda:
                self._peeked = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._peeked.record()
        return out_NW

    def trained(self) -> NDArray[np.bool_]:
        """`trained_R`, where rows of batches in flight count as trained: one of these batches may have been."""
        with self._turn:
            self._collect()
            for placed in self._active.values():
                self.trained_R[placed.rows_N] = True
            return self.trained_R

    @torch.no_grad()
    def load(self, rows_N: Longs, columns: slice, values_N: Tensor) -> None:
        """Overwrite columns of the records of rows, in the store; the cache is left empty."""
        with self._turn:
            self._empty()
            values = np.zeros((len(rows_N), self.store.width), np.float32)
            old_N = self.store.written(rows_N)
            if columns != slice(0, self.store.width):
                if old_N.any():
                    room = np.empty((int(old_N.sum()), self.store.width), np.float32)
                    self.store.read(rows_N[old_N], room)
                    values[old_N] = room
                for name, part_N, numbers in self._by_table(rows_N[~old_N]):
                    initial = self.initial(name, torch.from_numpy(numbers))
                    values[np.flatnonzero(~old_N)[part_N], : self.dim] = initial.numpy()
            values[:, columns] = values_N.reshape(len(rows_N), -1).cpu().numpy()
            self.store.write(rows_N, values)
            self.trained_R[rows_N] = True

    def clear(self) -> None:
        """Every row has its initial value again."""
        with self._turn:
            self._returning.clear()
            self._active.clear()
            self.slots.clear()
            self._ends.clear()
            self.store.forget()
            self.trained_R = np.zeros(self.store.rows, np.bool_)

    def _empty(self) -> None:
        """Write everything back and empty the cache; no batch may be in flight."""
        self._collect()
        if self._active:
            raise RuntimeError("rows cannot be replaced while batches are in flight")
        filled = self.slots.filled()
        if len(filled):
            if self.cuda:
                torch.cuda.synchronize(self.device)
            self._give_back(filled)
        self._write_back()
        self.slots.clear()
        self._ends.clear()

    def _numbered(self, rows: Mapping[str, Tensor] | Tensor) -> Longs:
        """Rows in the numbering of all tables."""
        if isinstance(rows, Tensor):
            return np.asarray(rows.cpu().numpy())
        parts = [rows_U + self.starts[name] for name, rows_U in rows.items()]
        return np.asarray(torch.cat(parts).cpu().numpy()) if parts else np.empty(0, np.int64)

    def _columns(self, records_NW: Tensor) -> Sequence[Tensor]:
        """Records divided as the cache divides them."""
        return torch.split(records_NW, [column.shape[1] for column in self.cached], 1)

    def _of_slots(self, index_N: Tensor) -> Tensor:
        """The records in slots."""
        return torch.cat([column.index_select(0, index_N) for column in self.cached], 1)

    def _index(self, indices: Longs) -> Tensor:
        """On the device; pinned first, since a copy from other memory would wait for what is queued before it."""
        index = torch.from_numpy(indices)
        return index.pin_memory().to(self.device, non_blocking=True) if self.cuda else index

    def _exchange(self, rows_M: Longs, slots_M: Longs, leaving: Longs) -> None:
        """Send the rows of leaving slots back to the store and fetch the missing rows."""
        earlier = len(self._returning)
        if len(leaving):
            self._give_back(leaving)
        # A missing row may have left for an earlier batch. What leaves a GPU now is written once its copy has ended.
        self._write_back(earlier if self.cuda else None)
        self.slots.put(rows_M, slots_M)
        self._read(rows_M, slots_M, self.cached)
        if self.cuda:
            self._loaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._loaded.record()

    def _give_back(self, slots: Longs) -> None:
        """Begin to copy the records of slots to host memory, and empty them. Rows that were only scored go nowhere."""
        rows, event = self.slots.empty(slots), None
        changed = self.trained_R[rows]
        rows, records = rows[changed], self._of_slots(self._index(slots[changed]))
        if self.cuda:
            room = torch.empty(records.shape, pin_memory=True)
            room.copy_(records, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            records = room
        self._returning.append((rows, records, event))
        self.traffic.written_back += len(rows)
        self.traffic.written_back_bytes += records.nbytes

    def _write_back(self, count: int | None = None) -> None:
        """Write what returned to the store, the oldest first: all, or `count` blocks of it."""
        for _ in range(len(self._returning) if count is None else count):
            rows, records, event = self._returning[0]
            if event is not None:
                event.synchronize()
            self.store.write(rows, records.numpy())
            self._returning.pop(0)

    def _read(self, rows_M: Longs, indices_M: Longs, into: Sequence[Tensor]) -> None:
        """Put records of the store, or initial ones, to indices of tensors on the device: weights, and the states."""
        old_M = self.store.written(rows_M)
        for name, part, numbers in self._by_table(rows_M[~old_M]):
            indices = self._index(indices_M[~old_M][part])
            into[0].index_copy_(0, indices, self.initial(name, self._index(numbers)))
            for state in into[1:]:
                state.index_fill_(0, indices, 0.0)
        if count := int(old_M.sum()):
            staged = self._staged(rows_M[old_M], count)
            indices = self._index(indices_M[old_M])
            for column, values in zip(into, self._columns(staged)):
                column.index_copy_(0, indices, values)
            self.traffic.fetched += count
            self.traffic.fetched_bytes += staged.nbytes

    def _staged(self, rows: Longs, count: int) -> Tensor:
        """Records of the store on the device, by way of pinned memory."""
        room, copied = self._staging
        if copied is not None:
            copied.synchronize()
        if len(room) < count:
            room = torch.empty(count + count // 4, self.store.width, pin_memory=self.cuda)
        self.store.read(rows, room[:count].numpy())
        staged = room[:count].to(self.device, non_blocking=True)
        if self.cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._staging = room, copied
        return staged

    def _by_table(self, rows: Longs) -> Iterable[tuple[str, Longs, Longs]]:
        """Tables that rows belong to, with the indices of these rows and their numbers within the table."""
        for name, start in self.starts.items():
            inside = np.flatnonzero((rows >= start) & (rows < start + self.tables[name]))
            if len(inside):
                yield name, inside, rows[inside] - start

    def end(self) -> None:
        """Let a thread that waits for room give up."""
        self._ended = True
        with self._turn:
            self._turn.notify_all()

    def close(self) -> None:
        self.end()
        self.store.close()
