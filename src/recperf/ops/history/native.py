"""Histories by a small C file, compiled once with the machine's own compiler and kept in the cache folder.

Shapes: B samples, T events of history in the batch.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..compile import load
from .rule import LARGE_ID, Events, Picked, Room, Rule, unknown_item

SOURCE = Path(__file__).with_name("native.c")

_UNKNOWN_ITEM = 1
"""What `fill` of native.c returns for an item outside the catalogue; anything else but 0 is a large id."""
_I64, _PTR = ctypes.c_int64, ctypes.c_void_p

Positions = NDArray[np.int64]


class _Events(ctypes.Structure):
    """The struct `events` of native.c."""

    _fields_ = (
        *((name, _PTR) for name in ("items", "times", "kinds", "plus", "like", "skip", "catalogue")),
        ("known", _I64),
        ("wide", _I64),
    )


class _Rule(ctypes.Structure):
    """The struct `rule` of native.c."""

    _fields_ = (("pools", ctypes.c_uint8 * 3), *((name, _I64) for name in ("count", "cap", "most")))


class _Room(ctypes.Structure):
    """The struct `room` of native.c."""

    _fields_ = tuple((name, _PTR) for name in ("items", "artists", "albums", "times"))


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    loaded = load(SOURCE)
    if not isinstance(loaded, str):
        loaded.pick.argtypes = [_PTR] * 3 + [_I64] + [_PTR] * 5
        loaded.pick.restype = None
        loaded.fill.argtypes = [_PTR] * 3 + [_I64] + [_PTR] * 2
        loaded.fill.restype = _I64
    return loaded


def pick(events: Events, begin_B: Positions, positions_B: Positions, rule: Rule) -> Picked:
    """The events of each sample's history."""
    counts_B = positions_B - begin_B
    offsets_B1 = np.empty(len(positions_B) + 1, np.int64)
    room = int(np.minimum(counts_B, rule.longest).sum()) + 1
    places, actions = np.empty(room, np.uint32), np.empty(room, np.uint8)
    space = np.empty(0 if events.kinds_E is not None else int(counts_B.max(initial=0)), np.uint8)
    pools = _Rule((ctypes.c_uint8 * 3)(*rule.pools), len(rule.pools), rule.cap, rule.most)
    _loaded().pick(
        ctypes.byref(_facts(events)), _at(begin_B), _at(positions_B), len(positions_B), ctypes.byref(pools),
        _at(space), _at(offsets_B1), _at(places), _at(actions),
    )  # fmt: skip
    total = int(offsets_B1[-1])
    return Picked(offsets_B1=offsets_B1, places_T=places[:total], actions_T=actions[:total])


def fill(events: Events, begin_B: Positions, picked: Picked, room: Room) -> None:
    """Write what the picked events hold."""
    to = _Room(_at(room.items_T), _at(room.artists_T), _at(room.albums_T), _at(room.times_T))
    fault = _loaded().fill(
        ctypes.byref(_facts(events)), _at(begin_B), _at(picked.offsets_B1), len(begin_B), _at(picked.places_T),
        ctypes.byref(to),
    )  # fmt: skip
    if fault:
        raise DataError(unknown_item(len(events.catalogue_I2)) if fault == _UNKNOWN_ITEM else LARGE_ID)


def _loaded() -> ctypes.CDLL:
    found = library()
    assert not isinstance(found, str), found
    return found


def _facts(events: Events) -> _Events:
    # The caller keeps the columns alive that the addresses point to.
    wide = events.items_E.dtype == np.int64
    word = np.int64 if wide else np.uint32
    facts = _Events(
        items=_at(events.items_E, word),
        times=_at(events.times_E, word),
        catalogue=_at(events.catalogue_I2, np.uint32),
        known=len(events.catalogue_I2),
        wide=wide,
    )
    if events.kinds_E is not None:
        facts.kinds = _at(events.kinds_E, np.uint8)
    else:
        assert events.flags is not None
        facts.plus, facts.like, facts.skip = (_at(column, np.bool_) for column in events.flags)
    return facts


def _at(array: NDArray[Any], dtype: Any = None) -> int:
    if not array.flags.c_contiguous or (dtype is not None and array.dtype != dtype):
        raise ValueError(f"a column must be contiguous {np.dtype(dtype)}, not {array.dtype} {array.strides}")
    return array.ctypes.data
