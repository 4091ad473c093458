"""Histories in C.

Shapes: B samples, T events of history in the batch.
"""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError, DataError
from ..arguments import ANY, address
from ..compile import I64, POINTER, native_library, usable
from ..operators import operator
from .reference import LARGE_ID, Crosses, Events, HistoryArrays, Picked, Rule, unknown_item

_UNKNOWN_ITEM, _UNKNOWN_PLACE = 1, 3
"""What `fill` of native.c returns for an item outside the catalogue and an event outside the columns; 2: a large id."""

Positions = NDArray[np.int64]


class _Events(ctypes.Structure):
    """The struct `events` of native.c."""

    _fields_ = (
        *((name, POINTER) for name in ("items", "times", "kinds", "plus", "like", "skip", "catalogue")),
        *((name, I64) for name in ("known", "wide", "count")),
    )


class _Rule(ctypes.Structure):
    """The struct `rule` of native.c."""

    _fields_ = (("actions", ctypes.c_uint8 * 3), *((name, I64) for name in ("count", "cap", "most")))


class _Room(ctypes.Structure):
    """The struct `room` of native.c."""

    _fields_ = tuple((name, POINTER) for name in ("items", "artists", "albums", "times"))


_FUNCTIONS = {
    "pick": [POINTER] * 3 + [I64] + [POINTER] * 5,
    "measure": [POINTER] * 3 + [I64] + [POINTER] * 3,
    "fill": [POINTER] * 3 + [I64] + [POINTER] * 2,
    "crosses": [POINTER] * 3 + [I64] * 2 + [POINTER],
}
library = native_library(__file__, _FUNCTIONS, {"fill": I64})
"""Returns the compiled library, or the reason why it cannot be used."""


@operator("pick_history", reads=lambda *_: ())
def pick(events: Events, begin_B: Positions, positions_B: Positions, rule: Rule) -> Picked:
    """Choose the events of each sample's history among begin <= position < anchor."""
    samples = len(positions_B)
    begin, positions = _ranges(events, begin_B, positions_B)
    counts_B = positions_B - begin_B
    offsets_B1 = np.empty(samples + 1, np.int64)
    room = int(np.minimum(counts_B, rule.longest).sum()) + 1
    places, actions = np.empty(room, np.uint32), np.empty(room, np.uint8)
    space = _space(events, counts_B)
    outputs = (array.ctypes.data for array in (space, offsets_B1, places, actions))
    usable(library()).pick(
        ctypes.byref(_columns(events)), begin, positions, samples, ctypes.byref(_rule(rule)), *outputs
    )  # fmt: skip
    total = int(offsets_B1[-1])
    return Picked(offsets_B1=offsets_B1, places_T=places[:total], actions_T=actions[:total])


@operator("measure_history", reads=lambda *_: ())
def lengths(events: Events, begin_B: Positions, positions_B: Positions, rule: Rule) -> Positions:
    """The number of events that `pick` picks for each sample."""
    samples = len(positions_B)
    begin, positions = _ranges(events, begin_B, positions_B)
    lengths_B, space = np.empty(samples, np.int64), _space(events, positions_B - begin_B)
    usable(library()).measure(
        ctypes.byref(_columns(events)), begin, positions, samples, ctypes.byref(_rule(rule)), space.ctypes.data,
        lengths_B.ctypes.data,
    )  # fmt: skip
    return lengths_B


