"""Makes up a log with the sizes of a published one, some users at a time, and writes it in the order of time.

A user has some tastes, groups of items. The group of an event follows from those of the last two, with a probability of
FOLLOWS, or is a taste; of a group the item of rank r is taken in proportion to 1 / (1 + r / b)^3, where b is a
twentieth of the group. So counting knows what is popular, what a user likes and a part of what follows, and a model
that reads the last two items in their order can know more. Every item is taken by somebody.

Shapes: U users of a block, E events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUPS = 64
FOLLOWS = 0.6
TASTES, MORE = 4, 40
"""Tastes of a user, and events for each further one."""
SPREAD = 0.05
"""Of the ranks of a group, those after which popularity has fallen to an eighth."""
EXTRA = 2.0
"""Events that are drawn for each one that is wanted, where a user takes no item twice."""
BLOCK, PIECE = 4_000_000, 1_000_000
"""Events that are drawn, and rows that are written, at a time."""
AGAIN, BACK = 0.15, 3
"""Share of the events that take an item again where users do, and how many events ago it was taken."""
SPAN = 20 * 365 * 86_400
BEGIN = 800_000_000
"""Seconds of the log, and of its first event since 1970."""


@dataclass(frozen=True, kw_only=True)
class LogSize:
    """The published statistics of a log."""

    users: int
    items: int
    events: int
    fewest: int
    """Events of a user at least; the others are log-normal."""
    median: int
    most: int
    repeats: bool
    """Whether a user takes an item again."""

    def scaled(self, share: float) -> LogSize:
        """A log with this share of the users, items and events."""
        items = max(20 * GROUPS, int(self.items * share))
        return replace(self, users=max(100, int(self.users * share)), items=items, events=int(self.events * share))

    def lengths(self, draw: np.random.Generator) -> NDArray[np.int64]:
        """How many events each user has: together `events`, but for rounding."""
        mean, median = self.events / self.users - self.fewest, self.median - self.fewest
        sigma = (2 * np.log(mean / median)) ** 0.5
        more_U = np.exp(draw.normal(np.log(median), sigma, self.users))
        for _ in range(8):
            more_U = np.minimum(more_U * (mean / more_U.mean()), self.most - self.fewest)
        return self.fewest + np.rint(more_U).astype(np.int64)


LOGS = {
    "ml-20m": LogSize(
        users=138_000, items=27_000, events=20_000_000, fewest=20, median=68, most=9_254, repeats=False
    ),
    "shop": LogSize(
        users=5_000_000, items=1_000_000, events=100_000_000, fewest=3, median=8, most=10_000, repeats=True
    ),
}  # fmt: skip


def write(path: Path, size: LogSize, seed: int) -> dict[str, int]:
    """Write the log as Parquet or, by the name of the file, as CSV; returns what is in it."""
    draw = np.random.Generator(np.random.SFC64(seed))
    lengths_U = size.lengths(draw)
    users_E, items_E, times_E = (np.empty(int(lengths_U.sum()), np.uint32) for _ in range(3))
    user_ids_U, item_ids_I = draw.permutation(size.users) + 1, draw.permutation(size.items) + 1
    filled = 0
    for first, stop in _blocks(lengths_U):
        users, items, times = _drawn(draw, size, lengths_U[first:stop], first, filled)
        part = slice(filled, filled + len(users))
        users_E[part], items_E[part], times_E[part] = user_ids_U[users + first], item_ids_I[items], times
        filled = part.stop
    order_E = np.argsort(times_E[:filled], kind="stable")
    columns = {"user": users_E, "item": items_E, "time": times_E}
    _written(path, columns, order_E)
    return {"users": size.users, "items": size.items, "events": filled, "bytes": path.stat().st_size}


def _blocks(lengths_U: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of users with about BLOCK events."""
    ends_U = np.cumsum(lengths_U)
    edges = np.unique(np.searchsorted(ends_U, np.arange(BLOCK, ends_U[-1], BLOCK)))
    return zip([0, *(edges + 1).tolist()], [*(edges + 1).tolist(), len(lengths_U)])


