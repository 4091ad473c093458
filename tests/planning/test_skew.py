"""Where ids go: the published story of a hot rank, and counts against ids drawn one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy_plan import table, work

from recperf.distributed.config import Kind
from recperf.errors import UsageError
from recperf.planning import skew
from recperf.planning.sharding import Parallelism, place
from recperf.planning.work import Table, Work
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


def exact_shares(rows: int, exponent: float) -> np.ndarray:
    share = np.arange(1.0, rows + 1) ** -exponent
    return np.asarray(share / share.sum())


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.7])
@pytest.mark.parametrize(("rows", "blocks"), [(3, 1), (1024, 3), (9001, 4)])
def test_kinds_of_rows_have_the_popularity_of_their_rows(rows: int, blocks: int, exponent: float) -> None:
    count_K, share_K, first_K = skew.kinds(rows, exponent, blocks)
    assert count_K.sum() == rows
    assert (count_K @ share_K) == pytest.approx(1.0, rel=1e-12)
    assert first_K.tolist() == [0, *np.cumsum(count_K)[:-1]]
    head = min(rows, 1024)
    assert count_K[:head].tolist() == [1.0] * head, "each of the most popular rows alone"
    borders = {min(rows, -(-rows // blocks) * block) for block in range(blocks)}
    assert borders <= {*first_K.tolist(), rows}
    assert len(count_K) <= head + 2048 + blocks
    summed = np.add.reduceat(exact_shares(rows, exponent), first_K)
    np.testing.assert_allclose(count_K * share_K, summed, rtol=1e-6)


def test_ids_spread_evenly_are_counted_by_hand() -> None:
    """Two ranks of four samples: 2 ids each, 2 + n / 2 different ones of n samples."""
    one = table("t", rows=800, distinct=lambda samples: 2 + samples / 2)
    traffic = skew.even(work(tables=(one,)), 4, 2).traffic["t"]
    assert [part.tolist() for part in (traffic.raw_R, traffic.unique_R, traffic.touched_R)] == [
        [8.0, 8.0], [4.0, 4.0], [3.0, 3.0]
    ]  # fmt: skip
    assert traffic.ids_R(True) is traffic.unique_R
    assert traffic.ids_R(False) is traffic.raw_R
    few = skew.even(work(tables=(replace(one, rows=5),)), 4, 2).traffic["t"]
    assert few.touched_R.tolist() == [2.5, 2.5], "no more than there are"
    often = skew.even(work(tables=(replace(one, distinct=lambda samples: 99.0),)), 4, 2).traffic["t"]
    assert often.unique_R.tolist() == often.touched_R.tolist() == [8.0, 8.0], "no more than ids"
    assert skew.even(work(tables=(one,)), 4, 2).distinct_per_sample(4) == {}


def test_draws_of_a_power_law_are_counted_row_by_row() -> None:
    one = table("t", rows=10, ids=3.0, distinct=lambda samples: 5.0)
    hashed = replace(one, name="hashed", skewed=False)
    found = skew.zipf(work(tables=(one, hashed)), 4, 3, 1.2)
    share, traffic = exact_shares(10, 1.2), found.traffic["t"]
    # 12 ids of each of 3 ranks; rows 0 to 3, 4 to 7 and 8 to 9 are on different ranks.
    parts = (slice(0, 4), slice(4, 8), slice(8, 10))
    np.testing.assert_allclose(traffic.raw_R, [36 * share[part].sum() for part in parts])
    np.testing.assert_allclose(traffic.unique_R, [3 * (1 - (1 - share[part]) ** 12).sum() for part in parts])
    np.testing.assert_allclose(traffic.touched_R, [(1 - (1 - share[part]) ** 36).sum() for part in parts])
    assert found.draws == {"t": 12.0}
    assert found.exponent == 1.2
    per_sample = found.distinct_per_sample(4)
    assert per_sample["t"] == pytest.approx((1 - (1 - share) ** 12).sum() / 4)
    assert per_sample["hashed"] == pytest.approx(5.0 / 4)
    np.testing.assert_allclose(found.traffic["hashed"].touched_R, [5 / 3] * 3)
    repeated = skew.zipf(work(tables=(one,)), 4, 3, 1.2, repeated=True)
    draws = repeated.draws["t"]
    assert (1 - (1 - share) ** draws).sum() == pytest.approx(5.0, rel=1e-9), "as many different rows as stated"
    np.testing.assert_allclose(repeated.traffic["t"].raw_R, traffic.raw_R)
    touched = [(1 - (1 - share[part]) ** (3 * draws)).sum() for part in parts]
    np.testing.assert_allclose(repeated.traffic["t"].touched_R, touched)
    most = skew.zipf(work(tables=(replace(one, distinct=lambda samples: 11.0),)), 4, 3, 1.2, repeated=True)
    assert most.draws == {"t": 12.0}, "at most the ids"
    single = skew.zipf(work(tables=(replace(one, rows=1),)), 4, 1, 1.2).traffic["t"]
    assert (single.raw_R[0], single.unique_R[0], single.touched_R[0]) == pytest.approx((12.0, 1.0, 1.0))
    assert skew.never(np.array([1.0]))[0] == pytest.approx(np.log(1e-15), rel=1e-2)


def test_the_law_of_an_option() -> None:
    assert [skew.parse(text) for text in ("zipf", "zipf:0.5", "zipf:2", "zipf:.25")] == [1.05, 0.5, 2.0, 0.25]
    for text in ("zipf:", "pareto:1", "zipf:-1"):
        with pytest.raises(UsageError):
            skew.parse(text)
