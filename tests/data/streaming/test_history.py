"""Samples equal the golden ones, and those of plain Python on random streams; no later event influences them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from recperf.data.batch import HistoryBatch
from recperf.data.blocks import Column
from recperf.data.events.manifest import EventManifest
from recperf.data.events.store import EventStore
from recperf.data.known.yambda.mlperf_cache import ReferenceStore, open_reference
from recperf.data.known.yambda.rows import LEAST_PLAYED, kinds_of
from recperf.data.streaming.config import HistoryConfig, Strategy
from recperf.data.streaming.features import CANDIDATE, CONTEXT, CROSSES, HISTORY
from recperf.data.streaming.history import KEYS, Histories
from recperf.errors import DataError
from recperf.ops.history import native

needs_native = pytest.mark.skipif(isinstance(native.library(), str), reason=str(native.library()))
BODIES = ["reference", pytest.param("native", marks=needs_native)]
Layout = Literal["packed", "reference"]


@dataclass(frozen=True)
class Event:
    uid: int
    item: int
    time: int
    type: int
    ratio: int
    organic: int

    @property
    def action(self) -> int:
        if self.type == 0:
            return 1 if self.ratio >= LEAST_PLAYED else 4
        return 2 if self.type == 1 else 0


ITEMS, ARTISTS, ALBUMS = 400, 7, 13


def store_of(events: list[Event], layout: Layout = "packed") -> EventStore:
    uids, items, times, types, ratios, organic = (
        np.array([(e.uid, e.item, e.time, e.type, e.ratio, e.organic) for e in events], np.int64).reshape(-1, 6).T
    )
    users, first = np.unique(uids, return_index=True)
    kinds = kinds_of(types.astype(np.uint8), ratios.astype(np.uint16), organic.astype(np.uint8))
    columns: dict[str, Any] = {"items_E": items.astype(np.uint32), "times_E": times.astype(np.uint32)}
    of_kinds: list[Any] = [kinds]
    if layout == "reference":
        of_kinds = [*((kinds & bit) > 0 for bit in (1, 2, 4)), organic.astype(np.int8), types.copy()]
        columns = {"items_E": items.copy(), "times_E": times.copy()}
    every = np.arange(ITEMS, dtype=np.uint32)
    return (EventStore if layout == "packed" else ReferenceStore)(
        folder=Path("nowhere"),
        user_ids_U=users,
        user_first_U1=np.append(first, len(events)),
        groups_IG=np.stack([every % ARTISTS, every % ALBUMS], 1),
        manifest=EventManifest(name="made", synthetic=True, licence=""),
        kind_columns=tuple(map(Column, of_kinds)),
        **{name: Column(array) for name, array in columns.items()},
    )


def oracle(events: list[Event], position: int, config: HistoryConfig) -> dict[str, Any]:
    """One sample in plain Python."""
    target = events[position]
    before = [place for place in range(position) if events[place].uid == target.uid][-config.scan :]
    if config.strategy == "interleaved":
        selected: list[int] = []
        for action in (1, 2, 4):
            selected += [place for place in before if events[place].action == action][-max(1, config.length // 3) :]
        history = [events[place] for place in sorted(selected)]
    else:
        history = [events[place] for place in before if events[place].action][-config.length :]
    parts = {"uid": target.uid, "item": target.item, "artist": target.item % ARTISTS, "album": target.item % ALBUMS}
    parts |= {"hour": target.time // 3600 % 24, "organic": target.organic}
    hashed = {
        name: xxhash.xxh64_intdigest(b"".join(parts[part].to_bytes(8, "little") for part in of)) % rows
        for name, (of, rows) in CROSSES.items()
    }
    items = [event.item for event in history]
    query = [history[-1].time if history else target.time]
    return {
        "uid": [target.uid],
        **{name: [value] for name, value in hashed.items()},
        "item_id": items,
        "artist_id": [item % ARTISTS for item in items],
        "album_id": [item % ALBUMS for item in items],
        **{name: [parts[part]] for name, part in zip(CANDIDATE, ("item", "artist", "album"))},
        "actions": [event.action for event in history],
        "times": [event.time for event in history],
        "query time": query,
        "label": [int(target.action == 1)],
    }


KINDS = ((0, 100), (0, 50), (0, 49), (0, 0), (1, 0), (2, 0), (3, 0), (4, 0))
"""Types and played ratios."""


def decoded(stream: bytes) -> list[Event]:
    """A byte an event: its kind, whether organic, how many ticks later, whether of the next user. Many share a tick.

    An event's item is its position.
    """
    events: list[Event] = []
    uid, time = 3, 7205
    for position, byte in enumerate(stream):
        if position and byte >> 4 == 15:
            uid, time = uid + 7_000_003, (time * 977) % 26_000_000 // 5 * 5
        time += 5 * (0, 0, 1, 700)[byte >> 4 & 3]
        events.append(Event(uid, position, time, *KINDS[byte & 7], byte >> 3 & 1))
    return events


STREAMS = st.binary(min_size=1, max_size=90).map(decoded)
CONFIGS = st.builds(
    HistoryConfig,
    length=st.integers(1, 30),
    strategy=st.sampled_from(["interleaved", "last-n"]),
    scan=st.integers(1, 45),
)


def samples(
    events: list[Event], positions: list[int], config: HistoryConfig, body: Any, layout: Layout = "packed"
) -> list[dict[str, list[int]]]:
    """Every sample with all it holds, by name."""
    batch = Histories(store_of(events, layout), config, impl=body).batch(np.array(positions, np.int64))
    offsets = batch.history_offsets_B1.tolist()
    whole = {key: (ids.tolist(), starts.tolist()) for key in KEYS for ids, starts in [batch.features[key]]}
    whole |= {"actions": (batch.actions_T.tolist(), offsets), "times": (batch.times_T.tolist(), offsets)}
    one_each = list(range(len(batch) + 1))
    whole |= {"query time": (batch.query_times_B.tolist(), one_each), "label": (batch.labels_B.tolist(), one_each)}
    return [
        {name: values[starts[sample] : starts[sample + 1]] for name, (values, starts) in whole.items()}
        for sample in range(len(batch))
    ]


@pytest.mark.parametrize("layout", ["packed", "reference"])
@pytest.mark.parametrize("body", BODIES)
@given(events=STREAMS, config=CONFIGS)
@settings(max_examples=12)
def test_every_sample_is_that_of_plain_python(
    body: Any, layout: Layout, events: list[Event], config: HistoryConfig
) -> None:
    everywhere = list(range(len(events)))
    for position, sample in zip(everywhere, samples(events, everywhere, config, body, layout), strict=True):
        assert sample == oracle(events, position, config)
        assert all(place < position for place in sample["item_id"])


def golden_store(case: Path, layout: Layout, length: int) -> EventStore:
    """The reference's own cache, or the same events packed."""
    store = open_reference(next(case.glob(f"processed_*/hstu_cache_L{length}")))
    if layout == "reference":
        return store
    packed = {name: Column(getattr(store, name)[:].astype(np.uint32)) for name in ("items_E", "times_E")}
    shared = {one.name: getattr(store, one.name) for one in fields(store) if one.name not in packed}
    return EventStore(**{**shared, **packed, "kind_columns": (Column(store.kinds(slice(None))),)})


