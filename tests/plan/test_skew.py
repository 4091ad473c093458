"""Where ids go: the published story of a hot rank, and counts against ids drawn one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recperf.distributed.config import Kind
from recperf.plan import skew
from recperf.plan.sharding import Parallelism, place
from recperf.plan.work import Table, Work
from recperf.workloads.dlrm_v4.config import mlperf
from recperf.workloads.dlrm_v4.plan import planned
from recperf.workloads.micro_dlrm.config import default as micro
from recperf.workloads.micro_dlrm.config import planned as planned_micro

RANKS, BATCH = 32, 1024
"""The published run: four nodes of eight, a global batch of 32,768."""


@pytest.fixture(scope="module")
def published() -> Work:
    """The published batches in tables a hundredth as tall, which is faster to add up and skewed alike."""
    made = mlperf()
    return planned(replace(made, model=replace(made.model, row_scale=0.01))).work()


def test_row_wise_sharding_has_a_hot_rank(published: Work) -> None:
    ids = skew.zipf(published, BATCH, RANKS, 1.2)

    def worst_and_ratio(name: str, kind: Kind, *, dedup: bool = False) -> tuple[float, float]:
        placed = place(published.tables, RANKS, BATCH, Parallelism(sharding=kind))
        (table,) = (one for one in placed if one.table.name == name)
        sent_R = table.sent_R(ids.traffic[name], BATCH, dedup=dedup)
        return sent_R.max(), sent_R.max() / sent_R.mean()

    for name in ("album_id", "artist_id"):
        worst, ratio = worst_and_ratio(name, "row")
        assert ratio > 4, "row-wise sharding gathers popular ids on one rank"
        assert worst_and_ratio(name, "row", dedup=True)[0] < 0.1 * worst, "dedup removes most of it"
        assert worst_and_ratio(name, "column")[1] == pytest.approx(RANKS / 4), "four ranks have all ids alike"
        assert worst_and_ratio(name, "table")[1] == pytest.approx(RANKS)


def test_expected_counts_match_drawn_ids() -> None:
    rows, ids, ranks = 1000, 5000, 4
    table = Table(name="t", rows=rows, dim=8, ids=1.0, vectors=1.0, distinct=lambda samples: samples)
    work = replace(planned_micro(micro()).work(), tables=(table,))
    result = skew.zipf(work, ids, ranks, 1.1).traffic["t"]
    draw, share_K = np.random.default_rng(5), np.arange(1.0, rows + 1) ** -1.1
    drawn = draw.choice(rows, (ranks, ids), p=share_K / share_K.sum())
    raw = np.bincount(drawn.ravel() // 250, minlength=ranks)
    unique = sum(np.bincount(np.unique(one) // 250, minlength=ranks) for one in drawn)
    touched = np.bincount(np.unique(drawn) // 250, minlength=ranks)
    np.testing.assert_allclose(result.raw_R, raw, rtol=0.05)
    np.testing.assert_allclose(result.unique_R, unique, rtol=0.05)
    np.testing.assert_allclose(result.touched_R, touched, rtol=0.06)
