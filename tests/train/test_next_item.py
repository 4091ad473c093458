"""Ranks, metrics and lists of next-item models, against what a few lines of plain Python say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from next_item_logs import data_of

from recperf.data.next_item import DAY, Targets
from recperf.train import next_item
from recperf.train.item_rules import (
    DECAYS,
    popularity,
)
from recperf.train.next_item import Products, rank, ranks_of, seen_by_default
from recperf.train.ranking import list_quality

DECAY = DECAYS[0]


def scorer(rows: list[list[float]]):  # type: ignore[no-untyped-def]
    return lambda targets: torch.tensor(rows, dtype=torch.float64)[: len(targets)]


def test_ties_and_nans_count_against_the_target_and_seen_items_are_left_out_if_asked() -> None:
    data = data_of([[1, 2, 3], [1, 2, 4], [1, 2, 2]])
    nan = math.nan
    score = scorer([[9, 9, 5, 5], [nan, 1, nan, 2], [9, 8, 1, 1]])
    kept, without = (rank(data, data.test(), score, seen=seen, top=2) for seen in ("kept", "left-out"))  # type: ignore[arg-type]
    assert kept.ranks_N.tolist() == [4, 3, 2]
    # The third user's target was met before: it is never recommended, and comes last.
    assert without.ranks_N.tolist() == [2, 2, 4]
    assert without.lists_NK[0].sort()[0].tolist() == [3, 4]
    gain = (2 / math.log2(3) + 1 / math.log2(5)) / 3
    assert without.metrics() == pytest.approx(
        {"hit_rate_10": 1, "hit_rate_50": 1, "ndcg_10": gain, "ndcg_50": gain, "mrr": 5 / 12}
    )
    assert seen_by_default(data) == "left-out"
    assert seen_by_default(data_of([[1, 1, 2, 1, 3, 3]])) == "kept"


@pytest.mark.parametrize("seen", ["kept", "left-out"])
def test_events_within_the_horizon_are_predicted_together(seen: Any) -> None:
    # The second user takes item 3 twice within two days, item 5 after them, and item 2 has been met before.
    data = replace(
        data_of([[1, 4], [2, 3, 4, 3, 2, 5]]), times_E=np.array([0, 1, 0, 10, 11, 12, 13, 14]) * DAY // 2, horizon=1.5,
    )  # fmt: skip
    together = data._together(Targets(np.array([0, 1]), np.array([1, 3])), data.offsets_U1[1:])
    assert together.users_N.tolist() == [0, 1, 1, 1]
    assert data.items_E[together.positions_N].tolist() == [4, 3, 4, 2]
    assert together.ends_N.tolist() == [1, 3, 3, 3]
    # Items 1 to 5: what is predicted with a target does not compete with it, item 2 of the history only where kept.
    scores = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0], dtype=torch.float64)
    found = rank(data, together, lambda part: scores.expand(len(part), -1).clone(), seen=seen, top=5)
    assert found.ranks_N.tolist() == ([4, 2, 2, 2] if seen == "kept" else [3, 2, 2, 5])
    products = Products(lambda part: torch.ones(len(part), 1, dtype=torch.float64), scores[:, None])
    assert rank(data, together, products, seen=seen, top=5).ranks_N.tolist() == found.ranks_N.tolist()
    rule = popularity(data)
    assert ranks_of(data, together, rule, seen=seen).tolist() == rank(data, together, rule, seen=seen).ranks_N.tolist()


@pytest.mark.parametrize("seen", ["kept", "left-out"])
def test_products_of_vectors_are_ranked_as_their_scores(seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers, so that many scores are equal; the vector of one user is no number."""
    monkeypatch.setattr(next_item, "TOGETHER", 7)
    draw = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, 30, (40,), generator=draw).tolist()
    data = data_of([torch.randint(1, 91, (length,), generator=draw).tolist() for length in lengths])
    users_UD, items_ID = (torch.randint(-3, 4, (count, 8), generator=draw).float() for count in (40, data.items))
    users_UD[5] = math.nan
    products = Products(lambda targets: users_UD[targets.users_N], items_ID)
    dense, blocks = (rank(data, data.test(), score, seen=seen) for score in (lambda part: products(part), products))
    assert torch.equal(blocks.ranks_N, dense.ranks_N)
    scores_NI = products(data.test()).nan_to_num(-100)
    ours, right = (scores_NI.gather(1, (one.lists_NK - 1).clamp(min=0)) for one in (blocks, dense))
    known = torch.arange(len(scores_NI)) != 5
    assert torch.equal(ours[known], right[known])


def test_list_quality_of_equal_and_of_disjoint_lists() -> None:
    counts_I = np.array([5, 1, 0, 3])
    same = list_quality(torch.tensor([[1, 4], [1, 4], [4, 1]]), 4, counts_I)
    assert same == pytest.approx({"coverage": 0.5, "overlap": 1.0, "same_first": 2 / 3, "popularity": 5 / 6})
    apart = list_quality(torch.tensor([[1, 4], [2, 3]]), 4, counts_I)
    assert apart == pytest.approx({"coverage": 1.0, "overlap": 0.0, "same_first": 0.5, "popularity": 0.5})
