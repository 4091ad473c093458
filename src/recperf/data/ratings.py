"""Ratings of items by users, from any dataset: what `clicks.build` turns into training samples."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import sha256
from .config import RatingsConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ratings:
    """One entry per rating. Ids count from 1: row 0 of a table serves ids that no training row has.

    A dataset that knows more about users and items extends this class and its three methods.
    """

    name: str
    synthetic: bool
    """Whether a generator made the ratings."""
    digest: str
    """SHA-256 of the source."""
    user: Ints
    item: Ints
    rating: NDArray[Any]
    timestamp: Ints
    """Unix seconds."""
    liked_from: float = 4.0
    """A rating of at least this is a click."""
    own_ids: dict[str, list[int | str]] | None = None
    """The user's own ids of all users and items, in the order of their numbers; None where the numbers are the ids."""

    def id_features(self) -> dict[str, tuple[Ints, int]]:
        """For each sparse feature the id of every rating, and the rows of its table: its largest id + 1."""
        return {"user": (self.user, int(self.user.max()) + 1), "item": (self.item, int(self.item.max()) + 1)}

    def user_features(self) -> dict[str, NDArray[Any]]:
        """Numbers about the user of every rating, by name."""
        return {}

    def item_features(self) -> dict[str, NDArray[Any]]:
        """Numbers about the item of every rating, by name."""
        return {}


def read_ratings(config: RatingsConfig) -> Ratings:
    """Read a CSV file of ratings into memory. Users and items may be any text; they are numbered in sorted order."""
    path = config.path.expanduser()
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter=config.delimiter, strict=True)
            missing = {config.user, config.item, config.rating, config.time} - {None, *(reader.fieldnames or ())}
            if missing:
                what = f"the file has no column {', '.join(map(repr, sorted(map(str, missing))))}"
                known = ", ".join(reader.fieldnames or ())
                raise DataError(what, where={"file": path, "columns": known}, fix="name its columns in the data config")
            rows = [_row(record, config) for record in reader]
    except OSError as error:
        what = f"the ratings file cannot be read: {error.strerror}"
        raise DataError(what, where={"file": path}, fix="check data.path") from None
    except (csv.Error, UnicodeDecodeError, ValueError) as error:
        what = f"line {reader.line_num}: {error}"
        raise DataError(what, where={"file": path}, fix="correct the line, or check data.delimiter") from None
    if not rows:
        raise DataError("the file has no ratings", where={"file": path}, fix="check data.path")
    users, items, ratings, times = zip(*rows)
    (own_users, user), (own_items, item) = (np.unique(ids, return_inverse=True) for ids in (users, items))
    return Ratings(
        name=path.name,
        synthetic=False,
        digest=sha256(path),
        user=user + 1,
        item=item + 1,
        rating=np.array(ratings),
        timestamp=np.array(times),
        liked_from=config.liked_from,
        own_ids={"user": own_users.tolist(), "item": own_items.tolist()},
    )


def _row(record: dict[str, str | None], config: RatingsConfig) -> tuple[str, str, float, int]:
    user, item, rating = (record[name] or "" for name in (config.user, config.item, config.rating))
    time = "0" if config.time is None else record[config.time] or ""
    if not (user and item):
        raise ValueError(f"no {config.item if user else config.user}")
    if not math.isfinite(float(rating)):
        raise ValueError(f"{config.rating} {rating!r} is not a finite number")
    return user, item, float(rating), int(time)
