"""Made-up batches with the shape of the benchmark's: lengths, distinct items and how often each comes.

Shapes: B samples, T events of all histories, N draws, K features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from _hstu_peer import jagged_lengths
from recperf.data.batch import HistoryBatch, JaggedFeatures
from recperf.data.events.kinds import LIKE, NEGATIVE, POSITIVE
from recperf.data.streaming.features import CANDIDATE, CONTEXT, HISTORY
from recperf.models.dlrm_v4.config import DLRMv4Config
from recperf.models.dlrm_v4.cost import UNIQUE

ODD = 0x9E3779B1
"""Spreads small numbers over a table's rows."""
NOW = 25_000_000
"""Seconds since the data's beginning at which the candidates are asked about."""
MEAN, SHORTEST = 2663, 512


def made_up(
    config: DLRMv4Config, batch: int, seed: int, *, mean: float = MEAN, shortest: int = SHORTEST
) -> HistoryBatch:
    """Of the benchmark's share of distinct items, drawn with a density that falls as the root of their rank: each
    comes about twenty times at least, the first one in a few thousandths of all positions. An item's artist and album
    are its own."""
    draw = torch.Generator().manual_seed(seed)
    lengths_B = jagged_lengths(batch, shortest, config.max_history, mean, seed)
    events = int(lengths_B.sum())
    positions = events + batch
    counts = {name: max(1, round(share * positions)) for name, share in UNIQUE.items()}
    rank_N = (counts["item_id"] * torch.rand(positions, generator=draw, dtype=torch.float64).square()).long()
    ids = {name: _spread(rank_N.remainder(counts[name]), config.table_rows[name], seed) for name in HISTORY}
    context = {name: torch.randint(0, config.table_rows[name], (batch,), generator=draw) for name in CONTEXT}
    values = [*context.values()]
    values += [ids[name][:events] for name in HISTORY] + [ids[name][events:] for name in HISTORY]
    ones_B = torch.ones_like(lengths_B)
    bags_KB = torch.stack([ones_B] * len(CONTEXT) + [lengths_B] * len(HISTORY) + [ones_B] * len(CANDIDATE))
    features = JaggedFeatures(
        (*CONTEXT, *HISTORY, *CANDIDATE), torch.cat(values), F.pad(bags_KB.flatten().cumsum(0), (1, 0))
    )
    offsets_B1 = F.pad(lengths_B.cumsum(0), (1, 0))
    times_T = _times(offsets_B1, draw)
    return HistoryBatch(
        features=features,
        history_offsets_B1=offsets_B1,
        actions_T=torch.tensor([POSITIVE, NEGATIVE, POSITIVE | LIKE])[_kinds(events, draw)],
        times_T=times_T,
        query_times_B=times_T[offsets_B1[1:] - 1],
        labels_B=(torch.rand(batch, generator=draw) < 0.6).float(),
    )


def _spread(rank_N: Tensor, rows: int, seed: int) -> Tensor:
    return (rank_N * ODD + seed).remainder(rows)


def _kinds(events: int, draw: torch.Generator) -> Tensor:
    """Three in five listened to, one in fifty liked, the rest skipped."""
    shares = torch.tensor([0.6, 0.98])
    return torch.bucketize(torch.rand(events, generator=draw), shares)


def _times(offsets_B1: Tensor, draw: torch.Generator) -> Tensor:
    """Ascending in each row, ages falling from months to minutes."""
    lengths_B = offsets_B1.diff()
    place_T = torch.arange(int(offsets_B1[-1])) - offsets_B1[:-1].repeat_interleave(lengths_B)
    left_T = 1 - (place_T + 1) / lengths_B.repeat_interleave(lengths_B)
    asked_B = torch.randint(NOW - 86_400, NOW, (lengths_B.numel(),), generator=draw)
    age_T = (left_T.double().pow(1.5) * 2e7).long()
    return asked_B.repeat_interleave(lengths_B) - age_T
