"""The features that DLRMv4 reads. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

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

ORGANIC: Final = 8
"""Bit 3 of a stored event: no recommender was behind it."""

RATES: Final = (
    "overall",
    *("user", "user_listens", "user_recent", "item", "item_listens", "item_recent"),
    *("user_item", "user_item_listens", "artist", "artist_listens", "user_artist", "user_artist_listens"),
    *("user_effect", "item_effect", "since_last_event", "item_trend"),
    *("neighbours", "neighbours_sum", "neighbours_users"),
)
"""Columns of the running rates (rates.py): log odds of shares of positive listens and by which users and items
differ from what is expected of each other, logarithms of counts and times."""
RUNNING_RATES: Final = "running rates"
"""The name of all of them as one input."""
