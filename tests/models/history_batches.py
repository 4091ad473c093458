"""Random batches of histories for the tests of DLRMv4."""

from __future__ import annotations

import torch

from recperf.data.batch import HistoryBatch, JaggedFeatures
from recperf.data.streaming.features import CANDIDATE, CONTEXT, HISTORY

LENGTHS = (7, 0, 31, 1, 12)


def batch_of(lengths: tuple[int, ...] = LENGTHS, *, items: int = 1000, seed: int = 0) -> HistoryBatch:
    """Random histories; artist and album follow from the item, as in a catalogue."""
    draw = torch.Generator().manual_seed(seed)
    size, events = len(lengths), sum(lengths)
    keys, values = (*CONTEXT, *HISTORY, *CANDIDATE), []
    for _ in CONTEXT:
        values.append(torch.randint(items, (size,), generator=draw))
    for count in (events, size):
        item_N = torch.randint(items, (count,), generator=draw)
        values += [item_N, item_N * 7 % 97, item_N * 5 % 89]
    counts = torch.ones(len(keys), size, dtype=torch.int64)
    counts[len(CONTEXT) : -len(CANDIDATE)] = torch.tensor(lengths)
    times = torch.randint(10**7, (events,), generator=draw)
    offsets_B1 = torch.tensor([0, *lengths]).cumsum(0)
    times = torch.cat([part.sort().values for part in times.split(list(lengths))])
    query = torch.tensor([int(times[end - 1]) if n else 99 for n, end in zip(lengths, offsets_B1[1:].tolist())])
    return HistoryBatch(
        JaggedFeatures(
            keys, torch.cat(values).int(), torch.cat([torch.zeros(1, dtype=torch.int64), counts.flatten().cumsum(0)])
        ),
        offsets_B1,
        torch.randint(8, (events,), generator=draw).to(torch.uint8),
        times,
        query,
        torch.randint(2, (size,), generator=draw).float(),
    )
