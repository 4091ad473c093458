"""Ranks, metrics and lists of next-item models, and the baselines, against what a few lines of plain Python say."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from next_item_logs import SEQUENCES, data_of

from recperf.data.next_item import DAY, NextItemData, Targets
from recperf.train import next_item
from recperf.train.next_item import (
    DAMPINGS,
    DECAYS,
    LAST,
    ItemToItem,
    Products,
    RecentPopularity,
    baselines,
    following,
    item_counts,
    neighbours,
    popularity,
    rank,
    ranks_of,
    seen_by_default,
)
from recperf.train.ranking import list_quality
from recperf.train.sparse_ranks import Hidden

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


@pytest.mark.parametrize("seen", ["kept", "left-out"])
@pytest.mark.parametrize("few", [0, 2, 1000])
def test_rules_rank_targets_as_their_scores_do(few: int, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all targets, some or none have entries for few items, and however they are divided."""
    for name, value in {"FEW": few, "TOGETHER": 11, "ENTRIES": 700}.items():
        monkeypatch.setattr(next_item, name, value)
    data = large(70)
    data = replace(data, times_E=np.random.default_rng(3).integers(0, 500, len(data.items_E)).cumsum())
    popular = popularity(data)
    rules = [popular, *RecentPopularity.options(data)[:6:5], *following(data, DECAY), neighbours(data)]
    for rule in rules:
        scores = rank(data, data.test(), lambda targets, rule=rule: rule(targets), seen=seen)  # type: ignore[misc]
        assert torch.equal(ranks_of(data, data.test(), rule, seen=seen), scores.ranks_N)
    follows, alike = rules[-2:]
    assert isinstance(follows, ItemToItem)
    assert isinstance(alike, ItemToItem)
    left = [
        len(one.ranks(data.test(), lambda part: Hidden(data.items, np.zeros(0, np.int64)))[1])
        for one in (follows, alike)
    ]
    assert left[1] == (70 if few == 1000 else 0)
    assert (left[0] > 0) == (few > 0)


def test_baselines_are_what_counting_by_hand_gives() -> None:
    data = data_of(SEQUENCES, times=True)
    trained = [one[:-2] if len(one) > 2 else one for one in SEQUENCES]
    counts = Counter(item for one in trained for item in one)
    test = data.test()
    scorers = {name: make() for name, make in baselines(data).items()}
    assert scorers["popularity"](test)[0].tolist() == [counts[item] for item in range(1, 6)]
    assert item_counts(data).tolist() == [counts[item] for item in range(1, 6)]

    after: Counter[tuple[int, int]] = Counter()
    for one in trained:
        for at, item in enumerate(one):
            for distance, other in enumerate(one[at + 1 :]):
                after[item, other] += DECAY**distance  # type: ignore[assignment]
    totals = {item: sum(weight for (one, _), weight in after.items() if one == item) for item in range(1, 6)}
    histories = [one[:-1] for one in SEQUENCES if len(one) > 2]
    for damping, counted in zip(DAMPINGS, following(data, DECAY)):
        expected = [
            [
                sum(
                    DECAY**age * after[item, other] / totals[item] ** damping
                    for age, item in enumerate(reversed(history))
                    if totals[item]
                )
                for other in range(1, 6)
            ]
            for history in histories
        ]
        assert counted(test).tolist() == [pytest.approx(row) for row in expected]

    def cosine(one: int, other: int) -> float:
        both = sum(one in items and other in items for items in trained)
        return both / math.sqrt(sum(one in items for items in trained) * sum(other in items for items in trained))

    expected = [
        [sum(DECAY**age * cosine(i, o) for age, i in enumerate(reversed(h)) if i != o and counts[i]) for o in (1, 2, 3)]
        for h in histories
    ]
    assert neighbours(data)(test)[:, :3].tolist() == [pytest.approx(row) for row in expected]


