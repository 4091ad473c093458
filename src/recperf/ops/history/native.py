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

from ...data.yambda.store import EventStore
from ..compile import load
from .rule import Picked, Room, Rule, large_id, unknown_item

SOURCE = Path(__file__).with_name("native.c")

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_FAULTS = {1: unknown_item, 2: large_id}

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


def pick(store: EventStore, begin_B: Positions, positions_B: Positions, rule: Rule) -> Picked:
    """The events of each sample's history."""
    counts_B = positions_B - begin_B
    offsets_B1 = np.empty(len(positions_B) + 1, np.int64)
    room = int(np.minimum(counts_B, rule.longest).sum()) + 1
    places, actions = np.empty(room, np.uint32), np.empty(room, np.uint8)
    space = np.empty(0 if store.packed_kinds_E is not None else int(counts_B.max(initial=0)), np.uint8)
    pools = _Rule((ctypes.c_uint8 * 3)(*rule.pools), len(rule.pools), rule.cap, rule.most)
    _loaded().pick(
        ctypes.byref(_facts(store)), _at(begin_B), _at(positions_B), len(positions_B), ctypes.byref(pools),
        _at(space), _at(offsets_B1), _at(places), _at(actions),
    )  # fmt: skip
    total = int(offsets_B1[-1])
    return Picked(offsets_B1=offsets_B1, places_T=places[:total], actions_T=actions[:total])


def fill(store: EventStore, begin_B: Positions, picked: Picked, room: Room) -> None:
    """Write what the picked events hold."""
    to = _Room(_at(room.items_T), _at(room.artists_T), _at(room.albums_T), _at(room.times_T))
    fault = _loaded().fill(
        ctypes.byref(_facts(store)), _at(begin_B), _at(picked.offsets_B1), len(begin_B), _at(picked.places_T),
        ctypes.byref(to),
    )  # fmt: skip
    if fault:
        raise _FAULTS[fault](store)


def _loaded() -> ctypes.CDLL:
    found = library()
    assert not isinstance(found, str), found
    return found


def _facts(store: EventStore) -> _Events:
    # The store keeps the columns alive that the addresses point to.
    wide = store.items_E.dtype == np.int64
    word = np.int64 if wide else np.uint32
    facts = _Events(
        items=_at(store.items_E, word),
        times=_at(store.times_E, word),
        catalogue=_at(store.catalogue_I2, np.uint32),
        known=store.items,
        wide=wide,
    )
    if store.packed_kinds_E is not None:
        facts.kinds = _at(store.packed_kinds_E, np.uint8)
    else:
        assert store.flags is not None
        facts.plus, facts.like, facts.skip = (_at(column, np.bool_) for column in store.flags[:3])
    return facts


def _at(array: NDArray[Any], dtype: Any = None) -> int:
    if not array.flags.c_contiguous or (dtype is not None and array.dtype != dtype):
        raise ValueError(f"a column must be contiguous {np.dtype(dtype)}, not {array.dtype} {array.strides}")
    return array.ctypes.data
