"""Batches made ready ahead in a queue of their own: the same ones, in order, whatever the steps' queue is busy with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.train.feeds import prefetched

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

CUDA = torch.device("cuda")
SIZE = 4_000_000


@dataclass(frozen=True)
class Numbers:
    values: Tensor

    def record_stream(self, stream: Any) -> None:
        self.values.record_stream(stream)


def make(number: int) -> Numbers:
    """Waits for the device, as sizes that depend on ids do."""
    values = torch.full((SIZE,), float(number), device=CUDA)
    assert float(values[0]) == number
    return Numbers(values * 2)


def test_every_batch_is_whole_when_its_step_reads_it() -> None:
    busy = torch.randn(4096, 4096, device=CUDA)
    sums = []
    for made in prefetched(iter(range(40)), make, CUDA):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        # Queued behind the products: by then the thread has made another batch, and this one's last reference is gone.
        sums.append(made.values.sum(dtype=torch.float64))
    assert [float(total) for total in sums] == [2.0 * number * SIZE for number in range(40)]
