"""Batches of sequences, packed without padding and gathered on the device that trains, in an order that is a pure
function of (seed, epoch).

Shapes: E events, S sequences, B sequences of a batch, T positions of all its sequences, K drawn items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import JaggedFeatures, Tensors
from .next_item import NextItemData, Targets
from .order import permutation


@dataclass(frozen=True, eq=False)
class SequenceBatch(Tensors):
    """Packed sequences: position offsets_B1[b] is the first one of sequence b."""

    offsets_B1: Tensor
    items_T: Tensor
    targets_T: Tensor
    """The item that follows each position."""
    positions_T: Tensor
    """Number of each position in its sequence, from 0."""
    longest: int
    """Positions of the longest sequence."""
    times_T: Tensor | None = None
    next_times_T: Tensor | None = None
    """When the item that follows is met; None where events have no times."""
    weights_T: Tensor | None = None
    """Of each position in the mean loss, 0 in sequences that only fill the batch; None: all the same."""
    samples: int | None = None
    """Sequences before those that only fill the batch; None: all."""
    whole: int | None = None
    """Of a part of a batch that ranks share: positions of the whole batch; None: this is the whole."""
    numbers_T: Tensor | None = None
    """The number of each position in that batch."""
    drawn_K: Tensor | None = None
    """Items drawn for the loss; None: the model draws them."""
    features: JaggedFeatures | None = None
    """The items of all positions, the drawn ones and the targets, where only the rows that a step uses are updated."""

    def __len__(self) -> int:
        return len(self.offsets_B1) - 1 if self.samples is None else self.samples

    @property
    def lengths_B(self) -> Tensor:
        return self.offsets_B1.diff()

    @cached_property
    def rows_T(self) -> Tensor:
        """The sequence of each position."""
        numbers_T = torch.arange(len(self.items_T), device=self.offsets_B1.device)
        return torch.searchsorted(self.offsets_B1, numbers_T, right=True) - 1

    def newest(self, count: int) -> Tensor:
        """Up to `count` items of each sequence, the newest first, and 0 after its last."""
        places_BN = self.offsets_B1[1:, None] - 1 - torch.arange(count, device=self.offsets_B1.device)
        return self.items_T[places_BN.clamp(min=0)] * (places_BN >= self.offsets_B1[:-1, None])

    def padded(self, values_T: Tensor) -> Tensor:
        """Values of all positions as sequences x positions of the longest one, with zeros behind a shorter one."""
        values_BL = values_T.new_zeros(len(self.offsets_B1) - 1, self.longest, *values_T.shape[1:])
        return values_BL.index_put((self.rows_T, self.positions_T), values_T)

    def packed(self, values_BL: Tensor) -> Tensor:
        """The opposite of `padded`."""
        packed_T: Tensor = _Packed.apply(values_BL, self)  # type: ignore[no-untyped-call]
        return packed_T


class _Packed(torch.autograd.Function):
    """Every place of a padded batch is read at most once, so that its gradient is written and not added up."""

    @staticmethod
    def forward(ctx: Any, values_BL: Tensor, batch: SequenceBatch) -> Tensor:
        ctx.batch = batch
        return values_BL[batch.rows_T, batch.positions_T]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.batch.padded(grads[0]), None


class EventsOnDevice:
    """All events, from which batches are gathered."""

    def __init__(self, data: NextItemData, device: torch.device) -> None:
        self.device = device
        self.items_E = torch.from_numpy(data.items_E.astype(np.int64)).to(device)
        self.times_E = None if data.times_E is None else torch.from_numpy(data.times_E).to(device)

    def batch(self, begins_B: Tensor, lengths_B: Tensor) -> SequenceBatch:
        """Sequences of these lengths, by their first event. The event after the last position is its target, so it
        must exist. Begins and lengths are on the host: nothing waits for the device."""
        offsets_B1 = torch.zeros(len(lengths_B) + 1, dtype=torch.int64)
        torch.cumsum(lengths_B, 0, out=offsets_B1[1:])
        positions, longest = int(offsets_B1[-1]), int(lengths_B.max())
        shifts_B = begins_B - offsets_B1[:-1]
        copied = torch.cat([offsets_B1, shifts_B]).to(self.device, non_blocking=True)
        return self.gathered(copied, torch.arange(positions, device=self.device), longest)

    def gathered(self, packed: Tensor, numbers_T: Tensor, longest: int) -> SequenceBatch:
        """Sequences by their offsets_B1 and, after these, what to add to the number of a position to get its event,
        both on the device."""
        offsets_B1, shifts_B = torch.split(packed, [len(packed) // 2 + 1, len(packed) // 2])
        rows_T = torch.searchsorted(offsets_B1, numbers_T, right=True) - 1
        events_T = numbers_T + shifts_B[rows_T]
        return SequenceBatch(
            offsets_B1=offsets_B1,
            items_T=self.items_E[events_T],
            targets_T=self.items_E[events_T + 1],
            positions_T=numbers_T - offsets_B1[rows_T],
            longest=longest,
            times_T=None if self.times_E is None else self.times_E[events_T],
            next_times_T=None if self.times_E is None else self.times_E[events_T + 1],
        )


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """Sequences of a batch that are not gathered yet, on the host."""

    events: EventsOnDevice
    begins_B: Tensor
    lengths_B: Tensor

    def __len__(self) -> int:
        return len(self.begins_B)

    def gathered(self) -> SequenceBatch:
        return self.events.batch(self.begins_B, self.lengths_B)


@dataclass(frozen=True, eq=False)
class SequenceOrder:
    """Every training sequence once per epoch, shuffled; the last batch may be smaller. A longer sequence than the model
    reads has windows: the latest positions or, with `all_windows`, as few as cover all positions, evenly spaced."""

    events: EventsOnDevice
    begins_S: Tensor
    lengths_S: Tensor
    batch_size: int
    seed: int

    @staticmethod
    def of(
        data: NextItemData, events: EventsOnDevice, *, length: int, batch_size: int, seed: int, all_windows: bool
    ) -> SequenceOrder:
        """The sequences with at least one position and the event that follows it."""
        train = data.train()
        positions_S = train.ends_S - train.begins_S - 1
        windows_S = np.minimum(-(-positions_S // length), positions_S.max() if all_windows else 1)
        rows_W = np.repeat(np.arange(len(train)), windows_S)
        number_W = np.arange(len(rows_W)) - (np.cumsum(windows_S) - windows_S)[rows_W]
        # Window 0 is the latest one; the last one begins with the first event.
        room_W = np.maximum(positions_S[rows_W] - length, 0)
        ends_W = positions_S[rows_W] - room_W * number_W // np.maximum(windows_S[rows_W] - 1, 1)
        lengths_W = np.minimum(ends_W, length)
        begins_W = train.begins_S[rows_W] + ends_W - lengths_W
        return SequenceOrder(events, torch.from_numpy(begins_W), torch.from_numpy(lengths_W), batch_size, seed)

    def __len__(self) -> int:
        return -(-len(self.begins_S) // self.batch_size)

    def windows(self, epoch: int, start: int = 0) -> Iterator[WindowBatch]:
        order_S = permutation(len(self.begins_S), self.seed, epoch)
        for numbers_B in torch.split(order_S, self.batch_size)[start:]:
            yield WindowBatch(self.events, self.begins_S[numbers_B], self.lengths_S[numbers_B])

    def batches(self, epoch: int, start: int = 0) -> Iterator[SequenceBatch]:
        return (window.gathered() for window in self.windows(epoch, start))


def histories(
    data: NextItemData, events: EventsOnDevice, targets: Targets, *, length: int, batch_size: int
) -> Iterator[SequenceBatch]:
    """The latest events before each target, in the order of the targets."""
    lengths_N = np.minimum(targets.ends_N - data.offsets_U1[targets.users_N], length)
    begins_N = torch.from_numpy(targets.ends_N - lengths_N)
    parts = (torch.split(values_N, batch_size) for values_N in (begins_N, torch.from_numpy(lengths_N)))
    for begins_B, lengths_B in zip(*parts):
        yield events.batch(begins_B, lengths_B)