def as_reference_samples(batch: HistoryBatch) -> list[dict[str, list[int]]]:
    """Every sample under the names and in the order the reference gives its features, constant ones included."""
    parts = {key: batch.features[key] for key in KEYS}
    offsets = batch.history_offsets_B1.tolist()
    found = []
    for sample, (first, last) in enumerate(zip(offsets, offsets[1:])):
        values = {}
        for key, (ids, starts) in parts.items():
            values[key] = ids[int(starts[sample]) : int(starts[sample + 1])].tolist()
        query, length = [int(batch.query_times_B[sample])], last - first
        found.append(
            {f"uih/{key}": values[key] for key in CONTEXT + HISTORY}
            | {"uih/action_weight": batch.actions_T[first:last].tolist()}
            | {"uih/action_timestamp": batch.times_T[first:last].tolist()}
            | {"uih/dummy_watch_time": [0] * length, "uih/dummy_query_time": query}
            | {f"cand/{key}": values[key] for key in CANDIDATE}
            | {"cand/item_query_time": query, "cand/item_action_weight": [int(batch.labels_B[sample])]}
            | {"cand/item_dummy_watchtime": [1]}
        )
    return found


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("layout", ["packed", "reference"])
@pytest.mark.parametrize("strategy", ["interleaved", "last-n"])
def test_golden_samples(strategy: Strategy, layout: Layout, body: Any, yambda_case: Path) -> None:
    meta = json.loads((yambda_case / "expected_meta.json").read_text())
    config = HistoryConfig(
        length=meta["history_length"],
        scan=meta["scan_window"],
        strategy=strategy,
    )
    with np.load(yambda_case / "expected_samples.npz") as expected:
        anchors = expected["samples/anchor_index"]
        histories = Histories(golden_store(yambda_case, layout, config.length), config, impl=body)
        batch = histories.batch(expected["positions"][anchors])
        lengths_B = histories.lengths(expected["positions"][anchors])
        assert np.array_equal(lengths_B, batch.history_offsets_B1.diff())
        for anchor, sample in zip(anchors, as_reference_samples(batch), strict=True):
            prefix = f"samples/{strategy.replace('-', '_')}/{anchor}/"
            names = [name for name in expected.files if name.startswith(prefix)]
            assert [name.removeprefix(prefix) for name in names] == list(sample)
            for name in names:
                assert expected[name].tolist() == sample[name.removeprefix(prefix)], name


def listens(count: int) -> EventStore:
    """A user who listens every 5 seconds; items are positions."""
    return store_of([Event(5, place, 100 + 5 * place, 0, 100, 0) for place in range(count)])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("position", [-1, 3, 1 << 40])
def test_an_anchor_that_is_no_event_is_an_error(body: Any, position: int) -> None:
    histories = Histories(listens(3), HistoryConfig(), impl=body)
    with pytest.raises(DataError, match=f"anchor {position} is not the position of an event; the store has 3"):
        histories.batch(np.array([0, position]))


@pytest.mark.parametrize("body", BODIES)
def test_an_item_outside_the_catalogue_is_an_error_wherever_it_is(body: Any) -> None:
    store = listens(5)
    store.items_E.array[3] = ITEMS
    histories = Histories(store, HistoryConfig(), impl=body)
    assert len(histories.batch(np.array([2]))) == 1
    for anchor in (3, 4):
        with pytest.raises(DataError, match="outside the catalogue of 400 items"):
            histories.batch(np.array([anchor]))
    store.groups_IG[2, 1] = 1 << 31
    with pytest.raises(DataError, match="artist or album id above"):
        histories.batch(np.array([2]))


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"times_E": Column(np.zeros(4, np.uint32))}, "columns differ in length"),
        ({"user_first_U1": np.array([0, 4])}, "users do not cover its events"),
        ({"user_first_U1": np.array([0, 2, 5])}, "users do not cover its events"),
        ({"user_ids_U": np.array([1 << 31])}, "user or item id above 2,147,483,647"),
    ],
)
def test_a_store_that_does_not_fit_together_is_refused(changes: dict[str, Any], how: str) -> None:
    with pytest.raises(DataError, match=how):
        Histories(replace(listens(5), **changes), HistoryConfig())
