"""Synthetic listening events, generated for a block of users at a time and written as an event store.

Shapes: U users of a block, S sessions, L listens, E events (listens and the reactions to them), K genres that a user
likes at a time.

The model: a user likes K genres and, in each, a few artists. Every `drift_days` each genre is replaced by another, at
its own time. Most listens go to the favourite artists, some to other artists of the liked genres, some to any artist.
A user and an artist either match or not, which changes with time too. Whether half of a song is played depends on the
match, on the genre, on the mood of the session, and a little on user, song and hour. So recent events with an artist
predict the next one, and old events mislead.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....config import to_json
from ....ops.hashing import GOLDEN, finalise_numpy_
from ....stop import poll
from ...events.kinds import DAY_S
from ...events.manifest import EventManifest
from ...events.store import VERSION
from ...events.writer import StoreWriter, finished
from .rows import EVENT_TYPES, LEAST_PLAYED, EventRows
from .schema import ITEM_GROUPS, SYNTHETIC_LICENCE, TICK_S
from .yambda_like import (
    NAME,
    ODD,
    Ints,
    SongCatalogue,
    Words,
    YambdaLike,
    bits,
    counted,
    either_way,
    key,
    make_catalogue,
    parts,
    scattered,
    skewed,
    unit,
)

STREAM = 1
"""Version of the generator: another number means that the same config gives other events."""
COMMIT_EVENTS = 1 << 23
"""Events between two commits: the most work that a killed process loses."""
BLOCK_LISTENS = 1 << 16
"""Listens generated at a time: their arrays fit into the cache of a core."""
_STRIDE = 1 << 12
_DAY_TICKS = DAY_S // TICK_S
_QUARTERS = 4

_LISTENS_PER_EVENT = 0.972
_ACTIVITY_GAP, _ACTIVITY_SLOPE, _ACTIVITY_MEAN = 0.09, 0.577, 2.0071
"""Activity is u / (1 + gap - u) + slope u for u uniform in 0..1, which has this mean; median and maximum are then those
of the real data, 0.566 and 5.82 of the mean."""
_SESSION_LISTENS = 12
_LATE_SHARE, _LATEST_SHARE = 0.25, 0.6
_AT_PEAK, _PEAK_TICKS = 0.75, 3 * 3600 // TICK_S
_SLOTS, _FIRST_SLOT, _FIRST_TWO_SLOTS = 3, 0.5, 0.8
_FAVOURITE, _SAME_GENRE = 0.76, 0.87
"""A draw below the first goes to a favourite artist, below the second to any artist of a liked genre."""
_SONG_TAIL, _FAVOURITE_TAIL = 3.0, 3.0
_ORGANIC, _ORGANIC_ELSEWHERE = 0.82, 0.28
_MATCH = 0.62
_BASE, _MATCH_GAIN, _GENRE_GAIN = 0.1, 0.6, 0.21
_MOOD, _KINDNESS, _HOUR = 0.17, 0.12, 0.06
_LEAST, _MOST = 0.03, 0.97
_LIKE, _LIKE_ANYWAY, _DISLIKE = 0.036, 0.012, 0.012
_UNLIKE, _UNDISLIKE = 0.33, 0.2
_LIKE_TYPE, _DISLIKE_TYPE = EVENT_TYPES.index("like"), EVENT_TYPES.index("dislike")
_WITHDRAWAL = EVENT_TYPES.index("unlike") - _LIKE_TYPE
"""Added to the type of a like or dislike, this is the type of its withdrawal."""


class Generator:
    """Generates the events of a config from any user on. An event does not depend on the block it is in."""

    def __init__(self, config: YambdaLike) -> None:
        self.config = config
        self.catalogue = make_catalogue(config)
        # Half of the plays go to about the square root of the number of artists, in small and large catalogues.
        self._artist_tail = float(math.isqrt(self.catalogue.artists_per_genre))
        self._ratios = _ratio_table()
        self._users, self._listens, self._more, self._pairs = (key(config.seed, purpose) for purpose in range(16, 20))
        self._activity = key(config.seed, 3)
        genre_quarters = counted(np.arange(self.catalogue.genres * _QUARTERS), key(config.seed, 4))
        self._genre_quarters = either_way(genre_quarters, 0, _HOUR)

    def listens(self, users: Ints) -> Ints:
        """Number of listens of each user. Steps of the golden ratio fill 0..1 evenly, so the total is as configured."""
        place = unit(users.astype(np.uint64) * np.uint64(GOLDEN) + self._activity, 11, 53)
        activity = place / (1.0 + _ACTIVITY_GAP - place) + _ACTIVITY_SLOPE * place
        scale = self.config.events_per_user * _LISTENS_PER_EVENT / _ACTIVITY_MEAN
        return np.maximum(1, (scale * activity + 0.5).astype(np.int64))

    def blocks(self, first_user: int = 0, listens: int = BLOCK_LISTENS) -> Iterator[tuple[EventRows, int]]:
        """Blocks of about `listens` listens from a user on (counted from 0), each with the first user of the next."""
        user = first_user
        while user < self.config.users:
            counts = self.listens(np.arange(user, min(self.config.users, user + _STRIDE)))
            users = max(1, int(np.searchsorted(np.cumsum(counts), listens, side="right")))
            block = self._block(user, counts[:users])
            user += users
            yield block, user

    def _block(self, first_user: int, listens_U: Ints) -> EventRows:
        keys_U = counted(np.arange(first_user, first_user + len(listens_U)), self._users)
        first_U = np.cumsum(listens_U) - listens_U
        draws_L = np.arange(int(listens_U.sum()), dtype=np.uint64) * ODD
        draws_L += np.repeat(keys_U + self._listens - first_U.astype(np.uint64) * ODD, listens_U)
        finalise_numpy_(draws_L)
        more_L = finalise_numpy_(draws_L + self._more)
        sessions = _Sessions(self.config, self.catalogue, keys_U, first_U, draws_L)
        favourite_L = bits(draws_L, 20, 16) < parts(_FAVOURITE)
        genre_L, artist_L = self._artists(sessions, favourite_L, draws_L, more_L)
        first_L = self.catalogue.first_A1[artist_L]
        songs_L = self.catalogue.first_A1[artist_L + 1] - first_L
        item_L = first_L + skewed(songs_L, unit(draws_L, 48, 16), _SONG_TAIL)
        match_L = self._matches(np.repeat(keys_U, listens_U), artist_L, sessions)
        chance_L = self._chances(sessions, genre_L, item_L, match_L)
        plus_L = bits(more_L, 0, 16) < chance_L
        ratio_L = self._ratios[bits(more_L, 16, 10) + plus_L * 1024]
        length_L = self.catalogue.lengths_I[item_L]
        played_L = (length_L * ratio_L.astype(np.int64) + TICK_S * 50) // (TICK_S * 100)
        organic_L = bits(draws_L, 0, 8) < np.where(favourite_L, int(_ORGANIC * 256), int(_ORGANIC_ELSEWHERE * 256))
        listens: dict[str, NDArray[Any]] = {
            "uids": np.repeat(np.arange(first_user + 1, first_user + 1 + len(listens_U), dtype=np.uint32), listens_U),
            "items": scattered(item_L, self.catalogue.items).astype(np.uint32),
            "times": sessions.times(played_L).astype(np.uint32),
            "ratios": ratio_L,
            "organic": organic_L.view(np.uint8),
        }
        return self._ended(_with_reactions(listens, played_L, more_L, plus_L, match_L), first_user)

    def _artists(
        self, sessions: _Sessions, favourite_L: NDArray[np.bool_], draws_L: Words, more_L: Words
    ) -> tuple[Ints, Ints]:
        """Genre and artist of each listen."""
        draw_L = bits(draws_L, 36, 12)
        slot_L = (draw_L >= int(_FIRST_SLOT * 4096)).view(np.int8) + (draw_L >= int(_FIRST_TWO_SLOTS * 4096))
        position_L = sessions.repeat(np.arange(0, sessions.count * _SLOTS, _SLOTS)) + slot_L
        number_L = skewed(self.config.favourites, unit(more_L, 52, 12), _FAVOURITE_TAIL)
        number_L += sessions.repeat(sessions.focus_S)
        number_L -= (number_L >= self.config.favourites) * self.config.favourites
        words_L = number_L.view(np.uint64) * ODD
        words_L += sessions.slots_SK.reshape(-1)[position_L]
        words_L = finalise_numpy_(np.where(favourite_L, words_L, draws_L))
        same_L = bits(draws_L, 20, 16) < parts(_SAME_GENRE)
        anywhere_L = bits(words_L, 0, 16) * self.catalogue.genres >> 16
        genre_L = np.where(same_L, sessions.genres_SK.reshape(-1)[position_L], anywhere_L)
        rank_L = skewed(self.catalogue.artists_per_genre, unit(words_L, 32, 32), self._artist_tail)
        return genre_L, rank_L * self.catalogue.genres + genre_L

    def _matches(self, keys_L: Words, artist_L: Ints, sessions: _Sessions) -> NDArray[np.bool_]:
        """Whether user and artist match on that day."""
        pairs_L = counted(artist_L, keys_L + self._pairs)
        periods_L = _period(sessions.repeat(sessions.day_S), pairs_L, self.config.drift_days)
        return bits(counted(periods_L, pairs_L), 0, 16) < parts(_MATCH)

    def _chances(self, sessions: _Sessions, genre_L: Ints, item_L: Ints, match_L: NDArray[np.bool_]) -> Ints:
        """Probability of a listen-plus, in units of 1 / ONE."""
        chance_L: Ints = sessions.repeat(sessions.bias_S)
        chance_L += self.catalogue.quality_I[item_L]
        chance_L += self._genre_quarters[genre_L * _QUARTERS + sessions.repeat(sessions.quarter_S)]
        chance_L += match_L * parts(_MATCH_GAIN)
        liked_L = sessions.repeat(sessions.liked_S) >> genre_L & 1
        chance_L += liked_L * parts(_GENRE_GAIN)
        return np.clip(chance_L, parts(_LEAST), parts(_MOST), out=chance_L)

    def _ended(self, block: EventRows, first_user: int) -> EventRows:
        """The block without events after the end, times in seconds. The last event of the first user is at the very
        end, so that the split is known before all events are generated."""
        block = block.where(block.times <= self.config.end_tick)
        if first_user == 0:
            block.times[np.searchsorted(block.uids, 1, side="right") - 1] = self.config.end_tick
        np.multiply(block.times, np.uint32(TICK_S), out=block.times)
        return block


class _Sessions:
    """When the users of a block listen, and which genres they like then."""

    def __init__(
        self, config: YambdaLike, catalogue: SongCatalogue, keys_U: Words, first_U: Ints, draws_L: Words
    ) -> None:
        opens_L = bits(draws_L, 8, 12) < 4096 // _SESSION_LISTENS
        opens_L[first_U] = True
        self.first_S = np.flatnonzero(opens_L)
        self.count = len(self.first_S)
        self.lengths_S = np.diff(self.first_S, append=len(draws_L))
        self.user_S = np.searchsorted(first_U, self.first_S, side="right") - 1
        keys_S = keys_U[self.user_S]
        draws_S = finalise_numpy_(draws_L[self.first_S] + key(config.seed, 32))
        self.start_S = self._starts(config.days, keys_S, draws_S)
        self.day_S = self.start_S // _DAY_TICKS
        self.quarter_S = self.start_S % _DAY_TICKS * _QUARTERS // _DAY_TICKS
        by_quarter_S = counted(self.quarter_S, keys_S + key(config.seed, 33))
        mood_S = (bits(draws_S, 63, 1) * 2 - 1) * parts(_MOOD)
        self.bias_S = parts(_BASE) + mood_S + either_way(keys_S, 0, _KINDNESS) + either_way(by_quarter_S, 0, _HOUR)
        # A session prefers one favourite artist of each genre.
        self.focus_S = bits(draws_S, 46, 16) * config.favourites >> 16
        # The preferred genre depends on the time of day.
        turn_S = bits(by_quarter_S, 16, 16) * _SLOTS >> 16
        slot_SK = (turn_S[:, None] + np.arange(_SLOTS)) % _SLOTS
        words_SK = counted(slot_SK, (keys_S + key(config.seed, 34))[:, None])
        self.slots_SK = counted(_period(self.day_S[:, None], words_SK, config.drift_days), words_SK)
        self.genres_SK = bits(self.slots_SK, 32, 31) * catalogue.genres >> 31
        self.liked_S = np.bitwise_or.reduce(1 << self.genres_SK, axis=1)

    def repeat(self, values_S: NDArray[Any]) -> NDArray[Any]:
        """Values of sessions repeated for their listens."""
        return np.repeat(values_S, self.lengths_S)

    def times(self, played_L: Ints) -> Ints:
        """Ticks of the listens. A listen begins where the previous one ended, and so does a session that was planned
        to begin before the end of the previous one."""
        before_L = np.cumsum(played_L) - played_L
        before_S = before_L[self.first_S]
        # A running maximum of (planned start - time played before), with users kept apart by a large offset.
        apart_S = self.user_S << 40
        shift_S = np.maximum.accumulate(self.start_S - before_S + apart_S) - apart_S
        return np.asarray(before_L + self.repeat(shift_S))

    def _starts(self, days: int, keys_S: Words, draws_S: Words) -> Ints:
        """Planned ticks, ascending within a user. A user has a preferred time of day; some users join late."""
        late_S = bits(keys_S, 16, 16) < parts(_LATE_SHARE)
        joined_S = late_S * (bits(keys_S, 32, 16) * int(days * _LATEST_SHARE) >> 16)
        day_S = joined_S + (bits(draws_S, 0, 24) * (days + 1 - joined_S) >> 24)
        about_S = (bits(draws_S, 24, 8) + bits(draws_S, 32, 8) - 255) * _PEAK_TICKS // 255
        peak_S = (bits(keys_S, 48, 16) * _DAY_TICKS >> 16) + about_S
        tick_S = np.where(
            bits(draws_S, 40, 4) < int(_AT_PEAK * 16), peak_S % _DAY_TICKS, bits(draws_S, 24, 16) * _DAY_TICKS >> 16
        )
        return np.sort((self.user_S << 32) + day_S * _DAY_TICKS + tick_S) & 0xFFFFFFFF


def _period(days: Ints, words: Words, drift_days: int) -> Ints:
    """The number of the preference that is valid on a day; each preference changes on its own days."""
    return (days + (bits(words, 48, 15) * drift_days >> 15)) // drift_days


def _ratio_table() -> NDArray[np.uint16]:
    """1,024 played ratios of a skip, then 1,024 of a listen-plus, most of which play to the end and some beyond."""
    place = np.arange(1024)
    skips = skewed(LEAST_PLAYED, place / 1024.0, 3.0)
    plus = np.full(1024, 100)
    plus[:240] = LEAST_PLAYED + place[:240] * 50 // 240
    plus[960:] = 101 + skewed(200, place[:64] / 64.0, 6.0)
    return np.concatenate([skips, plus]).astype(np.uint16)


def _with_reactions(
    listens: dict[str, NDArray[Any]],
    played_L: Ints,
    more_L: Words,
    plus_L: NDArray[np.bool_],
    match_L: NDArray[np.bool_],
) -> EventRows:
    """Listens and, after some of them, a like or a dislike while the song plays, which is sometimes withdrawn."""
    chances = np.array([parts(_DISLIKE), 0, parts(_LIKE_ANYWAY), parts(_LIKE)])
    reacts = np.flatnonzero(bits(more_L, 26, 16) < chances[plus_L * 2 + match_L])
    liked = plus_L[reacts]
    back = bits(more_L[reacts], 42, 10) < np.where(liked, int(_UNLIKE * 1024), int(_UNDISLIKE * 1024))
    copies_L = np.ones(len(played_L), np.int64)
    copies_L[reacts] += 1 + back
    source_E = np.repeat(np.arange(len(played_L)), copies_L)
    columns = {name: column[source_E] for name, column in listens.items()}
    place = reacts + np.cumsum(1 + back) - back
    undo = place[back] + 1
    types_E = np.zeros(len(source_E), np.uint8)
    types_E[place] = np.where(liked, _LIKE_TYPE, _DISLIKE_TYPE)
    types_E[undo] = types_E[undo - 1] + _WITHDRAWAL
    for at in (place, undo):
        columns["ratios"][at] = 0
    columns["times"][place] += (played_L[reacts] // 2).astype(np.uint32)
    columns["times"][undo] += played_L[reacts[back]].astype(np.uint32)
    return EventRows(types=types_E, **columns)


def identity_of(config: YambdaLike) -> dict[str, object]:
    return {"made": NAME, "stream": STREAM, "config": to_json(config)}


def folder_name(config: YambdaLike) -> str:
    """A short folder name for the dataset of a config, in the version of the store's format."""
    identity = {**identity_of(config), "version": VERSION}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def write_store(
    config: YambdaLike,
    folder: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    block_listens: int = BLOCK_LISTENS,
) -> Path:
    """Write the training events as an event store, as `prepare` does with the real ones.

    The same call resumes after an interruption. `progress` receives the events done and about how many there will be.
    """
    identity = identity_of(config)
    if finished(folder, identity):
        return folder.expanduser()
    generator, train_end = Generator(config), np.uint32(config.split.train_end)
    with StoreWriter(folder, identity=identity) as writer:
        committed = writer.events
        for block, next_user in generator.blocks(int(writer.bookmark or 0), block_listens):
            writer.append(**block.where(block.times < train_end).columns())
            if writer.events - committed >= COMMIT_EVENTS:
                writer.commit(next_user)
                committed = writer.events
            poll()
            if progress:
                progress(writer.events, max(writer.events, config.events))
        manifest = EventManifest(
            name=NAME,
            synthetic=True,
            licence=SYNTHETIC_LICENCE,
            groups=[*ITEM_GROUPS],
            split=vars(config.split),
            config=to_json(config),
        )
        return writer.finish(generator.catalogue.columns(), manifest)
