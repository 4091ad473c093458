"""Random draws that are the same on every machine, and the synthetic catalogue of songs.

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

from ....ops.splitmix import GOLDEN, WORD, finalise_numpy_
from .config import YambdaLike

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ODD = np.uint64(0xD1342543DE82EF95)
ONE = 1 << 16
"""Probabilities are integers in units of 1 / ONE."""
_QUALITY = 0.1
_ARTIST_MOST, _ARTIST_TAIL = 100, 40.0
_ALBUM_OPENS = 0.26


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
class Catalogue:
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


def make_catalogue(config: YambdaLike) -> Catalogue:
    count = config.items
    draws = counted(np.arange(count // 3 + 64), key(config.seed, 1))
    ends = np.cumsum(1 + skewed(_ARTIST_MOST, unit(draws, 0, 32), _ARTIST_TAIL))
    artists = int(np.searchsorted(ends, count)) + 1
    first_A1 = np.minimum(np.append(0, ends[:artists]), count).astype(np.int32)
    words = counted(np.arange(count), key(config.seed, 2))
    opens = bits(words, 0, 16) < parts(_ALBUM_OPENS)
    opens[first_A1[:-1]] = True
    genres = min(config.genres, artists)
    return Catalogue(
        genres=genres,
        artists_per_genre=artists // genres,
        first_A1=first_A1,
        quality_I=either_way(words, 16, _QUALITY).astype(np.int16),
        lengths_I=(110 + bits(words, 32, 7) + bits(words, 39, 7)).astype(np.uint16),
        album_I=(np.cumsum(opens) - 1).astype(np.uint32),
    )