def _drawn(
    draw: np.random.Generator, size: LogSize, wanted_U: NDArray[np.int64], first: int, before: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Users, items and times of the events of some users, in the order of users; `before`: events of earlier ones."""
    lengths_U = wanted_U if size.repeats else np.rint(wanted_U * EXTRA).astype(np.int64)
    begins_U = np.cumsum(lengths_U) - lengths_U
    users_E = np.repeat(np.arange(len(wanted_U)), lengths_U)
    items_E = _items(draw, size.items, lengths_U, begins_U, first)
    if not size.repeats:
        _, kept = np.unique(users_E * size.items + items_E, return_index=True)
        kept.sort()
        users_E, items_E = users_E[kept], items_E[kept]
        counts_U = np.bincount(users_E, minlength=len(wanted_U))
        place_E = np.arange(len(users_E)) - np.repeat(np.cumsum(counts_U) - counts_U, counts_U)
        there_E = place_E < wanted_U[users_E]
        users_E, items_E = users_E[there_E], items_E[there_E]
    else:
        again = np.flatnonzero(draw.random(len(items_E), np.float32) < AGAIN)
        again = again[users_E[again] == users_E[again - BACK]]
        items_E[again] = items_E[again - BACK]
    # An item that nobody else takes is taken by somebody.
    step = max(1, size.events // size.items // 2)
    strays = np.arange(-before % step, len(items_E), step)
    items_E[strays] = ((before + strays) // step) % size.items
    counts_U = np.bincount(users_E, minlength=len(wanted_U))
    starts_U = draw.random(len(wanted_U)) * 0.95
    pace_U = (0.999 - starts_U) * draw.random(len(wanted_U)) / np.maximum(1, counts_U)
    sums_E = np.cumsum(np.minimum(draw.standard_exponential(len(users_E)), 8.0) * pace_U[users_E])
    sums_E -= np.repeat(np.append(0, sums_E)[np.cumsum(counts_U) - counts_U], counts_U)
    times_E = BEGIN + SPAN * np.minimum(starts_U[users_E] + sums_E, 1.0)
    return users_E, items_E, times_E.astype(np.uint32)


def _items(
    draw: np.random.Generator, items: int, lengths_U: NDArray[np.int64], begins_U: NDArray[np.int64], first: int
) -> NDArray[np.int64]:
    """The items of the events of users, one event of all users at a time: the longest first, so that those that go on
    are the first ones."""
    follows_GG = np.random.default_rng(GROUPS).integers(GROUPS, size=(GROUPS, GROUPS))
    order_U = np.argsort(-lengths_U, kind="stable")
    begins_U, sorted_U = begins_U[order_U], lengths_U[order_U]
    tastes_U, keys_U = TASTES + sorted_U // MORE, (first + order_U) * 2_654_435_761
    groups_E, items_E = np.empty(int(lengths_U.sum()), np.int8), np.empty(int(lengths_U.sum()), np.int64)
    last_U, before_U = (draw.integers(GROUPS, size=len(lengths_U)) for _ in range(2))
    going_T = len(sorted_U) - np.searchsorted(sorted_U[::-1], np.arange(sorted_U[0]), side="right")
    for step, going in enumerate(going_T.tolist()):
        part = slice(0, going)
        liked = (draw.random(going, np.float32) * tastes_U[part]).astype(np.int64)
        taste = (keys_U[part] + liked * 40_503_000_017 >> 13) % GROUPS
        follows = draw.random(going, np.float32) < FOLLOWS
        group = np.where(follows, follows_GG[before_U[part], last_U[part]], taste)
        groups_E[begins_U[part] + step] = group
        before_U, last_U = last_U[part], group
    each = items // GROUPS
    most = 1 - (1 + 1 / SPREAD) ** -2.0
    ranks_E = SPREAD * each * ((1 - draw.random(len(groups_E), np.float32) * most) ** -0.5 - 1)
    np.minimum(ranks_E, each - 1, out=ranks_E)
    np.multiply(ranks_E.astype(np.int64), GROUPS, out=items_E)
    items_E += groups_E
    return items_E


def _written(path: Path, columns: dict[str, NDArray[Any]], order_E: NDArray[np.int64]) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    schema = pa.schema([("user", pa.int32()), ("item", pa.int32()), ("time", pa.int64())])
    opened = csv.CSVWriter if path.suffix == ".csv" else parquet.ParquetWriter
    with opened(str(path), schema) as file:
        for begin in range(0, len(order_E), PIECE):
            rows = order_E[begin : begin + PIECE]
            part = [pa.array(columns[kind.name][rows].astype(kind.type.to_pandas_dtype())) for kind in schema]
            file.write_table(pa.table(part, schema=schema))
