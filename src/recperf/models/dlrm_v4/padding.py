"""Batches of histories in shapes that do not change, as a captured CUDA graph needs them.

Each batch is padded with dummy samples to a fixed number of tokens. They have no loss, so every gradient through them
is exactly zero. Distinct rows and entities are filled up to their largest number: with
rows that the batch does not use, whose update by a zero gradient leaves them as they are.

Shapes: B samples of a batch, T events of their histories, P filling samples, U distinct rows of a table, E distinct
entities, N picks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...data.batch import HistoryBatch, JaggedFeatures
from ...data.yambda.schema import CONTEXT, HISTORY, RATES
from ...ops.arrange import native
from .config import DLRMv4Config
from .inputs import KEYS, Inputs, Pick, form_of, not_in_c, plain, prepare, too_long

ALIGNED = 16
"""Bytes that the parts of a buffer begin at multiples of."""


@dataclass(frozen=True)
class Padding:
    """The shapes of all batches of this many samples."""

    config: DLRMv4Config
    samples: int

    @property
    def shortest(self) -> int:
        """Tokens of a row without a history."""
        return self.config.context_tokens + 1

    @property
    def tokens(self) -> int:
        """Tokens of a padded batch: with one filling sample for each real one, any lengths can be filled up to it."""
        return self.samples * (self.config.hstu.max_length + self.shortest)

    @property
    def positions(self) -> int:
        return self.tokens - 2 * self.samples * self.config.context_tokens

    def rows(self, table: str) -> int:
        """The largest number of distinct rows of a table that a padded batch uses."""
        most = self.positions if table in HISTORY else 2 * self.samples
        return min(most, self.config.table_rows[table])

    @torch.no_grad()
    def inputs(self, batch: HistoryBatch) -> Inputs:
        """Prepare a batch in CPU memory with these shapes. Only its real samples have candidates and labels. `packed`
        is faster; this says what it packs."""
        inputs = prepare(self._filled(batch), self.config)
        size, longest = self.samples, self.config.hstu.max_length
        entities = inputs.plan.source_starts_U1.numel() - 1
        counts = {name: self.rows(name) for name in inputs.rows}
        return replace(
            inputs,
            rows={name: _with_unused(rows_U, counts[name]) for name, rows_U in inputs.rows.items()},
            context={name: _pick(pick, counts[name], 2 * size) for name, pick in inputs.context.items()},
            entities={name: _pick(pick, counts[name], self.positions) for name, pick in inputs.entities.items()},
            plan=replace(
                inputs.plan,
                source_starts_U1=_extended(inputs.plan.source_starts_U1, self.positions - entities),
                longest=longest,
            ),
            candidates=Pick.among(inputs.candidates.index_N[:size], self.positions),
            query_times_B=inputs.query_times_B[:size],
            labels_B=inputs.labels_B[:size],
            rates_BF=None if inputs.rates_BF is None else inputs.rates_BF[:size],
            longest=longest,
            whole_longest=longest,
        )

    def packed(self, batch: HistoryBatch, *, pinned: bool) -> Tensor:
        """The inputs of a batch in CPU memory, packed; written in C in their places where that is possible."""
        if not_in_c(batch, self.config):
            return self.layout.pack(self.inputs(batch), pinned=pinned)
        buffer, counts = torch.empty(self.layout.nbytes, dtype=torch.uint8, pin_memory=pinned), self._counts.copy()
        longest, short = native.arrange(
            plain(batch, self.config), form_of(self.config), buffer.data_ptr() + self.layout.starts, counts,
            fillers=self.samples,
        )  # fmt: skip
        if not short:
            raise too_long(longest, self.config)
        return buffer

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Distinct rows of each table, and entities."""
        return np.array([*map(self.rows, (*HISTORY, *CONTEXT)), self.positions])

    def _filled(self, batch: HistoryBatch) -> HistoryBatch:
        """The batch with filling samples behind it, whose histories bring it to the number of tokens."""
        size, events = self.samples, batch.times_T.numel()
        missing = self.tokens - 2 * size * self.shortest - events
        lengths_P = torch.full((size,), missing // size)
        lengths_P[: missing % size] += 1
        fill, one_P = batch.times_T.new_zeros(missing), batch.query_times_B.new_zeros(size)
        parts, lengths = [], [batch.features.offsets_FB1.new_zeros(1)]
        lengths_B = batch.history_offsets_B1.diff()
        for key, values in zip(KEYS, torch.split(batch.features.values_V, list(batch.features.ids_per_key))):
            history = key in HISTORY
            parts += [values, values.new_zeros(missing if history else size)]
            lengths += [lengths_B, lengths_P] if history else [torch.ones(2 * size, dtype=torch.int64)]
        features = JaggedFeatures(KEYS, torch.cat(parts), torch.cat(lengths).cumsum(0))
        return HistoryBatch(
            features,
            torch.cat([batch.history_offsets_B1, events + lengths_P.cumsum(0)]),
            torch.cat([batch.actions_T, batch.actions_T.new_zeros(missing)]),
            torch.cat([batch.times_T, fill]),
            torch.cat([batch.query_times_B, one_P]),
            torch.cat([batch.labels_B, batch.labels_B.new_zeros(size)]),
            None if batch.rates_BF is None else torch.cat([batch.rates_BF, torch.zeros_like(batch.rates_BF)]),
        )

    def empty(self) -> Inputs:
        """A batch of samples without a history, as a template of the shapes."""
        size, none = self.samples, torch.zeros(0, dtype=torch.int64)
        lengths = torch.cat([torch.full((size,), int(key not in HISTORY)) for key in KEYS])
        values_V = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        zeros_B1 = torch.zeros(size + 1, dtype=torch.int64)
        batch = HistoryBatch(
            JaggedFeatures(KEYS, values_V, offsets), zeros_B1, none, none, zeros_B1[1:], torch.zeros(size),
            torch.zeros(size, len(RATES)) if self.config.rates_hidden else None,
        )  # fmt: skip
        return self.inputs(batch)

    @cached_property
    def layout(self) -> Packed:
        return Packed(self.empty())


class Packed:
    """Inputs of one shape as one buffer, type after type, so that one copy brings them to a device."""

    def __init__(self, template: Inputs) -> None:
        self.template = template
        tensors, self._groups, end = template.tensors(), [], 0
        self.starts = np.zeros(len(tensors) + (template.rates_BF is None), np.int64)
        """Where each tensor begins, in bytes."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            members = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
            sizes = np.array([tensors[number].numel() for number in members])
            count = int(sizes.sum())
            self.starts[members] = end + dtype.itemsize * (sizes.cumsum() - sizes)
            self._groups.append((slice(end, end + count * dtype.itemsize), dtype, members))
            end += -(-count * dtype.itemsize // ALIGNED) * ALIGNED
        self.nbytes = end

    def pack(self, inputs: Inputs, *, pinned: bool) -> Tensor:
        buffer, tensors = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned), inputs.tensors()
        for part, dtype, members in self._groups:
            torch.cat([tensors[number].flatten() for number in members], out=buffer[part].view(dtype))
        return buffer

    def unpacked(self, buffer: Tensor) -> Inputs:
        """The inputs as views of a buffer."""
        shapes = [tensor.shape for tensor in self.template.tensors()]
        views: dict[int, Tensor] = {}
        for part, dtype, members in self._groups:
            parts = torch.split(buffer[part].view(dtype), [shapes[number].numel() for number in members])
            views |= {number: piece.view(shapes[number]) for number, piece in zip(members, parts)}
        ordered = iter(range(len(shapes)))
        inputs: Inputs = tree_map_only(Tensor, lambda _: views[next(ordered)], self.template)
        return inputs


def _extended(starts_U1: Tensor, more: int) -> Tensor:
    """More rows that nothing picks."""
    return torch.cat([starts_U1, starts_U1[-1:].expand(more)])


def _pick(pick: Pick, rows: int, picks: int) -> Pick:
    """The pick among more rows, filled up with picks of the last row."""
    count, starts = pick.index_N.numel(), pick.starts_U1.numpy()
    index_N, order_N = np.full(picks, rows - 1), np.arange(picks)
    index_N[:count], order_N[:count] = pick.index_N.numpy(), pick.order_N.numpy()
    starts_U1 = np.full(rows + 1, starts[-1])
    starts_U1[: starts.size] = starts
    starts_U1[-1] = picks
    return Pick(*map(torch.from_numpy, (index_N, order_N, starts_U1)))


def _with_unused(rows_U: Tensor, count: int) -> Tensor:
    """The rows and, up to the count, others: of the first `count` rows enough are unused."""
    used, all_U = rows_U.numpy(), np.empty(count, rows_U.numpy().dtype)
    unused = np.ones(count, dtype=bool)
    unused[used[used < count]] = False
    all_U[: used.size] = used
    all_U[used.size :] = np.flatnonzero(unused)[: count - used.size]
    return torch.from_numpy(all_U)
