"""Where ids go: the published story of a hot rank, and counts against ids drawn one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recperf.data.yambda import catalogue
from recperf.data.yambda.store import EventStore
from recperf.data.yambda.synthesize.config import YambdaLike
from recperf.distributed.config import Kind
from recperf.models.dlrm_v4.config import PUBLISHED_ROWS
from recperf.plan import skew
from recperf.plan.sharding import Parallelism, place
from recperf.plan.work import Table, Work
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig, mlperf
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
        sent_R = table.sent_R(ids.traffic[name].batch(0), BATCH, dedup=dedup)
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
    np.testing.assert_allclose(result.raw_NR.mean(0), raw, rtol=0.05)
    np.testing.assert_allclose(result.unique_NR[0], unique, rtol=0.05)
    np.testing.assert_allclose(result.touched_NR[0], touched, rtol=0.06)


@pytest.fixture
def store() -> EventStore:
    return catalogue.embedded(say=lambda _: None, config=YambdaLike(users=60, events_per_user=200, items=500))


def config_for(store: EventStore) -> DLRMv4WorkloadConfig:
    """With tables as tall as the data's ids, so that blocks of rows mean something."""
    artists, albums = (int(store.catalogue_I2[:, column].max()) + 1 for column in (0, 1))
    rows = PUBLISHED_ROWS | {"item_id": store.items, "artist_id": artists, "album_id": albums}
    made = mlperf()
    data = replace(made.data, windows=replace(made.data.windows, min_history=50))
    return replace(made, data=data, model=replace(made.model, rows=tuple(rows.values())))


def test_ids_of_a_dataset_are_counted(store: EventStore) -> None:
    from recperf.data.yambda.history import Histories
    from recperf.data.yambda.windows import WindowIndex

    config, ranks, batch = config_for(store), 4, 16
    workload = planned(config)
    result = skew.counted(workload.ids(Path(store.folder), batch, ranks, 2), workload.work(), ranks)
    assert result.batches == 2
    index = WindowIndex.open(store, config.data.windows)
    anchors = np.concatenate([index.order(window, "train") for window in range(index.windows - 1)])
    last = anchors[-batch * ranks :]
    made = Histories(store, config.data.history).batch(last)
    ids = np.concatenate([made.features[name][0].numpy() for name in ("artist_id", "item_candidate_artist_id")])
    block = -(-config.model.table_rows["artist_id"] // ranks)
    raw_R = np.bincount(ids // block, minlength=ranks)
    assert result.traffic["artist_id"].raw_NR[-1].tolist() == raw_R.tolist()
    assert result.traffic["artist_id"].touched_NR[-1].sum() == len(np.unique(ids))
    dedup = result.traffic["artist_id"].unique_NR
    assert (dedup < result.traffic["artist_id"].raw_NR).any()
    assert (result.traffic["artist_id"].touched_NR <= dedup).all()
    assert result.traffic["uid"].raw_NR[-1].sum() == batch * ranks
    items = result.traffic["item_id"].unique_NR.sum() / (2 * ranks * batch)
    assert result.distinct_per_sample(batch)["item_id"] == pytest.approx(items)
    assert skew.even(workload.work(), batch, ranks).distinct_per_sample(batch) == {}, "not counted"
