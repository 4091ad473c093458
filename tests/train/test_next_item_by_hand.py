"""Ranks, histories and item-to-item baselines, event by event in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from next_item_logs import SEQUENCES, data_of

from recperf.data.next_item import NextItemData, Targets
from recperf.train import item_rules, next_item
from recperf.train.item_rules import DAMPINGS, DECAYS, RecentPopularity, baselines, following, neighbours
from recperf.train.next_item import rank, seen_by_default


def drawn_data(users: int, items: int, longest: int, seed: int = 0) -> tuple[NextItemData, list[list[int]]]:
    draw = np.random.default_rng(seed)
    sequences = [draw.integers(1, items + 1, draw.integers(1, longest)).tolist() for _ in range(users)]
    sequences[0][0] = items
    return data_of(sequences, times=True), sequences


def counted_following(
    data: NextItemData, sequences: list[list[int]], decay: float, damping: float
) -> list[pytest.approx]:
    """What came up to ten places after another item in training, for the last ten items of each history."""
    after: Counter[tuple[int, int]] = Counter()
    for one in sequences:
        trained = one[:-2] if len(one) > 2 else one
        for at, item in enumerate(trained):
            for distance, other in enumerate(trained[at + 1 : at + 11]):
                after[item, other] += decay**distance  # type: ignore[assignment]
    totals: Counter[int] = Counter()
    for (item, _), weight in after.items():
        totals[item] += weight
    rows = []
    for one in sequences:
        if len(one) > 2:
            scores = np.zeros(data.items)
            for age, item in enumerate(reversed(one[:-1][-10:])):
                for other in range(1, data.items + 1):
                    if after[item, other]:
                        scores[other - 1] += decay**age * after[item, other] / totals[item] ** damping
            rows.append(pytest.approx(scores.tolist(), rel=1e-9, abs=1e-12))
    return rows


@pytest.mark.parametrize("entries", [1 << 22, 1, 5])
def test_items_that_follow_are_counted_ten_places_far(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many entries are added up at a time."""
    assert (item_rules.LAST, DECAYS, DAMPINGS) == (10, (0.5, 0.7, 0.85), (0.0, 0.5, 1.0))
    monkeypatch.setattr(item_rules, "ENTRIES", entries)
    data, sequences = drawn_data(7, 6, 18)
    for decay in (0.5, 0.85):
        for damping, counted in zip((0.0, 0.5, 1.0), following(data, decay)):
            assert counted(data.test()).tolist() == counted_following(data, sequences, decay, damping)


def test_each_item_has_the_hundred_most_similar_ones() -> None:
    """One user took items 1 to 120, another 119 and 120, a third 120: of 120, item 119 is the most similar one."""
    data = data_of([[*range(1, 121), 1, 1], [119, 120, 1, 1], [120, 1, 1]])
    alike = neighbours(data)
    rows = data_of([[item, 1, 1] for item in range(1, 121)])
    scores = alike(Targets(np.zeros(1, np.int64), np.ones(1, np.int64))).numpy()[0]
    assert np.count_nonzero(scores) == 100
    # Of item 1's 119 neighbours: those whose cosine is 1 in order of their numbers; 119 and 120 have 0.71 and 0.58.
    assert np.flatnonzero(scores).tolist() == list(range(1, 101))
    assert set(scores[1:101]) == {1.0}
    last = alike(Targets(np.array([2]), np.array([len(data.items_E) - 2]))).numpy()[0]
    assert last[118] == pytest.approx(2 / math.sqrt(2 * 3))
    assert last[0] == pytest.approx(1 / math.sqrt(3))
    assert (np.count_nonzero(last), rows.items) == (100, 120)
    assert (alike.decay, item_rules.NEIGHBOURS) == (0.5, 100)


