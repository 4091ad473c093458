"""Ratings to a yes/no task: who validates, and the features of every row.

A row is a click when its rating is 4 or 5. Nothing a model sees may depend on a validation label, and no training row
may see its own: a user's mean label and count are taken over that user's other training rows, and every scaling is a
constant written here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .config import MovieLensConfig
from .movielens import MovieLens

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.bool_]

LEAST_LIKED = 4
GENRES_USED = 12
FEATURES = ("user", "item", "occupation")


@dataclass(frozen=True, kw_only=True, eq=False)
class ClickArrays:
    """One side of a split, rows in file order."""

    dense: NDArray[np.float32]
    """[rows, 16], in the order of `Clicks.dense_names`."""
    ids: Ints
    """[3, rows], in the order of `Clicks.feature_names`; 0 stands for an id no training row has."""
    labels: NDArray[np.float32]
    """[rows], 1 when the rating is 4 or 5."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Clicks:
    train: ClickArrays
    valid: ClickArrays
    rows: tuple[int, int, int]
    """Table rows each feature needs: its largest possible id + 1."""
    feature_names: tuple[str, ...]
    dense_names: tuple[str, ...]
    genres: tuple[str, ...]
    """The genres among the dense features, most common first."""


def build(data: MovieLens, config: MovieLensConfig) -> Clicks:
    """Split the ratings and turn both sides into arrays."""
    valid = split_rows(data, config)
    labels = data.rating >= LEAST_LIKED
    chosen = common_genres(data)
    genres = tuple(data.genre_names[index] for index in chosen)
    dense = _dense(data, labels, valid, chosen)
    ids = np.stack(
        [
            _known_in_training(data.user, valid),
            _known_in_training(data.item, valid),
            _known_in_training(data.occupation[data.user], valid),
        ]
    )

    def side(rows: Rows) -> ClickArrays:
        return ClickArrays(
            dense=dense[rows], ids=np.ascontiguousarray(ids[:, rows]), labels=labels[rows].astype(np.float32)
        )

    return Clicks(
        train=side(~valid),
        valid=side(valid),
        rows=(len(data.age), len(data.genres), len(data.occupations) + 1),
        feature_names=FEATURES,
        dense_names=("age", "gender", "user mean", "user count", *genres),
        genres=genres,
    )


def split_rows(data: MovieLens, config: MovieLensConfig) -> Rows:
    """Which ratings validate (True); the answer never looks at a rating's value."""
    split = {"random": _random, "last": _last_of_each_user, "cold": _cold_users}[config.split]
    valid = split(data, config)
    empty = "train" if valid.all() else "validate" if not valid.any() else None
    if empty:
        size = f"{len(valid)} ratings by {len(np.unique(data.user))} users"
        raise DataError(
            f"split {config.split!r} with holdout {config.holdout} leaves no rating to {empty} on ({size})",
            where={"data": data.name},
            fix="use more ratings, another data.split or another data.holdout",
        )
    return valid


def _share(size: int, holdout: float) -> int:
    return round(holdout * size)


def _random(data: MovieLens, config: MovieLensConfig) -> Rows:
    size = len(data.user)
    valid = np.zeros(size, dtype=np.bool_)
    order = np.random.Generator(np.random.PCG64(config.split_seed)).permutation(size)
    valid[order[: _share(size, config.holdout)]] = True
    return valid


def _last_of_each_user(data: MovieLens, config: MovieLensConfig) -> Rows:
    size = len(data.user)
    order = np.lexsort((np.arange(size), data.timestamp, data.user))
    count = np.bincount(data.user)
    end = np.cumsum(count)
    from_end = end[data.user[order]] - np.arange(size)
    held = np.minimum(np.floor(count * config.holdout + 0.5).astype(np.int64), np.maximum(count - 1, 0))
    valid = np.zeros(size, dtype=np.bool_)
    valid[order] = from_end <= held[data.user[order]]
    return valid


def _cold_users(data: MovieLens, config: MovieLensConfig) -> Rows:
    users = np.unique(data.user)
    order = np.random.Generator(np.random.PCG64(config.split_seed)).permutation(len(users))
    cold = users[order[: _share(len(users), config.holdout)]]
    return np.isin(data.user, cold)


def common_genres(data: MovieLens) -> list[int]:
    """The most common genres of the catalogue, ties in the catalogue's own order."""
    count = data.genres.sum(axis=0, dtype=np.int64)
    return [int(index) for index in np.argsort(-count, kind="stable")[:GENRES_USED]]


def _known_in_training(ids: Ints, valid: Rows) -> Ints:
    known = np.zeros(int(ids.max()) + 1, dtype=np.bool_)
    known[ids[~valid]] = True
    return np.where(known[ids], ids, 0)


def user_history(user: Ints, labels: Rows, valid: Rows) -> tuple[Floats, Ints]:
    """For each row, the mean label and number of its user's training rows, the row itself left out.

    Where the user has no other training row the mean is that of all other training rows, and 0.5 where there are none.
    """
    training = ~valid
    own_label = (labels & training).astype(np.int64)
    own = training.astype(np.int64)
    clicks = np.bincount(user, weights=own_label).astype(np.int64)[user] - own_label
    count = np.bincount(user, weights=own).astype(np.int64)[user] - own
    all_clicks, all_count = own_label.sum() - own_label, own.sum() - own
    overall = np.where(all_count > 0, all_clicks / np.maximum(all_count, 1), 0.5)
    return np.where(count > 0, clicks / np.maximum(count, 1), overall), count


def _dense(data: MovieLens, labels: Rows, valid: Rows, genres: list[int]) -> NDArray[np.float32]:
    mean, count = user_history(data.user, labels, valid)
    about_user = [
        (data.age[data.user] - 36.0) / 12.0,
        data.gender[data.user],
        (mean - 0.5) * 4.0,
        np.log1p(count) / 5.0,
    ]
    about_item = data.genres[:, genres][data.item]
    return np.concatenate([np.stack(about_user, axis=1), about_item], axis=1, dtype=np.float32, casting="unsafe")
