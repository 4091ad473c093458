"""Splits and features: what they are, and proof that no label leaks into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recperf.data.config import MovieLensConfig
from recperf.data.known.movielens import GENRES, MovieLens
from recperf.data.known.movielens_like import generate
from recperf.data.rows.clicks import Clicks, split_of
from recperf.data.tables import Rows
from recperf.errors import DataError

T = TypeVar("T")
Split = Literal["random", "last", "cold"]
SPLITS = cast(tuple[Split, ...], ("random", "last", "cold"))


def small_dataset(rows: list[tuple[int, int, int, int]], seed: int = 0) -> MovieLens:
    """A dataset of (user, item, rating, time) rows; users 1..9, items 1..12, three occupations."""
    rng = np.random.default_rng(seed)
    user, item, rating, timestamp = np.array(rows, dtype=np.int64).T
    return MovieLens(
        name="small",
        synthetic=True,
        digest="",
        user=user,
        item=item,
        rating=rating,
        timestamp=timestamp,
        age=rng.integers(7, 74, 10),
        gender=rng.integers(0, 2, 10),
        occupation=rng.integers(1, 4, 10),
        occupations=("artist", "doctor", "writer"),
        genres=rng.integers(0, 2, (13, 19)).astype(np.uint8),
        genre_names=GENRES,
    )


@st.composite
def datasets(draw: st.DrawFn) -> MovieLens:
    row = st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 5), st.integers(0, 6))
    return small_dataset(draw(st.lists(row, min_size=1, max_size=40)), draw(st.integers(0, 3)))


steady = settings(deadline=None, max_examples=30, derandomize=True, database=None)
configs = st.builds(
    MovieLensConfig,
    split=st.sampled_from(SPLITS),
    holdout=st.floats(0.05, 0.95),
    split_seed=st.integers(0, 5),
)


def possible(make: Callable[[MovieLens, MovieLensConfig], T], data: MovieLens, config: MovieLensConfig) -> T:
    """What is made of a dataset whose split leaves no side empty."""
    try:
        return make(data, config)
    except DataError:
        assume(False)
        raise


def flipped(data: MovieLens, rows: NDArray[np.bool_]) -> MovieLens:
    return replace(data, rating=np.where(rows, np.where(data.rating >= 4, 1, 5), data.rating))


def same_features(left: Rows, right: Rows) -> bool:
    return left.dense_ND.tobytes() == right.dense_ND.tobytes() and left.ids_NS.tobytes() == right.ids_NS.tobytes()


@steady
@given(datasets(), configs, st.integers(0, 10**6))
def test_no_label_reaches_any_feature(data: MovieLens, config: MovieLensConfig, seed: int) -> None:
    before = possible(Clicks, data, config)
    changed = np.random.default_rng(seed).random(len(data.user)) < 0.5
    after = Clicks(flipped(data, changed), config)
    for split in ("train", "valid"):
        assert same_features(before.every(split, 1), after.every(split, 1))
        assert np.array_equal(before.labels(split) != after.labels(split), changed[before.index[split]])


@steady
@given(datasets(), configs)
def test_counts_are_of_training_rows(data: MovieLens, config: MovieLensConfig) -> None:
    built = possible(Clicks, data, config)
    training = ~split_of(data, config).valid_N
    for name, ids in (("user count", data.user), ("item count", data.item)):
        counts = [np.log1p((ids[training] == one).sum()) / 5 for one in ids]
        assert built.rows.dense_ND[:, built.dense_names.index(name)].tolist() == pytest.approx(counts, rel=1e-6)


@steady
@given(datasets(), configs)
def test_ids_unseen_in_training_become_row_0(data: MovieLens, config: MovieLensConfig) -> None:
    built = possible(Clicks, data, config)
    valid = split_of(data, config).valid_N
    raw = (data.user, data.item, data.occupation[data.user])
    for feature, column in enumerate(raw):
        seen = set(column[~valid].tolist())
        assert built.every("train", 1).ids_NS[:, feature].tolist() == column[~valid].tolist()
        known = [value if value in seen else 0 for value in column[valid].tolist()]
        assert built.every("valid", 1).ids_NS[:, feature].tolist() == known
        assert column.max() < built.table_rows[feature]


@steady
@given(datasets(), st.floats(0.05, 0.95))
def test_last_holds_out_the_latest_of_each_user(data: MovieLens, holdout: float) -> None:
    config = MovieLensConfig(split="last", holdout=holdout)
    valid = possible(lambda *asked: split_of(*asked).valid_N, data, config)
    for user in np.unique(data.user):
        rows = sorted(np.flatnonzero(data.user == user).tolist(), key=lambda row: (data.timestamp[row], row))
        held = min(int(np.floor(len(rows) * holdout + 0.5)), len(rows) - 1)
        assert [row for row in rows if valid[row]] == rows[len(rows) - held :]


def test_cold_users_never_train() -> None:
    data = generate(1, users=20, items=30, ratings=400)
    config = MovieLensConfig(split="cold")
    valid = split_of(data, config).valid_N
    cold = np.unique(data.user[valid])
    assert len(cold) == 4
    assert not np.isin(data.user[~valid], cold).any()
    built = Clicks(data, config)
    assert (built.every("valid", 1).ids_NS[:, 0] == 0).all()
    count = built.every("valid", 1).dense_ND[:, built.dense_names.index("user count")]
    assert (count == 0).all()


@pytest.mark.parametrize(("split", "ratings"), [("random", 1), ("random", 2), ("last", 5), ("cold", 1)])
def test_a_split_that_leaves_a_side_empty_is_refused(split: Split, ratings: int) -> None:
    rows = [(row + 1, 1, 5, row) for row in range(ratings)]
    with pytest.raises(DataError, match="leaves no row to") as caught:
        Clicks(small_dataset(rows), MovieLensConfig(split=split))
    assert caught.value.fix
