"""Rules that count training events, against what a few lines of plain Python say."""

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

from recperf.data.next_item import NextItemData, Targets
from recperf.train import item_rules, next_item
from recperf.train.item_rules import (
    DAMPINGS,
    DECAYS,
    LAST,
    ItemToItem,
    RecentPopularity,
    baselines,
    following,
    neighbours,
    popularity,
)
from recperf.train.next_item import item_counts, rank, ranks_of
from recperf.train.sparse_ranks import Hidden

DECAY = DECAYS[0]


@pytest.mark.parametrize("seen", ["kept", "left-out"])
@pytest.mark.parametrize("few", [0, 2, 1000])
def test_rules_rank_targets_as_their_scores_do(few: int, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all targets, some or none have entries for few items, and however they are divided."""
    for name, value in {"FEW": few, "TOGETHER": 11, "ENTRIES": 700}.items():
        for module in (item_rules, next_item):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
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


@pytest.mark.parametrize("kept", [0, 100_000, item_rules.KEPT_BYTES])
def test_counts_are_the_same_whatever_is_kept_and_however_work_is_divided(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = large(60)
    test = data.test()
    whole = [option(test) for option in following(data, DECAYS[1])]
    alike = neighbours(data)(test)
    monkeypatch.setattr(item_rules, "KEPT_BYTES", kept)
    monkeypatch.setattr(item_rules, "PAIRS", 300)
    monkeypatch.setattr(item_rules, "ENTRIES", 500)
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
        for module in (item_rules, next_item):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(item_rules, "MOST_PAIRS", 50_000)
    monkeypatch.setattr(item_rules, "COMPARED", 5)
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
