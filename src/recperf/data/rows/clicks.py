"""Ratings as a click-prediction task: the split into training and validation rows, and the features of every row.

A row is a click when its rating is 4 or 5. No feature depends on a label: a user's mean label over the other training
rows is lower exactly where the label of the row is 1, which tells it to a model that knows the user. Counts are of
training rows, and every scaling is a constant written here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import SplitConfig, SplitOptions
from ..known.movielens import MovieLens
from ..split.record import decided, facts_of
from ..split.rows import RowSplit
from ..tables import Rows, Split, SplitRows

Ints = NDArray[np.int64]
Marks = NDArray[np.bool_]


class Clicks(SplitRows):
    """Ratings as click rows. An id that no training row has is 0."""

    def __init__(self, ratings: MovieLens, config: SplitConfig) -> None:
        self.split = split_of(ratings, config)
        valid_N = self.split.valid_N
        sparse = ratings.id_features()
        features = dense_features(ratings, *(training_rows(ids, valid_N) for ids in (ratings.user, ratings.item)))
        self.ratings = ratings
        self.keys, self.dense_names = tuple(sparse), tuple(features)
        self.slots = (1,) * len(sparse)
        self.table_rows = tuple(rows for _, rows in sparse.values())
        """Rows that the table of each sparse feature needs: its largest possible id + 1."""
        self.rows = Rows(
            np.stack(list(features.values()), axis=1).astype(np.float32),
            np.stack([_known_in_training(ids, valid_N) for ids, _ in sparse.values()], axis=1).astype(np.int32),
            ratings.liked.astype(np.uint8),
        )
        train_N = np.flatnonzero(~valid_N)
        self.index = {"train": train_N, "valid": np.flatnonzero(valid_N), "fit": train_N, "choose": train_N[:0]}

    def _at(self, index: Ints) -> Rows:
        return self.rows.take(index)

    def labels(self, split: Split) -> NDArray[np.uint8]:
        return self.rows.labels_N[self.index[split]]

    def role_ids(self, role: str, split: Split) -> Ints:
        """As numbered in the data, also those that no training row has."""
        ids_N: Ints = getattr(self.ratings, role)[self.index[split]]
        return ids_N

    def taken(self, split: Split) -> Marks:
        """Of which rows the user took the item: of all, whatever the rating."""
        return np.ones(self.count(split), np.bool_)

    def own_ids(self, role: str) -> None:
        """The numbers of users and items are their ids."""

    def times(self, split: Split) -> Ints:
        return self.ratings.timestamp[self.index[split]]

    def verified(self) -> None: ...

    def describe(self) -> dict[str, Any]:
        """Facts about the data for a result."""
        return {
            "name": self.ratings.name,
            "digest": self.ratings.digest,
            "rows": len(self.rows),
            "train_rows": self.count("train"),
            "valid_rows": self.count("valid"),
            **facts_of(self.split.record),
            "synthetic": self.ratings.synthetic,
            "features": list(self.dense_names),
        }


def dense_features(data: MovieLens, of_user: Ints, of_item: Ints) -> dict[str, NDArray[Any]]:
    """Numbers about every rating, by name, those of its user first; `of_user` and `of_item` count training rows."""
    return {
        **data.user_features(),
        "user count": np.log1p(of_user) / 5.0,
        "item count": np.log1p(of_item) / 5.0,
        **data.item_features(),
    }


def split_of(data: MovieLens, config: SplitConfig) -> RowSplit:
    """Which ratings are held out; the answer never depends on a rating's value."""
    return RowSplit(
        name=data.name,
        data=data.digest,
        rows=len(data.user),
        options=decided(config, lambda: SplitOptions(split="random")),
        users_N=data.user,
        items_N=data.item,
        times_N=data.timestamp * 10**6,
    )


def _known_in_training(ids: Ints, valid: Marks) -> Ints:
    known = np.zeros(int(ids.max()) + 1, dtype=np.bool_)
    known[ids[~valid]] = True
    return np.where(known[ids], ids, 0)


def training_rows(ids: Ints, valid: Marks) -> Ints:
    """For each row, the number of training rows with its id."""
    return np.asarray(np.bincount(ids[~valid], minlength=int(ids.max()) + 1)[ids])
