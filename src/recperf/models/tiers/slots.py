"""Which row each slot of a cache holds, which slots batches in flight use, whose rows leave, and what was moved.

Shapes: R rows, S slots, N rows of a batch, M rows of it that the cache lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SAMPLE = 4096
"""Slots that are sampled to learn how long ago rows were used."""
SCANNED = 1 << 18
"""Slots that are searched at a time for rows that may leave."""
SPARE = 2.0
"""This many times as many rows as needed are expected to qualify to leave, so that the search ends soon."""
HALVED = 1024
"""The numbers of uses are halved every this many batches, so that rows that were once popular can leave."""

Longs = NDArray[np.int64]


class Slots:
    """The slots of a cache; `frequent`: the rows with the fewest uses leave, otherwise those used longest ago."""

    def __init__(self, rows: int, slots: int, *, frequent: bool) -> None:
        # Zeros that nobody wrote take no memory: of a table of a billion rows only what is used does.
        self.slot_R = np.zeros(rows, np.int32)
        """One more than the slot of each row; 0: it is not in the cache."""
        self.row_S = np.full(slots, -1, np.int64)
        self.last_S = np.zeros(slots, np.int64)
        """The last batch that used each slot."""
        self.uses_S = np.zeros(slots, np.int32)
        self.pins_S = np.zeros(slots, np.int16)
        """How many batches in flight use each slot."""
        self._score_S = self.uses_S if frequent else self.last_S
        self._filled = self._hand = 0

    def __len__(self) -> int:
        return len(self.row_S)

    def of(self, rows_N: Longs) -> Longs:
        """The slots of rows; -1 for those that are not in the cache."""
        return self.slot_R[rows_N].astype(np.int64) - 1

    def pin(self, rows_N: Longs) -> tuple[Longs, NDArray[np.bool_]] | None:
        """A slot for each row, in use from now on, and which rows are missing: these get empty slots and slots of rows
        that leave. None, and nothing changed, where too many slots are in use."""
        slots_N = self.of(rows_N)
        missing_N = slots_N < 0
        cached = slots_N[~missing_N]
        self.pins_S[cached] += 1
        free_M = self._free(int(missing_N.sum()))
        if free_M is None:
            self.pins_S[cached] -= 1
            return None
        self.pins_S[free_M] += 1
        slots_N[missing_N] = free_M
        return slots_N, missing_N

    def unpin(self, slots_N: Longs) -> None:
        self.pins_S[slots_N] -= 1

    def use(self, slots_N: Longs, batch: int) -> None:
        """Note that a batch uses slots."""
        self.last_S[slots_N] = batch
        self.uses_S[slots_N] += 1
        if batch % HALVED == 0:
            self.uses_S >>= 1

    def put(self, rows_M: Longs, slots_M: Longs) -> None:
        """Note which rows slots hold from now on."""
        self.slot_R[rows_M] = slots_M + 1
        self.row_S[slots_M] = rows_M
        self.uses_S[slots_M] = 0

    def empty(self, slots: Longs) -> Longs:
        """Empty slots; returns the rows that they held."""
        rows = self.row_S[slots].copy()
        self.slot_R[rows] = 0
        self.row_S[slots] = -1
        return rows

    def filled(self) -> Longs:
        """The slots that hold a row."""
        return np.flatnonzero(self.row_S >= 0)

    def clear(self) -> None:
        self.slot_R[self.row_S[self.filled()]] = 0
        self.row_S[:], self.last_S[:], self.uses_S[:], self.pins_S[:] = -1, 0, 0, 0
        self._filled = self._hand = 0

    def _free(self, count: int) -> Longs | None:
        """Slots for `count` rows: those that never held one, then those of rows that leave."""
        unused = np.arange(self._filled, min(self._filled + count, len(self)))
        leaving = self._leaving(count - len(unused))
        if len(unused) + len(leaving) < count:
            return None
        self._filled += len(unused)
        return np.concatenate([unused, leaving])

    def _leaving(self, count: int) -> Longs:
        """Up to `count` slots of rows that no batch in flight uses: those with the lowest score, as well as a sample
        of the slots tells which these are."""
        if not count:
            return np.empty(0, np.int64)
        step = max(1, len(self) // SAMPLE)
        share = min(1.0, SPARE * count / len(self))
        limit = np.quantile(self._score_S[self._hand % step :: step], share, method="higher")
        leaving = self._scan(count, limit)
        return leaving if len(leaving) == count else self._scan(count, np.inf)

    def _scan(self, count: int, limit: float) -> Longs:
        """Up to `count` slots with scores of at most `limit`, from where the last search ended, around once."""
        chosen, missing, scanned = [np.empty(0, np.int64)], count, 0
        while missing and scanned < len(self):
            stop = min(self._hand + min(SCANNED, len(self) - scanned), len(self))
            here = slice(self._hand, stop)
            fits = (self.pins_S[here] == 0) & (self._score_S[here] <= limit) & (self.row_S[here] >= 0)
            slots = np.flatnonzero(fits)[:missing] + self._hand
            scanned += stop - self._hand
            self._hand = (int(slots[-1]) + 1 if len(slots) == missing else stop) % len(self)
            chosen.append(slots)
            missing -= len(slots)
        return np.concatenate(chosen)


@dataclass(eq=False)
class Placed:
    """A batch whose rows are in the cache until it is finished."""

    number: int
    owner: object
    """Who placed it; the batches of one owner are finished in their order."""
    index_N: Tensor
    """The slots of the batch's rows, on the device."""
    rows_N: Longs = field(repr=False)
    slots_N: Longs = field(repr=False)
    slots: dict[str, Tensor] = field(default_factory=dict)
    """For each table its part of them, where the batch has its rows by table."""
    finished: bool = False
    trained: bool = True
    """Whether its rows may have changed."""


@dataclass
class Traffic:
    """What was looked up and moved since the start."""

    batches: int = 0
    rows: int = 0
    """Distinct rows of each batch, summed over the batches."""
    hits: int = 0
    """Of these, the rows that the cache held."""
    fetched: int = 0
    """Rows that were read from the store; the other misses were new and got their initial values."""
    written_back: int = 0
    fetched_bytes: int = 0
    written_back_bytes: int = 0
    busy_s: float = 0.0
    """Time that placing took, beside the steps."""
    wait_s: float = 0.0
    """Part of it spent waiting for a batch to be finished, so that rows could leave."""
    exposed_s: float = 0.0
    """Time that steps waited for their batches, rows included."""

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))

    def of_a_batch(self) -> dict[str, float]:
        """Figures of a mean batch."""
        batches = max(1, self.batches)
        return {
            "rows": self.rows / batches,
            "hit_rate": self.hits / max(1, self.rows),
            "fetched_bytes": self.fetched_bytes / batches,
            "written_back_bytes": self.written_back_bytes / batches,
            "placing_ms": 1e3 * (self.busy_s - self.wait_s) / batches,
            "exposed_ms": 1e3 * self.exposed_s / batches,
        }
