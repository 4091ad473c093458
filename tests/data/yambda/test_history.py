"""Batches against the golden samples, in both layouts a store can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from recperf.data.batch import HistoryBatch
from recperf.data.yambda.config import HistoryConfig, Strategy
from recperf.data.yambda.history import KEYS, Histories
from recperf.data.yambda.schema import CANDIDATE, CONTEXT, HISTORY
from recperf.data.yambda.store import EventStore, kinds_of
from recperf.ops.history import native

needs_native = pytest.mark.skipif(isinstance(native.library(), str), reason=str(native.library()))
BODIES = ["reference", pytest.param("native", marks=needs_native)]
CONTEXT_TOKENS = len(CONTEXT)


def dense_map(path: Path, column: str, items: int) -> NDArray[np.uint32]:
    table = pytest.importorskip("pyarrow.parquet").read_table(path)
    found = np.zeros(items, np.uint32)
    for item, value in zip(table["item_id"].to_pylist(), table[column].to_pylist()):
        found[item] = value
    return found


def golden_store(case: Path, layout: Literal["packed", "reference"]) -> EventStore:
    """The reference's cache as either kind of store, by hand."""
    processed = next(case.glob("processed_*"))
    cache = next(processed.glob("hstu_cache_L*"))
    flat = {path.stem: np.load(path) for path in cache.glob("*.npy")}
    items = len(np.load(processed / "item_popularity.npy"))
    maps = case / "shared_metadata"
    catalogue_I2 = np.stack(
        [
            dense_map(maps / "artist_item_mapping.parquet", "artist_id", items),
            dense_map(maps / "album_item_mapping.parquet", "album_id", items),
        ],
        1,
    )
    users = flat["unique_uids"]
    shared: dict[str, Any] = {
        "folder": cache,
        "user_ids_U": users,
        "user_first_U1": np.append(flat["user_start"][users], len(flat["flat_uid"])),
        "catalogue_I2": np.ascontiguousarray(catalogue_I2),
    }
    if layout == "reference":
        flags = tuple(flat[f"flat_is_{name}"] for name in ("listen_plus", "like", "skip", "organic"))
        return EventStore(
            layout="reference",
            items_E=flat["flat_item_ids"],
            times_E=flat["flat_timestamps"],
            flags=flags,  # type: ignore[arg-type]
            types_E=flat["flat_event_types"],
            **shared,
        )
    types, ratios = flat["flat_event_types"].astype(np.uint8), flat["flat_played_ratio"].astype(np.uint16)
    return EventStore(
        layout="packed",
        items_E=flat["flat_item_ids"].astype(np.uint32),
        times_E=flat["flat_timestamps"].astype(np.uint32),
        packed_kinds_E=kinds_of(types, ratios, flat["flat_is_organic"].astype(np.uint8)),
        **shared,
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
def test_golden_samples(strategy: Strategy, layout: Literal["packed", "reference"], body: Any, golden: Path) -> None:
    cases = sorted(golden.glob("yambda_*"))
    assert cases
    for case in cases:
        meta = json.loads((case / "expected_meta.json").read_text())
        config = HistoryConfig(
            length=meta["history_length"],
            scan=meta["scan_window"],
            strategy=strategy,
            most=meta["max_seq_len"] - 1 - CONTEXT_TOKENS,
        )
        with np.load(case / "expected_samples.npz") as expected:
            anchors = expected["samples/anchor_index"]
            batch = Histories(golden_store(case, layout), config, impl=body).batch(expected["positions"][anchors])
            for anchor, sample in zip(anchors, as_reference_samples(batch), strict=True):
                prefix = f"samples/{strategy.replace('-', '_')}/{anchor}/"
                names = [name for name in expected.files if name.startswith(prefix)]
                assert [name.removeprefix(prefix) for name in names] == list(sample)
                for name in names:
                    assert expected[name].tolist() == sample[name.removeprefix(prefix)], name
