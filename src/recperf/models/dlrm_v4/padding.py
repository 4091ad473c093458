"""Batches of histories in shapes that do not change, as a captured CUDA graph needs them.

Each batch is padded with dummy samples to a fixed number of tokens. They have no loss, so every gradient through them
is exactly zero. Distinct rows and entities are filled up to their largest number: with rows that the batch does not
use, whose update by a zero gradient leaves them as they are. C writes all of it in one pass.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...data.batch import HistoryBatch
from ...data.streaming.features import RATES
from ...ops.arrange import native
from .config import DLRMv4Config
from .inputs import Inputs, form_of, from_arrays, plain, too_long

ALIGNED = 16
"""Bytes that the arrays in a buffer begin at multiples of."""


class Padding:
    """The shapes of all batches of this many samples, as one buffer, so that one copy brings a batch to a device."""

    def __init__(self, config: DLRMv4Config, samples: int) -> None:
        self.config, self.samples, form = config, samples, form_of(config)
        # With one filling sample for each real one, any lengths can be filled up to this many tokens.
        tokens = samples * (form.longest + form.context + 1)
        positions = tokens - 2 * samples * form.context
        most = [positions if part < native.PARTS else 2 * samples for part in range(len(form.tables))]
        self._counts = np.array([*map(min, most, form.tables), positions])
        """Distinct rows of each table, and entities."""
        sizes = form.sizes(2 * samples, positions - 2 * samples, self._counts.tolist())
        dtypes = [torch.int32 if place in form.narrow else torch.int64 for place in range(len(sizes))]
        # Only the real samples have candidates, query times, labels and rates.
        sizes[-7:-5] = [samples, samples]
        sizes += [samples, samples, samples * len(RATES) if config.rates_hidden else 0]
        dtypes += [torch.int64, torch.float32, torch.float32]
        nbytes = np.array([size * dtype.itemsize for size, dtype in zip(sizes, dtypes)])
        ends = (-(-nbytes // ALIGNED) * ALIGNED).cumsum()
        self._starts, self.nbytes = np.append(0, ends[:-1]), int(ends[-1])
        self._written = nbytes > 0
        self._arrays = list(zip(self._starts.tolist(), nbytes.tolist(), dtypes))

    def packed(self, batch: HistoryBatch, *, pinned: bool) -> Tensor:
        """A batch in CPU memory as a buffer."""
        return self._packed(plain(batch, self.config), pinned=pinned)

    def empty(self) -> Tensor:
        """A buffer of samples without a history."""
        context, samples = self.config.context_tokens, self.samples
        none = torch.zeros(0, dtype=torch.int64)
        batch = native.Batch(
            values_V=torch.zeros((context + native.PARTS) * samples, dtype=torch.int64),
            offsets_B1=torch.zeros(samples + 1, dtype=torch.int64),
            actions_T=none.to(torch.uint8),
            times_T=none,
            query_times_B=torch.zeros(samples, dtype=torch.int64),
            labels_B=torch.zeros(samples),
            rates_BF=torch.zeros(samples, len(RATES)) if self.config.rates_hidden else None,
        )
        return self._packed(batch, pinned=False)

    def _packed(self, batch: native.Batch, *, pinned: bool) -> Tensor:
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        addresses, counts = (buffer.data_ptr() + self._starts) * self._written, self._counts.copy()
        longest, short = native.arrange(batch, form_of(self.config), addresses, counts, fillers=self.samples)
        if not short:
            raise too_long(longest, self.config)
        return buffer

    def unpacked(self, buffer: Tensor) -> Inputs:
        """The inputs as views of a buffer."""
        views = [buffer[start : start + nbytes].view(dtype) for start, nbytes, dtype in self._arrays]
        *arrays, query_times_B, labels_B, rates = views
        rates_BF = rates.view(self.samples, -1) if self.config.rates_hidden else None
        longest = self.config.hstu.max_length
        return from_arrays(self.config, arrays, longest, query_times_B, labels_B, rates_BF)
