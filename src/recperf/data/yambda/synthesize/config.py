"""Size of the synthetic listening events, and how fast taste drifts in them. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....config import require, within
from ..schema import DAY_S, GAP_MINUTES, TEST_DAYS, TICK_S, TRAIN_DAYS, Split, split_of

MOST_GENRES = 64
_REAL_EVENTS_PER_USER = 4763
_REAL_ITEMS = 9_390_623


@dataclass(frozen=True, kw_only=True)
class YambdaLike:
    """Listening events in Yambda's schema and with its statistics; the same fields give the same events everywhere."""

    users: int = 915
    """Number of users; their ids start at 1."""
    events_per_user: int = 328
    """Mean number of events per user. Half of the users have less than 0.55 of it, the most active 5 to 6 times it."""
    items: int = 6_000
    """Songs in the catalogue; an artist has about 7, an album about 3."""
    genres: int = 24
    """Latent groups of artists; a user likes a few of them at a time."""
    favourites: int = 3
    """Artists that a user prefers in each genre they like."""
    days: int = TRAIN_DAYS
    """Days of training data; a gap of half an hour and a test day follow."""
    drift_days: int = 90
    """Days until a preference changes; the preferences of a user change on different days."""
    seed: int = 7
    """Seed of users, songs and preferences."""

    def __post_init__(self) -> None:
        within(1, self.users, 1 << 30, "users")
        within(1, self.events_per_user, 20_000, "events_per_user")
        within(1, self.items, 1 << 28, "items")
        within(1, self.genres, MOST_GENRES, "genres")
        within(1, self.favourites, 1_000, "favourites")
        within(1, self.days, TRAIN_DAYS, "days")
        within(1, self.drift_days, 10_000, "drift_days")
        within(0, self.seed, 1 << 53, "seed")
        # A song takes about two minutes; a user six times as active as the mean must still fit into the days.
        require(
            self.events_per_user <= 66 * self.days,
            "events_per_user",
            self.events_per_user,
            f"at most {66 * self.days:,}, as many songs as fit into {self.days} days",
        )

    @property
    def events(self) -> int:
        """Approximate number of events."""
        return self.users * self.events_per_user

    @property
    def end_tick(self) -> int:
        """The tick of the last event, test day included; the real 300 days end at about 26,000,000 s."""
        return (self.days * DAY_S + GAP_MINUTES * 60 + TEST_DAYS * DAY_S) // TICK_S

    @property
    def split(self) -> Split:
        """Boundaries of training and test data in seconds, by the rule of the real data."""
        return split_of(self.end_tick * TICK_S)


def default(seed: int = 7) -> YambdaLike:
    """The embedded dataset: about 300,000 events, which a laptop trains on in minutes."""
    return YambdaLike(seed=seed)


def of_size(events: int, *, seed: int = 7) -> YambdaLike:
    """A config with about this many events; users, songs and history lengths grow towards those of the real data."""
    within(1_000, events, 1 << 40, "events")
    root = math.isqrt(events)
    per_user = max(20, min(_REAL_EVENTS_PER_USER, root * 3 // 5))
    return YambdaLike(
        users=max(1, round(events / per_user)),
        events_per_user=per_user,
        # The real data has 133 songs for each root of an event at all three of its sizes; fewer keep small data
        # learnable.
        items=max(100, min(_REAL_ITEMS, root * 133, events // 50)),
        genres=24 if events < 10_000_000 else MOST_GENRES,
        favourites=max(3, min(24, per_user // 100)),
        seed=seed,
    )
