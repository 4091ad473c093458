"""The synthetic dataset yambda-like: its size, random draws that are the same on every machine, and its songs.

Shapes: A artists, I items of the catalogue.

Every draw is a hash of a counter. Apart from integers, only + - * / of doubles are used, because their rounding is the
same on every machine, unlike that of a maths library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....config import require, within
from ....ops.hashing import GOLDEN, WORD, finalise_numpy_
from ...events.kinds import DAY_S
from .schema import GAP_MINUTES, TEST_DAYS, TICK_S, TRAIN_DAYS, Split, split_of

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NAME = "yambda-like"
MOST_GENRES = 64
_REAL_EVENTS_PER_USER = 4763
_REAL_ITEMS = 9_390_623
ODD = np.uint64(0xD1342543DE82EF95)
ONE = 1 << 16
"""Probabilities are integers in units of 1 / ONE."""
_QUALITY = 0.1
_ARTIST_MOST, _ARTIST_TAIL = 100, 40.0
_ALBUM_OPENS = 0.26


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


def key(seed: int, purpose: int) -> np.uint64:
    """The start of the random stream of a purpose."""
    words = np.array([(seed * GOLDEN + purpose) & WORD], np.uint64)
    return np.uint64(finalise_numpy_(finalise_numpy_(words) + ODD)[0])


def counted(numbers: NDArray[Any], begin: np.uint64 | Words) -> Words:
    """A random 64-bit word for each number."""
    return finalise_numpy_(numbers.astype(np.uint64) * ODD + begin)


def bits(words: Words, shift: int, width: int) -> Ints:
    """`width` (below 64) bits of each word, from bit `shift` on."""
    return ((words >> np.uint64(shift)) & np.uint64((1 << width) - 1)).view(np.int64)


def unit(words: Words, shift: int, width: int) -> Floats:
    """Bits as a number in [0, 1); exact up to 53 bits."""
    return bits(words, shift, width).astype(np.float64) / float(1 << width)


def skewed(count: Any, units: Floats, tail: float) -> Ints:
    """Indices 0..count - 1, small ones more often: half of the draws fall in the first 1 / (tail + 2) of them."""
    return np.asarray((count * units / ((tail + 1.0) - tail * units)).astype(np.int64))


def parts(chance: float) -> int:
    """A probability in units of 1 / ONE."""
    return int(chance * ONE)


def either_way(words: Words, shift: int, reach: float) -> Ints:
    """A number in -reach..reach, in units of 1 / ONE."""
    span = parts(2 * reach)
    return (bits(words, shift, 16) * span >> 16) - span // 2


def scattered(numbers: NDArray[Any], count: int) -> Ints:
    """Ids 1..count for numbers 0..count - 1, neighbours far apart.

    With popular rows of a table side by side, lookups would hit the caches more often than real ones do.
    """
    step = count * 5 // 8 | 1
    while math.gcd(step, count) != 1:
        step += 2
    return numbers.astype(np.int64) * step % count + 1


@dataclass(frozen=True, eq=False)
class SongCatalogue:
    """Songs by artist. Songs, artists and albums are numbered from 0 here; `columns` maps the numbers to ids."""

    genres: int
    artists_per_genre: int
    first_A1: NDArray[np.int32]
    """Number of each artist's first song. Artist a is of genre a modulo `genres`; low numbers are popular."""
    quality_I: NDArray[np.int16]
    """What the song adds to the probability of a listen-plus, in units of 1 / ONE."""
    lengths_I: NDArray[np.uint16]
    """Seconds."""
    album_I: NDArray[np.uint32]

    @property
    def items(self) -> int:
        return len(self.lengths_I)

    def columns(self) -> NDArray[np.uint32]:
        """Artist and album id by item id; row 0 belongs to no item."""
        artists, albums = len(self.first_A1) - 1, int(self.album_I[-1]) + 1
        catalogue_I2 = np.zeros((self.items + 1, 2), np.uint32)
        ids = scattered(np.arange(self.items), self.items)
        catalogue_I2[ids, 0] = scattered(np.repeat(np.arange(artists), np.diff(self.first_A1)), artists)
        catalogue_I2[ids, 1] = scattered(self.album_I, albums)
        return catalogue_I2


def make_catalogue(config: YambdaLike) -> SongCatalogue:
    count = config.items
    draws = counted(np.arange(count // 3 + 64), key(config.seed, 1))
    ends = np.cumsum(1 + skewed(_ARTIST_MOST, unit(draws, 0, 32), _ARTIST_TAIL))
    artists = int(np.searchsorted(ends, count)) + 1
    first_A1 = np.minimum(np.append(0, ends[:artists]), count).astype(np.int32)
    words = counted(np.arange(count), key(config.seed, 2))
    opens = bits(words, 0, 16) < parts(_ALBUM_OPENS)
    opens[first_A1[:-1]] = True
    genres = min(config.genres, artists)
    return SongCatalogue(
        genres=genres,
        artists_per_genre=artists // genres,
        first_A1=first_A1,
        quality_I=either_way(words, 16, _QUALITY).astype(np.int16),
        lengths_I=(110 + bits(words, 32, 7) + bits(words, 39, 7)).astype(np.uint16),
        album_I=(np.cumsum(opens) - 1).astype(np.uint32),
    )