def test_recent_popularity_counts_training_events_of_a_time_before_the_target() -> None:
    sequences = [[1] * 3 + [2] * 5 + [3, 3], [2] * 2 + [1] * 6 + [4, 4]]
    data = data_of(sequences, times=True)
    recent = baselines(data)["recent_popularity"]()
    targets = Targets(np.array([0, 1, 0]), np.array([9, 13, 4]))
    seconds = recent.seconds  # type: ignore[attr-defined]
    events = [(100 * at, item) for one in sequences for at, item in enumerate(one[:-2])]
    for row, moment in enumerate((701, 300, 400)):  # Training ends at 700.
        counted = Counter(item for time, item in events if moment - seconds <= time < moment)
        assert recent(targets)[row].tolist() == [counted[item] for item in range(1, 5)]


def test_list_quality_of_equal_and_of_disjoint_lists() -> None:
    counts_I = np.array([5, 1, 0, 3])
    same = list_quality(torch.tensor([[1, 4], [1, 4], [4, 1]]), 4, counts_I)
    assert same == pytest.approx({"coverage": 0.5, "overlap": 1.0, "same_first": 2 / 3, "popularity": 5 / 6})
    apart = list_quality(torch.tensor([[1, 4], [2, 3]]), 4, counts_I)
    assert apart == pytest.approx({"coverage": 1.0, "overlap": 0.0, "same_first": 0.5, "popularity": 0.5})


def large(users: int) -> NextItemData:
    """Zipf-distributed items, most pairs of which occur once."""
    rng = np.random.default_rng(3)
    shares = 1 / np.arange(1.0, 3001)
    items = rng.choice(3000, size=(users, 40), p=shares / shares.sum()) + 1
    return data_of(items.tolist())


def counted_at_once(data: NextItemData, decay: float, damping: float, targets: Targets) -> np.ndarray:
    """The scores of counts of what follows, from a matrix of all items and all pairs of the training events."""
    counts_II = np.zeros((data.items, data.items))
    train = data.train()
    for distance in range(1, LAST + 1):
        for begin, end in zip(train.begins_S, train.ends_S):
            ahead = data.items_E[begin:end].astype(int) - 1
            np.add.at(counts_II, (ahead[:-distance], ahead[distance:]), decay ** (distance - 1))
    counts_II /= np.maximum(counts_II.sum(1, keepdims=True), 1e-300) ** damping
    scores = np.zeros((len(targets), data.items))
    for row, (user, position) in enumerate(zip(targets.users_N, targets.positions_N)):
        history = data.items_E[max(data.offsets_U1[user], position - LAST) : position].astype(int) - 1
        for age, item in enumerate(history[::-1]):
            scores[row] += counts_II[item] * decay**age
    return scores


@pytest.mark.parametrize("kept", [0, 100_000, next_item.KEPT_BYTES])
def test_counts_are_the_same_whatever_is_kept_and_however_work_is_divided(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = large(60)
    test = data.test()
    whole = [option(test) for option in following(data, DECAYS[1])]
    alike = neighbours(data)(test)
    monkeypatch.setattr(next_item, "KEPT_BYTES", kept)
    monkeypatch.setattr(next_item, "PAIRS", 300)
    monkeypatch.setattr(next_item, "ENTRIES", 500)
    for damping, scores, option in zip(DAMPINGS, whole, following(data, DECAYS[1])):
        assert torch.equal(option(test), scores)
        expected = counted_at_once(data, DECAYS[1], damping, test)
        np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-12, atol=1e-300)
        rows = int((option.row_I >= 0).sum())
        assert (rows == 0) if kept == 0 else (0 < rows < data.items) if kept == 100_000 else rows == data.items
    assert torch.equal(neighbours(data)(test), alike)


def test_baselines_need_little_more_memory_for_more_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of items would take 240 bytes an event, for each of three decays."""
    for name, value in {"KEPT_BYTES": 1 << 18, "PAIRS": 1 << 14, "ENTRIES": 1 << 14, "SCORES": 1 << 14}.items():
        monkeypatch.setattr(next_item, name, value)
    monkeypatch.setattr(next_item, "MOST_PAIRS", 50_000)
    monkeypatch.setattr(next_item, "COMPARED", 5)
    peaks = {}
    for users in (500, 1500):
        data = large(users)
        tracemalloc.start()
        for make in baselines(data).values():
            make()
        peaks[len(data.items_E)] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    (few, low), (many, high) = peaks.items()
    assert (high - low) / (many - few) < 64
