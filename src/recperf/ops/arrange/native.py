"""A batch of histories arranged in C.

Shapes: B samples, T events of their histories, R rows (the samples and those that fill up the batch), S positions, N
tokens, V ids, F rates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ArgumentError
from ..arguments import address
from ..compile import I64, POINTER, native_library, usable
from ..operators import operator

PARTS, CODES = 3, 8
"""Ids of an event (item, artist, album), and actions of one; a candidate has one more."""
MOST_ROWS = 1 << 31
"""Of a table; a larger number does not fit into the words that C sorts."""
_TOO_LONG, _NO_OFFSETS, _NO_MEMORY = 1, 2, 3
"""What `arrange` of native.c returns."""


class _Batch(ctypes.Structure):
    """The struct `batch` of native.c."""

    _fields_ = (
        *((name, POINTER) for name in ("values", "offsets", "times", "queries", "actions", "labels", "rates", "rows")),
        *((name, I64) for name in ("samples", "fillers", "events", "context", "shared", "ages", "most", "rated")),
    )


library = native_library(__file__, {"arrange": [POINTER] * 4}, {"arrange": I64})
"""Returns the compiled library, or the reason why it cannot be used."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    values_V: Tensor
    """Ids feature after feature: one per sample for each context feature, three per event, three per candidate."""
    offsets_B1: Tensor
    actions_T: Tensor
    times_T: Tensor
    query_times_B: Tensor
    labels_B: Tensor
    rates_BF: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a model reads."""

    tables: tuple[int, ...]
    """Rows of the tables of the history, then of those of the context."""
    shared: bool
    """Whether equal (item, artist, album) are one entity; otherwise every position is one."""
    ages: int
    longest: int
    """The largest number of tokens that a row may have."""

    @property
    def context(self) -> int:
        return len(self.tables) - PARTS

    def sizes(self, samples: int, events: int, counts: Sequence[int] = ()) -> list[int]:
        """Sizes of the arrays that are written for a batch without fillers, in order, for these counts of distinct rows
        of each table and entities; without counts the largest."""
        positions = events + samples
        tokens, pairs = positions + samples * self.context, self.ages * (CODES + 2 if self.shared else 2)
        most = (positions if part < PARTS else samples for part in range(len(self.tables)))
        *rows, entities = counts or (*map(min, most, self.tables), positions)
        context = (size for count in rows[PARTS:] for size in (samples, samples, count + 1))
        parts = (size for count in rows[:PARTS] for size in (entities, entities, count + 1))
        plan = (0, positions, positions, tokens, positions, entities + 1, tokens, pairs + 1)
        rest = (samples, samples, entities + 1, positions, samples + 1, samples + 1, tokens)
        return [*rows, *context, *parts, *plan, *rest]

    @cached_property
    def narrow(self) -> frozenset[int]:
        """Which of the arrays are int32; the others are int64."""
        return frozenset(4 * len(self.tables) + place for place in (1, 2, 3, 4, 6))


@operator("arrange_batch", reads=lambda *_: ())
def arrange(
    batch: Batch, form: Form, addresses: NDArray[np.int64], counts: NDArray[np.int64], *, fillers: int = 0
) -> tuple[int, bool]:
    """Write the arrays of a batch to these addresses (0: leave it out), each large enough, in the order of
    `Form.sizes` and then query times, labels and rates.

    `counts` are the distinct rows of each table, then the entities: what to fill up to, or 0, and afterwards how many
    there are. Returns the tokens of the longest row, and whether it is short enough; otherwise nothing was written.
    """
    samples, events, rates = batch.labels_B.shape[0], batch.times_T.shape[0], batch.rates_BF
    if samples < 1 or fillers not in (0, samples) or max(form.tables) > MOST_ROWS:
        raise ArgumentError(f"{samples} samples, {fillers} fillers and tables of {form.tables} rows cannot be arranged")
    rows = np.array(form.tables, np.int64)
    ids = form.context * samples + PARTS * (events + samples)
    arguments = _Batch(
        values=address("values_V", batch.values_V, torch.int64, (ids,)),
        offsets=address("offsets_B1", batch.offsets_B1, torch.int64, (samples + 1,)),
        times=address("times_T", batch.times_T, torch.int64, (events,)),
        queries=address("query_times_B", batch.query_times_B, torch.int64, (samples,)),
        actions=address("actions_T", batch.actions_T, torch.uint8, (events,)),
        labels=address("labels_B", batch.labels_B, torch.float32, (samples,)),
        rates=0 if rates is None else address("rates_BF", rates, torch.float32, (samples, rates.shape[1])),
        rows=rows.ctypes.data,
        samples=samples, fillers=fillers, events=events, context=form.context, shared=form.shared, ages=form.ages,
        most=form.longest, rated=0 if rates is None else rates.shape[1],
    )  # fmt: skip
    longest = I64()
    tables = len(form.tables)
    written = address("addresses", addresses, np.int64, (4 * tables + 18,))
    sizes = address("counts", counts, np.int64, (tables + 1,))
    fault = usable(library()).arrange(ctypes.byref(arguments), sizes, ctypes.byref(longest), written)
    if fault == _NO_MEMORY:
        raise MemoryError(f"no memory to arrange a batch of {events:,} events")
    if fault == _NO_OFFSETS:
        raise ArgumentError(f"offsets_B1 does not divide the events into histories: it must rise from 0 to {events}")
    return longest.value, fault != _TOO_LONG


class BatchMemory:
    """Memory for the arrays of a batch; those of one type lie one behind the other."""

    def __init__(self, form: Form, samples: int, events: int) -> None:
        self.form, self.samples, self.events = form, samples, events
        self.sizes = form.sizes(samples, events)
        self.addresses = np.zeros(len(self.sizes) + 3, np.int64)
        """Of every array, then none for query times, labels and rates."""
        self._parts: list[tuple[list[int], Tensor]] = []
        for dtype in (torch.int64, torch.int32):
            places = [place for place in range(len(self.sizes)) if (place in form.narrow) == (dtype is torch.int32)]
            sizes = np.array([self.sizes[place] for place in places])
            memory = torch.empty(int(sizes.sum()), dtype=dtype)
            self.addresses[places] = (memory.data_ptr() + dtype.itemsize * (sizes.cumsum() - sizes)) * (sizes > 0)
            self._parts.append((places, memory))

    def arrays(self, counts: Sequence[int]) -> list[Tensor]:
        """The arrays as they were written, with these counts of distinct rows of each table and entities."""
        written = self.form.sizes(self.samples, self.events, counts)
        arrays: list[Tensor] = [torch.empty(0)] * len(written)
        for places, memory in self._parts:
            cuts = [cut for place in places for cut in (written[place], self.sizes[place] - written[place])]
            for place, array in zip(places, torch.split(memory, cuts)[::2]):
                arrays[place] = array
        return arrays