@pytest.mark.parametrize(("most", "last"), [(700, 25), (784, 28), (783, 25), (0, 1), (1, 1), (4, 2), (3, 1)])
def test_of_long_histories_the_latest_items_count(most: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 items: an eighth fewer at a time, 28, 25, 22, until their pairs are few enough."""
    monkeypatch.setattr(item_rules, "MOST_PAIRS", most)
    alike = neighbours(data_of([[*range(1, 33), 1, 1]]))
    scores = alike(Targets(np.zeros(1, np.int64), np.array([32]))).numpy()[0]
    # Each of the last ten items, 23 to 32, that counts has the others that count beside it.
    counting = set(range(33 - last, 33)) if last > 1 else set()
    assert set((np.flatnonzero(scores) + 1).tolist()) == counting
    first = alike(Targets(np.zeros(1, np.int64), np.array([1]))).numpy()[0]
    assert not first.any(), "item 1 is too old"


def test_ranks_do_not_depend_on_how_many_scores_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = drawn_data(9, 6, 12, seed=1)
    test, draw = data.test(), np.random.default_rng(2)
    scores = torch.from_numpy(draw.integers(0, 3, (data.users, data.items)).astype(float))
    sizes: list[int] = []

    def score(targets: Targets) -> torch.Tensor:
        sizes.append(len(targets))
        return scores[targets.users_N]

    whole = rank(data, test, score, seen="left-out", top=4)
    for held, together in ((2 * data.items, 2), (3 * data.items - 1, 2), (1, 1), (0, 1)):
        monkeypatch.setattr(next_item, "SCORES", held)
        sizes.clear()
        parts = rank(data, test, score, seen="left-out", top=4)
        assert torch.equal(parts.ranks_N, whole.ranks_N)
        assert sizes[0] == together
        assert parts.lists_NK.shape == whole.lists_NK.shape == (len(test), 4)
    for place, user in enumerate(test.users_N):
        begin, position = data.offsets_U1[user], test.positions_N[place]
        seen = set(data.items_E[begin:position].tolist())
        target = int(data.items_E[position])
        own = -math.inf if target in seen else float(scores[user, target - 1])
        values = [-math.inf if item in seen else float(scores[user, item - 1]) for item in range(1, data.items + 1)]
        assert int(whole.ranks_N[place]) == sum(value >= own for value in values)
        left = [item for item in whole.lists_NK[place].tolist() if item]
        assert not set(left) & seen
        assert len(left) == min(4, data.items - len(seen))
        assert [values[item - 1] for item in left] == sorted(values, reverse=True)[: len(left)]
    monkeypatch.setattr(next_item, "SCORES", 1 << 22)
    assert rank(data, Targets(test.users_N[:0], test.positions_N[:0]), score).ranks_N.tolist() == []
    assert rank(data, test, score).lists_NK.shape == (len(test), 6), "ten, of six items"
    assert whole.seen == "left-out"


def test_items_are_taken_again_where_more_than_a_twentieth_of_the_events_repeat() -> None:
    fresh = list(range(1, 101))
    for repeats, expected in ((0, "left-out"), (4, "left-out"), (6, "kept")):
        history = fresh[: 100 - repeats] + fresh[:repeats]
        assert seen_by_default(data_of([[*history, 1, 1]])) == expected
    # The same item of two users is no repeat: 6 of 100 events are, for one user only.
    assert seen_by_default(data_of([[*range(1, 51), 1, 1], [*range(1, 51), 1, 1]])) == "left-out"
    none, begins_U = np.zeros(0, np.int64), np.array([0, 2])
    split: Any = SimpleNamespace(taken=lambda _: np.ones(4), cuts=(begins_U, begins_U), targets=lambda _: (none, none))
    nothing = replace(data_of([[1, 2], [2, 1]], times=True), split=split)
    assert seen_by_default(nothing) == "left-out"


def test_settings_are_compared_on_some_validation_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert item_rules.COMPARED == 1000
    data = data_of([[1, 2, 3, 4, 1 + user % 5] for user in range(7)])
    for most, expected in ((2, [0, 4]), (3, [0, 3, 6]), (7, list(range(7))), (6, [0, 2, 4, 6]), (100, list(range(7)))):
        monkeypatch.setattr(item_rules, "COMPARED", most)
        asked: list[int] = []

        def bad(targets: Targets, asked: list[int] = asked) -> torch.Tensor:
            asked += targets.users_N.tolist()
            return torch.tensor([1.0, 1, 1, 0, 1]).expand(len(targets), -1)

        def good(targets: Targets) -> torch.Tensor:
            return torch.tensor([1.0, 1, 1, 2, 0]).expand(len(targets), -1)

        assert item_rules.best(data, [bad, good]) is good
        assert item_rules.best(data, [good, bad]) is good
        assert asked == 2 * expected


def test_recent_popularity_compares_twelve_halvings_of_the_time() -> None:
    data = data_of([[1] * 40, [2] * 30], times=True)
    # Training ends after 38 events of 100 s: 3,701 seconds.
    seconds = [option.seconds for option in RecentPopularity.options(data)]
    assert seconds == [max(1, 3701 // 2**halving) for halving in range(12)]
    assert len(seconds) == 12
    recent = RecentPopularity.options(data)[3]
    targets = Targets(np.array([1, 0, 0]), np.array([40 + 29, 20, 0]))
    for row, moment in enumerate((2900, 2000, 0)):
        expected = [sum(moment - 462 <= 100 * at < moment for at in range(count)) for count in (38, 28)]
        assert recent(targets)[row].tolist() == expected
    assert "recent_popularity" not in baselines(data_of(SEQUENCES))


def test_histories_are_the_events_before_each_target() -> None:
    data = data_of(SEQUENCES)
    targets = Targets(np.array([1, 2, 3]), np.array([7, 14, 14]))
    rows, events = next_item.histories(data, targets)
    assert rows.tolist() == [0, 0, 0, *5 * [1]]
    assert events.tolist() == [4, 5, 6, 9, 10, 11, 12, 13]
    rows, events = next_item.histories(data, targets, 2)
    assert (rows.tolist(), events.tolist()) == ([0, 0, 1, 1], [5, 6, 12, 13])