@operator("fill_history", reads=lambda *_: ())
def fill(events: Events, begin_B: Positions, picked: Picked, room: HistoryArrays) -> None:
    """Write the items, artists, albums and times of the picked events."""
    samples, total = len(begin_B), len(picked.places_T)
    begin, _ = _ranges(events, begin_B, begin_B)
    offsets = address("offsets_B1", picked.offsets_B1, np.int64, (samples + 1,))
    offsets_B1 = picked.offsets_B1
    if offsets_B1[0] != 0 or offsets_B1[-1] != total or (offsets_B1[1:] < offsets_B1[:-1]).any():
        raise ArgumentError(f"offsets_B1 does not divide the events into histories: it must rise from 0 to {total}")
    places = address("places_T", picked.places_T, np.uint32, (total,))
    to = _Room(
        items=address("items_T", room.items_T, np.int32, (total,)),
        artists=address("artists_T", room.artists_T, np.int32, (total,)),
        albums=address("albums_T", room.albums_T, np.int32, (total,)),
        times=address("times_T", room.times_T, np.int64, (total,)),
    )
    fault = usable(library()).fill(
        ctypes.byref(_columns(events)), begin, offsets, samples, places, ctypes.byref(to)
    )  # fmt: skip
    if fault == _UNKNOWN_PLACE:
        raise ArgumentError(f"places_T has a place beyond the {len(events.items_E)} events")
    if fault:
        raise DataError(unknown_item(len(events.catalogue_I2)) if fault == _UNKNOWN_ITEM else LARGE_ID)


@operator("cross_features", reads=lambda *_: ())
def crosses(columns_KB: Positions, crosses: Crosses, out_CB: NDArray[np.int32]) -> None:
    """Write the row of every cross feature: the hash of some columns, modulo the rows of the cross."""
    (count, samples), columns = out_CB.shape, len(columns_KB)
    if columns <= crosses.last or len(crosses.rows_C) != count:
        raise ArgumentError(f"{len(crosses.rows_C)} crosses of {columns} columns do not fit {count} rows of results")
    usable(library()).crosses(
        address("columns_KB", columns_KB, np.int64, (columns, samples)), *crosses.addresses, count, samples,
        address("out_CB", out_CB, np.int32, (count, samples)),
    )  # fmt: skip


def _rule(rule: Rule) -> _Rule:
    return _Rule((ctypes.c_uint8 * 3)(*rule.actions), len(rule.actions), rule.cap, rule.most)


def _space(events: Events, counts_B: Positions) -> NDArray[np.uint8]:
    """Where the kinds of a scan are put together, if they come in three columns."""
    return np.empty(0 if events.kinds_E is not None else int(counts_B.max(initial=0)), np.uint8)


def _ranges(events: Events, begin_B: Positions, positions_B: Positions) -> tuple[int, int]:
    """The addresses of where each sample's events begin and end, which must lie within the columns."""
    addresses = (
        address("begin_B", begin_B, np.int64, (len(positions_B),)),
        address("positions_B", positions_B, np.int64, (len(positions_B),)),
    )
    if (begin_B < 0).any() or (begin_B > positions_B).any() or (positions_B > len(events.items_E)).any():
        raise ArgumentError(
            f"begin_B and positions_B are not ranges of events: 0 <= begin <= position <= {len(events.items_E)}"
        )
    return addresses


_addresses: WeakKeyDictionary[Events, _Events] = WeakKeyDictionary()
"""The same events are read for every batch; they keep the columns alive that the addresses point to."""


def _columns(events: Events) -> _Events:
    columns = _addresses.get(events)
    if columns is None:
        columns = _addresses[events] = _checked_columns(events)
    return columns


def _checked_columns(events: Events) -> _Events:
    wide, shape = events.items_E.dtype == np.int64, (len(events.items_E),)
    word = np.int64 if wide else np.uint32
    columns = _Events(
        items=address("items_E", events.items_E, word, shape),
        times=address("times_E", events.times_E, word, shape),
        catalogue=address("catalogue_I2", events.catalogue_I2, np.uint32, (ANY, 2)),
        known=len(events.catalogue_I2),
        wide=wide,
        count=len(events.items_E),
    )
    if events.kinds_E is not None:
        columns.kinds = address("kinds_E", events.kinds_E, np.uint8, shape)
    else:
        assert events.flags is not None
        columns.plus, columns.like, columns.skip = (
            address("flags", column, np.bool_, shape) for column in events.flags
        )  # fmt: skip
    return columns
