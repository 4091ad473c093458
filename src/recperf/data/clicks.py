"""Ratings as a click-prediction task: the split into training and validation rows, and the features of every row.

A row is a click when its rating is 4 or 5. Nothing a model sees may depend on a validation
label, and no training row may see its own: a user's mean label and count are taken over that user's other training
rows, and every scaling is a constant written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .config import SplitConfig
from .movielens import MovieLens

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClickArrays:
    """Training or validation rows, in the order of the file."""

    dense: NDArray[np.float32]
    """[rows, dense features], in the order of `Clicks.dense_names`."""
    ids: Ints
    """[sparse features, rows], in the order of `Clicks.feature_names`; 0 stands for an id that no training row has."""
    labels: NDArray[np.float32]
    """[rows], 1 for a click."""
    users: Ints
    """[rows], as numbered in the data, also those that no training row has."""
    items: Ints
    times: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Clicks:
    train: ClickArrays
    valid: ClickArrays
    rows: tuple[int, ...]
    """Rows that the table of each sparse feature needs: its largest possible id + 1."""
    feature_names: tuple[str, ...]
    dense_names: tuple[str, ...]


def build(data: MovieLens, config: SplitConfig) -> Clicks:
    """Split the ratings and turn both sides into arrays."""
    valid = split_rows(data, config)
    labels = data.liked
    sparse = data.id_features()
    ids = np.stack([_known_in_training(ids, valid) for ids, _ in sparse.values()])
    mean, count = user_history(data.user, labels, valid)
    features = dense_features(data, mean, count)
    dense = np.stack(list(features.values()), axis=1).astype(np.float32)

    def side(rows: Rows) -> ClickArrays:
        return ClickArrays(
            dense=dense[rows],
            ids=np.ascontiguousarray(ids[:, rows]),
            labels=labels[rows].astype(np.float32),
            users=data.user[rows],
            items=data.item[rows],
            times=data.timestamp[rows],
        )

    return Clicks(
        train=side(~valid),
        valid=side(valid),
        rows=tuple(rows for _, rows in sparse.values()),
        feature_names=tuple(sparse),
        dense_names=tuple(features),
    )


def dense_features(data: MovieLens, mean: Floats, count: Ints) -> dict[str, NDArray[Any]]:
    """Numbers about every rating, by name; `mean` and `count` are those of its user's training rows."""
    return {
        **data.user_features(),
        "user mean": (mean - 0.5) * 4.0,
        "user count": np.log1p(count) / 5.0,
        **data.item_features(),
    }


def split_rows(data: MovieLens, config: SplitConfig) -> Rows:
    """Mark the validation rows; the answer never depends on a rating's value."""
    return mark_validation(config, name=data.name, rows=len(data.user), users=data.user, times=data.timestamp)


def mark_validation(
    config: SplitConfig, *, name: str, rows: int, users: Ints | None = None, times: NDArray[Any] | None = None
) -> Rows:
    """Mark the validation rows among rows with a user and a time each, where those are known.

    Rows of the same time, or without one, count in the order of the file.
    """
    if config.split in ("last", "cold") and users is None:
        what = f"split {config.split!r} needs a user column, which {name} does not have"
        raise DataError(what, fix="import it with --user COLUMN, or --data.split random")
    times = np.zeros(rows) if times is None else times
    valid = np.zeros(rows, dtype=np.bool_)
    generator = np.random.Generator(np.random.PCG64(config.split_seed))
    if config.split == "random":
        valid[generator.permutation(rows)[: round(config.holdout * rows)]] = True
    elif config.split == "time":
        valid[np.argsort(times, kind="stable")[rows - round(config.holdout * rows) :]] = True
    elif config.split == "cold":
        assert users is not None
        known = np.unique(users)
        valid = np.isin(users, known[generator.permutation(len(known))[: round(config.holdout * len(known))]])
    else:
        assert users is not None
        valid = _last_of_each_user(users, times, config)
    empty = "train" if valid.all() else "validate" if not valid.any() else None
    if empty:
        size = f"{rows:,} rows" + (f" of {len(np.unique(users)):,} users" if users is not None else "")
        raise DataError(
            f"split {config.split!r} with holdout {config.holdout} leaves no row to {empty} on ({size})",
            where={"data": name},
            fix="use more rows, another data.split or another data.holdout",
        )
    return valid


def _last_of_each_user(users: Ints, times: NDArray[Any], config: SplitConfig) -> Rows:
    size = len(users)
    order = np.lexsort((np.arange(size), times, users))
    count = np.bincount(users)
    end = np.cumsum(count)
    from_end = end[users[order]] - np.arange(size)
    held = np.minimum(np.floor(count * config.holdout + 0.5).astype(np.int64), np.maximum(count - 1, 0))
    valid = np.zeros(size, dtype=np.bool_)
    valid[order] = from_end <= held[users[order]]
    return valid


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
