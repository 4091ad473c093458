"""Constants of Yambda: its files, its columns and its split. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...events.kinds import DAY_S

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
ITEM_GROUPS: Final = ("artists", "albums")
"""Names of the groups that items have as numbers in a store."""
TICK_S: Final = 5
TRAIN_DAYS, GAP_MINUTES, TEST_DAYS = 300, 30, 1


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
