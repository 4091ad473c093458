"""Samples equal those of plain Python on random streams, and no event after an anchor influences them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from recperf.data.yambda.config import HistoryConfig, Strategy
from recperf.data.yambda.history import KEYS, Histories
from recperf.data.yambda.schema import CANDIDATE, CROSSES, LEAST_PLAYED
from recperf.data.yambda.store import EventStore, kinds_of
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
STRANGE_ITEM = 399
"""No event has it before one is changed."""


def store_of(events: list[Event], layout: Layout = "packed") -> EventStore:
    uids, items, times, types, ratios, organic = (
        np.array([(e.uid, e.item, e.time, e.type, e.ratio, e.organic) for e in events], np.int64).reshape(-1, 6).T
    )
    users, first = np.unique(uids, return_index=True)
    kinds = kinds_of(types.astype(np.uint8), ratios.astype(np.uint16), organic.astype(np.uint8))
    columns: dict[str, Any] = {"items_E": items.astype(np.uint32), "times_E": times.astype(np.uint32)}
    columns["packed_kinds_E"] = kinds
    if layout == "reference":
        flags = (*((kinds & bit) > 0 for bit in (1, 2, 4)), organic.astype(np.int8))
        columns = {"items_E": items.copy(), "times_E": times.copy(), "flags": flags, "types_E": types.copy()}
    every = np.arange(ITEMS, dtype=np.uint32)
    return EventStore(
        folder=Path("nowhere"),
        layout=layout,
        user_ids_U=users,
        user_first_U1=np.append(first, len(events)),
        catalogue_I2=np.stack([every % ARTISTS, every % ALBUMS], 1),
        **columns,
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
        first = next(place for place in everywhere if events[place].uid == events[position].uid)
        assert all(first <= place < position for place in sample["item_id"])


OF_THE_TARGET = {*CROSSES, *CANDIDATE, "label"}


@pytest.mark.parametrize("strategy", ["interleaved", "last-n"])
@pytest.mark.parametrize("body", BODIES)
@given(events=STREAMS, config=CONFIGS, data=st.data())
@settings(max_examples=12)
def test_nothing_at_or_after_an_anchor_enters_its_features(
    body: Any, strategy: Strategy, events: list[Event], config: HistoryConfig, data: st.DataObject
) -> None:
    config = replace(config, strategy=strategy)
    anchor = data.draw(st.integers(0, len(events) - 1), "anchor")
    (as_it_was,) = samples(events, [anchor], config, body)

    later = data.draw(st.integers(anchor, len(events) - 1), "what is changed")
    old = events[later]
    kind, ratio = data.draw(st.sampled_from([(0, 100), (0, 0), (1, 0), (4, 0)]), "type and ratio")
    new = replace(
        old,
        item=data.draw(st.sampled_from([STRANGE_ITEM, old.item, 0]), "item"),
        time=old.time + data.draw(st.sampled_from([0, 5, 7200]), "time"),
        type=kind,
        ratio=ratio,
        organic=1 - old.organic,
    )
    (changed,) = samples([*events[:later], new, *events[later + 1 :]], [anchor], config, body)
    (cut,) = samples(events[: anchor + 1], [anchor], config, body)
    assert cut == as_it_was
    if later > anchor:
        (without,) = samples(events[:later] + events[later + 1 :], [anchor], config, body)
        assert changed == without == as_it_was
        return
    may_change = OF_THE_TARGET
    if not as_it_was["item_id"]:
        may_change = may_change | {"query time"}
    for name, value in as_it_was.items():
        assert name in may_change or changed[name] == value, name
