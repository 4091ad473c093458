"""Differences between models are those over the users, or rows, that both have, user by user."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec import convert

from recperf.runs import paired
from recperf.runs.derive import combined
from recperf.runs.paired import Measured, RankedUsers, common, difference, labels, ranked_users
from recperf.runs.schemas import SampledRanking, SampledScores, SavedScores
from recperf.train.ranking import gains


def users(seed: int, count: int = 400, seeds: int = 1) -> RankedUsers:
    draw = np.random.default_rng(seed)
    return RankedUsers(draw.permutation(1000)[:count], draw.geometric(0.05, size=(seeds, count)))


def test_metrics_are_those_of_rankings_over_some_of_the_users() -> None:
    some = users(1, seeds=2)
    keys = np.sort(some.keys_U)[5:300]
    row = some.row(keys)
    places = [some.keys_U.tolist().index(key) for key in keys]
    gain = gains(torch.from_numpy(some.ranks_SU[:, places].ravel() - 1), torch.zeros(2 * len(keys), dtype=torch.int64))
    assert {name: one.value for name, one in row.items()} == {
        "ndcg_10": pytest.approx(float(gain["ndcg_10"].mean())),
        "hit_rate_10": pytest.approx(float(gain["hit_rate_10"].mean())),
    }


def test_users_are_drawn_with_replacement_and_in_the_same_way_for_all() -> None:
    some = users(2)
    keys = np.sort(some.keys_U)
    (replicates,) = some.row(keys)["ndcg_10"].seeds
    ranks_U = some.ranks_SU[0, np.argsort(some.keys_U)]
    gains_U = np.where(ranks_U <= 10, 1 / np.log2(1 + ranks_U), 0.0)
    assert len(replicates) == 200
    assert np.std(replicates) == pytest.approx(gains_U.std() / len(keys) ** 0.5, rel=0.15)
    assert np.mean(replicates) == pytest.approx(gains_U.mean(), rel=0.02)
    shifted = RankedUsers(some.keys_U[::-1], some.ranks_SU[:, ::-1])
    assert shifted.row(keys)["ndcg_10"].seeds == [pytest.approx(replicates)], "whatever the order of the users"


def test_a_paired_difference_is_as_certain_as_its_users_allow() -> None:
    """A second model ranks every item of some users first that the other ranks second: each replicate has the same
    users, so that the interval is far narrower than those of the two models."""
    draw = np.random.default_rng(3)
    keys, ranks_U = np.arange(2000), draw.choice([2, 50], size=2000, p=[0.3, 0.7])
    better_U = np.where((ranks_U == 2) & (draw.random(2000) < 0.5), 1, ranks_U)
    one, other = (RankedUsers(keys, column[None]).row(keys) for column in (better_U, ranks_U))
    row = difference("ndcg_10", "other", one, other, units=2000)
    gained_U = np.where(better_U < ranks_U, 1 - 1 / np.log2(3), 0.0)
    assert row.difference == pytest.approx(gained_U.mean())
    assert (row.high - row.low) / 2 == pytest.approx(1.96 * gained_U.std() / 2000**0.5, rel=0.15)
    assert (row.standing, row.baseline, row.units, row.needed) == ("above", "other", 2000, None)
    assert row.values == (pytest.approx(one["ndcg_10"].value), pytest.approx(other["ndcg_10"].value))
    alone = np.std(one["ndcg_10"].seeds[0])
    assert np.std(np.subtract(one["ndcg_10"].seeds[0], other["ndcg_10"].seeds[0])) < 0.5 * alone
    # The same model has no difference to itself, of whatever seeds.
    assert difference("ndcg_10", "it", one, one, units=2000).high == 0.0
    turned = difference("ndcg_10", "one", other, one, units=2000)
    assert (turned.difference, turned.standing) == (pytest.approx(-row.difference), "below")


def test_the_users_that_would_tell_follow_from_the_paired_spread() -> None:
    draw, keys = np.random.default_rng(4), np.arange(100)
    sides = [RankedUsers(keys, draw.choice([1, 50], size=(1, 100))) for _ in range(2)]
    rows = [side.row(keys) for side in sides]
    row = difference("ndcg_10", "other", rows[0], rows[1], units=100)
    assert row.standing == "level"
    half, better = (row.high - row.low) / 2, max(rows[0]["ndcg_10"].value, rows[1]["ndcg_10"].value)
    exact = 100 * (half / (0.1 * better)) ** 2
    assert row.needed is not None
    assert exact <= row.needed < 1.1 * exact
    spread_U = np.where(sides[0].ranks_SU[0] == 1, 1.0, 0.0) - np.where(sides[1].ranks_SU[0] == 1, 1.0, 0.0)
    assert row.needed == pytest.approx((1.96 * spread_U.std() / (0.1 * better)) ** 2, rel=0.35)


def test_common_users_are_those_of_all_sides() -> None:
    sides = [users(seed, count) for seed, count in ((1, 400), (2, 500), (3, 900))]
    expected = set.intersection(*(set(side.keys_U.tolist()) for side in sides))
    assert common(sides).tolist() == sorted(expected)


def scores(model: dict[str, list[float]], digest: str = "d", **ranks: list[int]) -> SavedScores:
    rankings = {
        name: {"metrics": {}, "segments": {}, "ndcg_replicates": [], "ranks": values} for name, values in ranks.items()
    }
    seed: dict[str, Any] = {"leading": 0.7, "replicates": model, "rows_digest": digest}
    facts = None
    if rankings:
        keys = list(range(100, 100 + len(ranks["own"])))
        facts = {"users": len(keys), "catalogue": 9, "negatives": 0, "repeats": False, "keys": keys,
                 "baselines": {name: one for name, one in rankings.items() if name != "own"}}  # fmt: skip
        seed["ranking"] = rankings["own"]
    seeds = {"1": seed, "2": {**seed, "rows_digest": "others"}}
    return convert(
        {"rows": 9, "rows_digest": digest, "by": "rows", "units": 9, "seeds": seeds, "ranking": facts}, SavedScores
    )


def test_seeds_of_other_rows_and_rankings_without_ranks_are_left_out() -> None:
    saved = scores({"auc": [0.6, 0.8]}, own=[1, 2, 3])
    found = ranked_users(saved)
    assert found is not None
    assert (found.keys_U.tolist(), found.ranks_SU.tolist()) == ([100, 101, 102], [[1, 2, 3]])
    assert [seed.replicates for seed in paired.scored_seeds(saved)] == [{"auc": [0.6, 0.8]}]
    assert ranked_users(scores({"auc": []})) is None
    empty = convert({"metrics": {}, "segments": {}, "ndcg_replicates": []}, SampledRanking)
    assert RankedUsers.of([1, 2], [empty]) is None
    assert paired.candidates(saved) == (0, False)


def test_metrics_of_labels_have_their_replicates_by_seed() -> None:
    seeds = [convert({"replicates": {"auc": [0.1, 0.2], "other": [1.0]}}, SampledScores) for _ in range(2)]
    assert labels({"auc": 0.5, "log_loss": 0.6}, seeds) == {"auc": Measured(0.5, [[0.1, 0.2], [0.1, 0.2]])}
    assert labels({"auc": 0.5}, []) == {}
    row = difference("auc", "it", labels({"auc": 0.5}, seeds), labels({"auc": 0.4}, seeds[:1]), units=9, by="rows")
    assert (row.difference, row.by) == (pytest.approx(0.1), "rows")
    assert combined([[0.1, 0.2], [0.1, 0.2]]) == pytest.approx([0.1, 0.2])
