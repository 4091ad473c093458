"""Constants of Yambda: its files, its columns, and the features that DLRMv4 reads. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

REPOSITORY: Final = "yandex/yambda"
REVISION: Final = "dd6f3a19eef5866e346c3270e098baa641a44948"
SIZES: Final = ("50m", "500m", "5b")
EVENTS_FILE: Final = "multi_event.parquet"
ARTISTS_FILE: Final = "artist_item_mapping.parquet"
ALBUMS_FILE: Final = "album_item_mapping.parquet"
LICENCE: Final = "Yandex, Apache-2.0; cite arXiv 2505.22238"
SYNTHETIC_LICENCE: Final = "synthetic, by recperf; no restrictions, no real people or songs"

COLUMNS: Final = {
    "uid": "uint32",
    "timestamp": "uint32",
    "item_id": "uint32",
    "is_organic": "uint8",
    "played_ratio_pct": "uint16",
    "track_length_seconds": "uint32",
    "event_type": "string",
}
NULLABLE: Final = ("played_ratio_pct", "track_length_seconds")
IDS: Final = ("uid", "item_id", "artist_id", "album_id")
MOST_ID: Final = (1 << 31) - 1
"""Batches store ids as int32."""
EVENT_TYPES: Final = ("listen", "like", "dislike", "unlike", "undislike")
"""The type of an event is an index of this tuple."""

TICK_S: Final = 5
DAY_S: Final = 86_400
TRAIN_DAYS, GAP_MINUTES, TEST_DAYS = 300, 30, 1

LISTEN_PLUS, LIKE, SKIP = 1, 2, 4
"""Actions as bits of an event; the model reads them as one number."""
ACTION_BITS: Final = LISTEN_PLUS | LIKE | SKIP
LISTENS: Final = LISTEN_PLUS | SKIP
LEAST_PLAYED: Final = 50
"""A listen with at least this played ratio, in percent, is a listen-plus; any other is a skip."""

ORGANIC: Final = 8
TYPE_SHIFT: Final = 4
"""The kind of an event is one byte: actions in bits 0 to 2, organic in bit 3, the event type in bits 4 to 6."""
DRAWN: Final = 128
"""Bit 7: a negative that an import drew. It is no action, so that no history contains it, but it is an anchor."""
ANCHORS: Final = LISTENS | DRAWN

CROSSES: Final = {
    "user_x_artist": (("uid", "artist"), 100_000_000),
    "user_x_album": (("uid", "album"), 40_000_000),
    "user_x_hour": (("uid", "hour"), 24_000_000),
    "item_x_hour": (("item", "hour"), 40_000_000),
    "artist_x_hour": (("artist", "hour"), 32_000_000),
    "user_x_is_organic": (("uid", "organic"), 2_000_000),
    "user_x_artist_x_hour": (("uid", "artist", "hour"), 40_000_000),
}
"""Cross features: the features that are hashed together, and the table rows that the hash is reduced to."""

CONTEXT: Final = ("uid", *CROSSES)
HISTORY: Final = ("item_id", "artist_id", "album_id")
CANDIDATE: Final = ("item_candidate_id", "item_candidate_artist_id", "item_candidate_album_id")

RATES: Final = (
    "overall",
    *("user", "user_listens", "user_recent", "item", "item_listens", "item_recent"),
    *("user_item", "user_item_listens", "artist", "artist_listens", "user_artist", "user_artist_listens"),
    *("user_effect", "item_effect", "since_last_event", "item_trend"),
    *("neighbours", "neighbours_sum", "neighbours_users"),
)
"""Columns of the running rates (rates.py): log odds of shares of positive listens and by which users and items
differ from what is expected of each other, logarithms of counts and times."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The split by time: training is [train_start, train_end), test is [test_start, test_end)."""

    train_start: int
    train_end: int
    test_start: int
    test_end: int


def split_of(t_max: int) -> Split:
    """The benchmark's split of a stream whose last event is at `t_max`."""
    test_start = t_max - TEST_DAYS * DAY_S
    train_end = test_start - GAP_MINUTES * 60
    return Split(train_start=train_end - TRAIN_DAYS * DAY_S, train_end=train_end, test_start=test_start, test_end=t_max)
