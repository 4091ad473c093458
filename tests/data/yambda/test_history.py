"""Batches equal the golden samples in both layouts of a store; invalid input is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from recperf.data.batch import HistoryBatch
from recperf.data.yambda.config import HistoryConfig, Strategy
from recperf.data.yambda.history import KEYS, Histories
from recperf.data.yambda.reference import open_reference
from recperf.data.yambda.schema import CANDIDATE, CONTEXT, HISTORY
from recperf.data.yambda.store import EventStore
from recperf.errors import DataError
from recperf.ops.history import native

needs_native = pytest.mark.skipif(isinstance(native.library(), str), reason=str(native.library()))
BODIES = ["reference", pytest.param("native", marks=needs_native)]
Layout = Literal["packed", "reference"]


def golden_store(case: Path, layout: Layout, length: int) -> EventStore:
    """The reference's own cache, or the same events packed."""
    pytest.importorskip("pyarrow")
    store = open_reference(next(case.glob(f"processed_*/hstu_cache_L{length}")))
    if layout == "reference":
        return store
    return replace(
        store,
        layout="packed",
        items_E=store.items_E[:].astype(np.uint32),
        times_E=store.times_E[:].astype(np.uint32),
        packed_kinds_E=store.kinds(slice(None)),
        flags=None,
        types_E=None,
    )


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
def test_golden_samples(strategy: Strategy, layout: Layout, body: Any, golden: Path) -> None:
    cases = sorted(golden.glob("yambda_*"))
    assert cases
    for case in cases:
        meta = json.loads((case / "expected_meta.json").read_text())
        config = HistoryConfig(
            length=meta["history_length"],
            scan=meta["scan_window"],
            strategy=strategy,
        )
        with np.load(case / "expected_samples.npz") as expected:
            anchors = expected["samples/anchor_index"]
            histories = Histories(golden_store(case, layout, config.length), config, impl=body)
            batch = histories.batch(expected["positions"][anchors])
            lengths_B = histories.lengths(expected["positions"][anchors])
            assert np.array_equal(lengths_B, batch.history_offsets_B1.diff())
            for anchor, sample in zip(anchors, as_reference_samples(batch), strict=True):
                prefix = f"samples/{strategy.replace('-', '_')}/{anchor}/"
                names = [name for name in expected.files if name.startswith(prefix)]
                assert [name.removeprefix(prefix) for name in names] == list(sample)
                for name in names:
                    assert expected[name].tolist() == sample[name.removeprefix(prefix)], name


ITEMS = 400


def listens(*counts: int, layout: Layout = "packed") -> EventStore:
    """Users 5, 6, ... who listen every 5 seconds, each from 1000 s after the one before. Items are positions."""
    events, users = sum(counts), len(counts)
    edges = np.cumsum([0, *counts])
    owners = np.repeat(np.arange(users), counts)
    times = 1000 * owners + 100 + 5 * (np.arange(events) - edges[owners])
    word = np.uint32 if layout == "packed" else np.int64
    every, none = np.ones(events, np.bool_), np.zeros(events, np.bool_)
    kinds: dict[str, Any] = {"packed_kinds_E": np.ones(events, np.uint8)}
    if layout == "reference":
        kinds = {"flags": (every, none, none, none.astype(np.int8)), "types_E": np.zeros(events, np.int64)}
    return EventStore(
        folder=Path("nowhere"),
        layout=layout,
        user_ids_U=np.arange(users) + 5,
        user_first_U1=edges,
        items_E=np.arange(events).astype(word),
        times_E=times.astype(word),
        catalogue_I2=np.ones((ITEMS, 2), np.uint32),
        **kinds,
    )


@pytest.mark.parametrize("layout", ["packed", "reference"])
@pytest.mark.parametrize("body", BODIES)
def test_a_user_at_the_very_start_has_an_empty_history_and_its_own_time(body: Any, layout: Layout) -> None:
    batch = Histories(listens(3, 2, layout=layout), HistoryConfig(), impl=body).batch(np.array([0, 3, 4, 2]))
    assert batch.history_offsets_B1.tolist() == [0, 0, 0, 1, 3]
    assert batch.features["item_id"][0].tolist() == [3, 0, 1]
    assert batch.query_times_B.tolist() == [100, 1100, 1100, 105]
    assert batch.features["uid"][0].tolist() == [5, 6, 6, 5]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("position", [-1, 3, 1 << 40, -(1 << 40)])
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
    store.catalogue_I2[2, 1] = 1 << 31
    with pytest.raises(DataError, match="artist or album id above"):
        histories.batch(np.array([2]))


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"times_E": np.zeros(4, np.uint32)}, "columns differ in length"),
        ({"packed_kinds_E": np.zeros(4, np.uint8)}, "columns differ in length"),
        ({"user_first_U1": np.array([0, 4])}, "users do not cover its events"),
        ({"user_first_U1": np.array([1, 5])}, "users do not cover its events"),
        ({"user_first_U1": np.array([0, 2, 5])}, "users do not cover its events"),
        ({"user_ids_U": np.array([1 << 31])}, "user or item id above 2,147,483,647"),
    ],
)
def test_a_store_that_does_not_fit_together_is_refused(changes: dict[str, Any], how: str) -> None:
    with pytest.raises(DataError, match=how):
        Histories(replace(listens(5), **changes), HistoryConfig())
