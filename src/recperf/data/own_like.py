"""Made-up logs as users have them, to try an import and to judge quality on shapes that MovieLens does not have.

ratings-like: explicit ratings with genres, few per user, most users seen for a few days only.
sessions-like: clicks without a label, in sessions on one topic, on items whose popularity rises and fades within days.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import sha256, write_atomic

START = 1_700_000_000
DAY_S = 86_400
TOPICS = 12
GENRES = (
    "Action",
    "Comedy",
    "Drama",
    "Family",
    "History",
    "Horror",
    "Music",
    "Mystery",
    "Romance",
    "Sport",
    "War",
    "Western",
)

Row = tuple[Any, ...]
Floats = NDArray[np.float64]


def ratings(random: np.random.Generator, users: int = 6_000, items: int = 1_200) -> Iterator[Row]:
    """Ratings of 1 to 5: the item's quality, the user's mood, and how much the user likes the item's genres."""
    genres_IT = _topics(random, items)
    liked_UT = random.normal(0, 1, (users, TOPICS))
    quality_I, mood_U = random.normal(0, 0.7, items), random.normal(0, 0.6, users)
    popular_I = random.permutation(1.0 / np.arange(1, items + 1) ** 0.8)
    first_U = START + random.integers(0, 360 * DAY_S, users)
    rows: list[Row] = []
    for user in range(users):
        count = 2 + int(random.geometric(0.22))
        affinity_I = genres_IT @ liked_UT[user] / np.sqrt(genres_IT.sum(1))
        items_K = _draw(random, popular_I * np.exp(0.5 * affinity_I), count)
        score = (
            3.4 + mood_U[user] + quality_I[items_K] + 0.7 * affinity_I[items_K] + random.normal(0, 0.6, len(items_K))
        )
        times = first_U[user] + np.cumsum(random.exponential(0.7 * DAY_S, len(items_K))).astype(np.int64)
        for item, value, time in zip(
            items_K.tolist(), np.clip(np.rint(score), 1, 5).astype(int).tolist(), times.tolist()
        ):
            genres = "|".join(GENRES[topic] for topic in np.flatnonzero(genres_IT[item]))
            rows.append((f"u{user}", f"m{item}", value, datetime.fromtimestamp(time, UTC).isoformat()[:19], genres))
    return iter(sorted(rows, key=lambda row: row[3]))


def sessions(random: np.random.Generator, users: int = 1_500, items: int = 3_000) -> Iterator[Row]:
    """Clicks in sessions. An item appears on some day and is half as popular every four days after."""
    days = 60
    topic_I, born_I = random.integers(0, TOPICS, items), random.uniform(-15, days, items)
    appeal_I = random.pareto(1.5, items) + 0.1
    taste_UT = random.dirichlet(np.full(TOPICS, 0.25), users)
    active_U = random.gamma(1.0, 1.0, users)
    rows: list[Row] = []
    for day in range(days):
        age_I = day - born_I
        popular_I = appeal_I * np.where(age_I >= 0, 0.5 ** (age_I / 4), 0.0)
        for user in np.flatnonzero(random.random(users) < 1 - np.exp(-0.25 * active_U)).tolist():
            topic = int(random.choice(TOPICS, p=taste_UT[user]))
            items_K = _draw(random, popular_I * np.where(topic_I == topic, 1.0, 0.02), int(random.integers(2, 7)))
            seconds = random.integers(0, DAY_S - 7_200) + np.cumsum(random.exponential(90.0, len(items_K)))
            times = (1_000 * (START + day * DAY_S + seconds)).astype(np.int64)
            rows += [(f"v{user}", item, time) for item, time in zip(items_K.tolist(), times.tolist())]
    return iter(sorted(rows, key=lambda row: row[2]))


MADE: dict[str, tuple[Row, Callable[[np.random.Generator], Iterator[Row]]]] = {
    "ratings-like": (("userId", "itemId", "rating", "timestamp", "genres"), ratings),
    "sessions-like": (("visitor_id", "item_id", "ts"), sessions),
}
"""The header of each log, and what makes its rows."""


def _topics(random: np.random.Generator, items: int) -> Floats:
    """For every item which topics it has: one to three."""
    topics_IT = np.zeros((items, TOPICS))
    for item, count in enumerate(random.integers(1, 4, items).tolist()):
        topics_IT[item, random.permutation(TOPICS)[:count]] = 1.0
    return topics_IT


def _draw(random: np.random.Generator, weights_I: Floats, count: int) -> NDArray[np.int64]:
    """Different items, drawn by weight."""
    keys_I = random.exponential(1.0, len(weights_I)) / np.maximum(weights_I, 1e-12)
    return np.argpartition(keys_I, count)[:count]


def make(name: str, *, path: Path, seed: int) -> dict[str, Any]:
    """Write a log as CSV."""
    path = path.expanduser()
    if path.exists():
        raise DataError("the file exists already", where={"file": path}, fix="choose another with --path")
    header, generate = MADE[name]
    lines = [header, *generate(np.random.Generator(np.random.PCG64(seed)))]
    text = "".join(",".join(map(str, line)) + "\n" for line in lines)
    write_atomic(path, text.encode())
    facts = {"name": name, "file": str(path), "synthetic": True, "seed": seed, "rows": len(lines) - 1}
    return {**facts, "sha256": sha256(path), "next": f"recperf data import {path}"}
