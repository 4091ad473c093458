"""How large made-up listening events are to be, and how fast taste drifts in them. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....config import require, within
from ..schema import DAY_S, GAP_MINUTES, TEST_DAYS, TICK_S, TRAIN_DAYS

MOST_GENRES = 64
_REAL_EVENTS_PER_USER = 4763
_REAL_ITEMS = 9_390_623


@dataclass(frozen=True, kw_only=True)
class YambdaLike:
    """Listening events in Yambda's schema and with its statistics; the same fields give the same events everywhere."""

    users: int = 915
    """Users; their ids are 1 to this."""
    events_per_user: int = 328
    """Mean events a user; half the users have less than 0.55 of it, the most active 5 to 6 times as many."""
    items: int = 6_000
    """Songs in the catalogue; about 7 share an artist and 3 an album."""
    genres: int = 24
    """Hidden groups of artists: a user likes a few of them at a time."""
    favourites: int = 3
    """Artists of a genre a user comes back to while the genre is in favour."""
    days: int = TRAIN_DAYS
    """Days to train on; half an hour's gap and one day for tests follow."""
    drift_days: int = 90
    """How long a liking lasts: each of a user's likings changes once in so many days, not all on the same day."""
    seed: int = 7
    """Another seed makes other users, songs and likings."""

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
        """About how many events there will be."""
        return self.users * self.events_per_user

    @property
    def end_tick(self) -> int:
        """The tick of the last event, test day included; the real 300 days end at about 26,000,000 s."""
        return (self.days * DAY_S + GAP_MINUTES * 60 + TEST_DAYS * DAY_S) // TICK_S

    @property
    def split(self) -> dict[str, int]:
        """Where training ends and the test day lies, in seconds: the rule of the real data."""
        test_end = self.end_tick * TICK_S
        test_start = test_end - TEST_DAYS * DAY_S
        train_end = test_start - GAP_MINUTES * 60
        return {
            "train_start": train_end - TRAIN_DAYS * DAY_S,
            "train_end": train_end,
            "test_start": test_start,
            "test_end": test_end,
        }


def default(seed: int = 7) -> YambdaLike:
    """What a laptop trains on in minutes: about 300,000 events."""
    return YambdaLike(seed=seed)


def of_size(events: int, *, seed: int = 7) -> YambdaLike:
    """About so many events, with users, songs and histories that grow with them to those of the real data."""
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
