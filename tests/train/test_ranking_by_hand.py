"""Rankings, shares and lists against what plain Python counts."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from recperf.train import ranking
from recperf.train.baselines import fit_additive
from recperf.train.ranking import (
    RecentShares,
    drawn,
    first_positives,
    gains,
    grouped_items,
    item_rules,
    joint,
    list_quality,
    log_shares,
    positions,
    repeated_share,
)


@pytest.mark.parametrize("pairs", [1, 5, 7, 1 << 16])
def test_places_with_ties_are_counted_one_by_one(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "PAIRS", pairs)
    draw = np.random.default_rng(2)
    scores_NI = draw.integers(0, 4, (30, 9)).astype(float)
    rows_Q = torch.from_numpy(draw.permutation(30)[:12])
    targets_Q = torch.from_numpy(draw.integers(0, 9, 12))
    lists = [torch.from_numpy(draw.permutation(9)[: draw.integers(0, 10)]) for _ in range(12)]
    lists[3], lists[11] = torch.zeros(0, dtype=torch.int64), targets_Q[11:]
    own_Q = torch.from_numpy(scores_NI[rows_Q, targets_Q])
    sizes: list[int] = []

    def score(rows_P: torch.Tensor, items_P: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows_P))
        return torch.from_numpy(scores_NI)[rows_P, items_P].float()

    higher_Q, same_Q, lists_QK = positions(score, rows_Q, own_Q, targets_Q, iter(lists), top=3)
    assert max(sizes) <= pairs
    for place, (row, target) in enumerate(zip(rows_Q.tolist(), targets_Q.tolist())):
        others = [item for item in lists[place].tolist() if item != target]
        own = scores_NI[row, target]
        assert int(higher_Q[place]) == sum(scores_NI[row, item] > own for item in others)
        assert int(same_Q[place]) == sum(scores_NI[row, item] == own for item in others)
        best = sorted([*others, target], key=lambda item: -scores_NI[row, item])[:3]
        assert lists_QK[place].tolist() == best + [-1] * (3 - len(best)), "of ties the row's own item comes last"
    assert sum(sizes) == sum(len(set(one.tolist()) - {int(target)}) for one, target in zip(lists, targets_Q))
    none = positions(score, rows_Q[:0], own_Q[:0], targets_Q[:0], iter(()))
    assert [tuple(one.shape) for one in none] == [(0,), (0,), (0, 0)]


def test_gains_are_means_over_the_places_of_a_tie() -> None:
    higher_Q, same_Q = torch.tensor([0, 2, 9, 10, 8]), torch.tensor([0, 0, 0, 0, 3])
    found = gains(higher_Q, same_Q)
    assert found["hit_rate_10"].tolist() == [1.0, 1.0, 1.0, 0.0, 0.5]
    discounted = [1.0, 0.5, 1 / math.log2(11), 0.0, (1 / math.log2(10) + 1 / math.log2(11)) / 4]
    assert found["ndcg_10"].tolist() == pytest.approx(discounted, rel=1e-12)
    assert found["mrr"].tolist() == pytest.approx([1, 1 / 3, 0.1, 1 / 11, (1 / 9 + 1 / 10 + 1 / 11 + 1 / 12) / 4])
    assert gains(higher_Q, same_Q, (3,))["hit_rate_3"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [len(gain) for gain in gains(higher_Q[:0], same_Q[:0]).values()] == [0] * 5


def test_users_come_in_one_random_order() -> None:
    """Row 2 k + 1 is the first positive one of user k; the order is that of the number of users."""
    labels_N, users_N = torch.arange(200) % 2, torch.arange(200) // 2
    rows_Q = first_positives(labels_N.float(), users_N, None)
    order_Q = torch.randperm(100, generator=torch.Generator().manual_seed(100))
    assert torch.equal(rows_Q, 2 * order_Q + 1)
    assert len(first_positives(torch.zeros(3), torch.arange(3), None)) == 0
    assert first_positives(torch.tensor([0.5, 0.0]), torch.zeros(2, dtype=torch.int64), None).tolist() == [0]


@pytest.mark.parametrize(
    ("count", "first"),
    [(4, [166, 101, 163, 191]), (9, [191, 194, 119, 144]), (24, [199, 180, 179, 144]), (25, [144, 119, 193, 190])],
)
def test_drawn_items_differ_and_follow_from_the_row(count: int, first: list[int]) -> None:
    """Recorded: other candidates would make the figures of earlier runs incomparable."""
    items_I = torch.arange(100, 200)
    assert drawn(items_I, count, 0)[:4].tolist() == first
    for row in (0, 1):
        one = drawn(items_I, count, row)
        assert torch.equal(one, drawn(items_I, count, row))
        assert len(set(one.tolist())) == count
        assert set(one.tolist()) <= set(items_I.tolist())
    assert drawn(items_I, count, 0).tolist() != drawn(items_I, count, 1).tolist()


def test_all_items_are_candidates_where_as_many_are_asked_for() -> None:
    items_I = torch.arange(5) * 3
    assert drawn(items_I, 5, 1).tolist() == drawn(items_I, 9, 1).tolist() == [0, 3, 6, 9, 12]
    assert sorted(drawn(items_I, 4, 1).tolist()) != drawn(items_I, 4, 2).tolist()
    counts = Counter(item for row in range(4000) for item in drawn(torch.arange(50), 3, row).tolist())
    assert min(counts.values()) > 0.75 * 240
    assert max(counts.values()) < 1.25 * 240, "each of 50 items in 3/50 of 4,000 draws"


def test_rules_count_rows_and_positives_of_an_item() -> None:
    users_N, items_N = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1, 2, 1, 3, 1])
    labels_N, scored_N = torch.tensor([1.0, 0, 0, 1, 1]), torch.tensor([2, 0])
    rules = item_rules(users_N, items_N, labels_N, 6, scored_N)
    rows_P, items_P = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 2, 3, 5])
    assert rules["popularity"](rows_P, items_P).tolist() == [3.0, 1.0, 1.0, 0.0]
    assert rules["positives"](rows_P, items_P).tolist() == [2.0, 0.0, 1.0, 0.0]
    fitted = fit_additive([users_N, items_N], labels_N)
    assert torch.equal(rules["user_item_bias"](rows_P, items_P), fitted([torch.tensor([2, 2, 0, 0]), items_P]))


def test_meeting_an_item_and_clicking_it_multiply() -> None:
    shares_I = log_shares(torch.tensor([3, 0, 1]))
    assert shares_I.exp().tolist() == pytest.approx([(3 + 1 / 3) / 5, 1 / 15, (1 + 1 / 3) / 5])
    assert log_shares(torch.zeros(0, dtype=torch.int64)).tolist() == []
    score = joint(lambda rows_P, items_P: 2.0 * items_P, lambda rows_P, items_P: shares_I[items_P])
    expected = [share / (1 + math.exp(-2.0 * item)) for item, share in enumerate(shares_I.exp().tolist())]
    assert score(torch.zeros(3), torch.arange(3)).exp().tolist() == pytest.approx(expected)


def test_the_time_that_an_event_counts_makes_first_positives_most_likely() -> None:
    """By hand for each of twelve halvings: the first positive item of each user in each quarter of the events."""
    draw = np.random.default_rng(4)
    for spread in (40, 5000):
        times = np.sort(draw.integers(100, 100 + spread, 80))
        items = (times * 6 // (100 + spread) + draw.integers(0, 2, 80)) % 6
        users, labels = draw.integers(0, 5, 80), draw.integers(0, 2, 80)
        span = int(times[-1] - times[0]) + 1
        edges = [times[20], times[40], times[60]]
        first: dict[tuple[int, int], int] = {}
        for row in range(80):
            if labels[row]:
                first.setdefault((users[row], sum(times[row] >= edge for edge in edges)), row)

        def likelihood(
            seconds: int, times: np.ndarray = times, items: np.ndarray = items, first: dict = first
        ) -> float:
            total = 0.0
            for row in first.values():
                recent = (times < times[row]) & (times >= times[row] - seconds)
                total += math.log(((items[recent] == items[row]).sum() + 1 / 6) / (recent.sum() + 1))
            return total

        shuffled = draw.permutation(80)
        shares = RecentShares(torch.from_numpy(items[shuffled]), torch.from_numpy(times[shuffled]), 6)
        assert shares.seconds == 1 << 32
        fitted = shares.fitted(torch.from_numpy(users[shuffled]), torch.from_numpy(labels[shuffled]))
        options = [max(1, span >> halving) for halving in range(12)]
        assert fitted.seconds == max(options, key=likelihood)
        now = torch.full((6,), 2**32 - 1)
        all_I = (torch.bincount(shares.items_N, minlength=6) + 1 / 6) / 81
        assert shares(torch.arange(6), now).exp().tolist() == pytest.approx(all_I.tolist())


def test_repeats_and_items_of_a_user() -> None:
    users_N, items_N = torch.tensor([3, 1, 3, 3, 1]), torch.tensor([5, 5, 5, 0, 5])
    assert repeated_share([(users_N, items_N)]) == pytest.approx(2 / 5)
    assert repeated_share([(users_N[:0], items_N[:0])]) == 0.0
    # User 1's item 5 and user 2's item 0 are not the same pair.
    assert repeated_share([(torch.tensor([1, 2]), torch.tensor([5, 0]))]) == 0.0
    assert repeated_share([(torch.tensor([1, 0]), torch.tensor([0, 1]))]) == 0.0
    assert repeated_share([(torch.tensor([0, 1]), torch.tensor([5, 1]))]) == 0.0
    assert repeated_share([(torch.tensor([0, 2]), torch.tensor([1, 0]))]) == 0.0
    others = torch.tensor([2, 2, 2, 2, 0]), torch.tensor([5, 5, 5, 5, 5])
    assert repeated_share([(users_N, items_N), others]) == pytest.approx(5 / 10)
    items_of = grouped_items(users_N, items_N)
    assert [items_of(user).tolist() for user in range(5)] == [[], [5, 5], [], [5, 5, 0], []]


def test_qualities_of_lists_are_counted_over_pairs_of_users() -> None:
    lists = [[1, 2, 3], [2, 1, 0], [1, 5, 0], [0, 0, 0]]
    counts_I = np.array([7, 3, 3, 0, 1, 3])
    found = list_quality(torch.tensor(lists), 6, counts_I)
    there = [item for one in lists for item in one if item]
    # Each place of a list, and how many of the three other lists have its item.
    shared = sum(item in other for at, one in enumerate(lists) for item in one if item
                 for to, other in enumerate(lists) if to != at)  # fmt: skip
    place = [(sum(counts_I < own) + 0.5 * (sum(counts_I == own) - 1)) / 5 for own in counts_I]
    assert found == pytest.approx(
        {
            "coverage": 4 / 6,
            "overlap": shared / (len(there) * 3),
            "same_first": 2 / 4,
            "popularity": sum(place[item - 1] for item in there) / len(there),
        }
    )
    assert place[0] == 1.0
    none = list_quality(torch.zeros((2, 3), dtype=torch.int64), 6, counts_I)
    assert none == {"coverage": 0.0, "overlap": 0.0, "same_first": 0.0}
    single = list_quality(torch.tensor([[1]]), 1, np.array([4]))
    assert single == {"coverage": 1.0, "overlap": 0.0, "same_first": 1.0, "popularity": 0.0}
    assert "popularity" not in list_quality(torch.tensor(lists), 6)
    pair = list_quality(torch.tensor([[1], [1]]), 2)
    assert pair == {"coverage": 0.5, "overlap": 1.0, "same_first": 1.0}
