"""A store is opened only if complete, is mapped shared and read-only, and damage is located."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data.yambda import store as store_module
from recperf.data.yambda.config import WindowConfig
from recperf.data.yambda.describe import describe
from recperf.data.yambda.schema import LIKE, LISTEN_PLUS, ORGANIC, SKIP, TYPE_SHIFT
from recperf.data.yambda.store import (
    COLUMNS,
    EVENT_COLUMNS,
    MANIFEST,
    file_of,
    kinds_of,
    open_store,
    verify,
)
from recperf.data.yambda.writer import StoreWriter
from recperf.errors import DataError

Make = Callable[..., Any]


@pytest.fixture
def events(make_events: Make) -> dict[str, Any]:
    made = make_events(events=500)
    made["ratios"] = made["ratios"].clip(0).astype(np.uint16)
    made["kinds"] = kinds_of(made["types"], made["ratios"], made["organic"])
    return made


@pytest.fixture
def folder(events: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store_module, "DIGEST_BLOCK", 300)
    with StoreWriter(tmp_path / "s", identity={"a": 1}) as writer:
        writer.append(**{name: events[name] for name in ("uids", "items", "times", "kinds")})
        catalogue_I2 = np.arange(2 * 51, dtype=np.uint32).reshape(-1, 2)
        return writer.finish(catalogue_I2, {"name": "t", "synthetic": True, "licence": "none"})


def test_a_store_gives_back_what_was_written(folder: Path, events: dict[str, Any]) -> None:
    store = open_store(folder)
    np.testing.assert_array_equal(store.items_E, events["items"])
    np.testing.assert_array_equal(store.times_E, events["times"])
    np.testing.assert_array_equal(store.kinds(slice(None)), events["kinds"])
    positions = np.array([499, 3, 3, 77])
    np.testing.assert_array_equal(store.kinds(positions), events["kinds"][positions])
    ids, counts = np.unique(events["uids"], return_counts=True)
    np.testing.assert_array_equal(store.user_ids_U, ids)
    np.testing.assert_array_equal(store.user_first_U1, np.concatenate([[0], np.cumsum(counts)]))
    np.testing.assert_array_equal(store.user_ids_U[store.users_of(np.arange(500))], events["uids"])
    assert (store.events, store.users, store.items) == (500, len(ids), 51)
    assert store.catalogue_I2[50].tolist() == [100, 101]
    assert (store.name, store.synthetic) == ("t", True)
    verify(store)


@pytest.mark.parametrize("name", list(COLUMNS))
def test_a_flipped_bit_is_found_when_its_block_is_read(name: str, folder: Path) -> None:
    """Tables when the store is opened, events when they are read; other blocks can still be used."""
    path = file_of(folder, name)
    content = bytearray(path.read_bytes())
    place = len(content) * 2 // 3
    content[place] ^= 1
    path.write_bytes(content)
    says = f"{path.name} differs from its checksum in block {place // 300} "
    if name not in EVENT_COLUMNS:
        with pytest.raises(DataError, match=says):
            open_store(folder)
        return
    store, width = open_store(folder), np.dtype(COLUMNS[name]).itemsize
    columns = {"items": store.items_E, "times": store.times_E, "kinds": store.packed_kinds_E}
    column = columns[name]
    first, stop = place // 300 * 300 // width, min(len(content), (place // 300 + 1) * 300) // width
    for rows in (slice(first), slice(stop, None), np.array([first - 1, 0, stop % 500])):
        column[rows]
    for rows in (slice(first - 1, stop), slice(None), np.array([0, stop - 1]), first):
        with pytest.raises(DataError, match=says) as caught:
            column[rows]
    assert (caught.value.exit_code, caught.value.where["file"]) == (3, str(path))
    seen: list[tuple[int, int]] = []
    with pytest.raises(DataError, match=says):
        verify(open_store(folder), lambda done, total: seen.append((done, total)))
    assert all(done <= total for done, total in seen)


@pytest.mark.parametrize(
    "rows",
    [np.arange(500) >= 450, True, slice(None, None, -1), slice(480, 470, -3), -1, [-500, -20], np.uint32(499)],
    ids=["mask", "all", "reversed", "strided", "last", "negative", "unsigned"],
)
def test_every_kind_of_index_verifies_what_it_reads(folder: Path, rows: Any) -> None:
    """Only the first 75 items, in the first block, are verified before; the damage is in the others."""
    column = open_store(folder).items_E
    whole, path = column.array.copy(), file_of(folder, "items")
    np.testing.assert_array_equal(column[rows], whole[rows])
    path.write_bytes(path.read_bytes()[:300] + b"\xff" * (path.stat().st_size - 300))
    column = open_store(folder).items_E
    column[:75]
    with pytest.raises(DataError, match="differs from its checksum"):
        column[rows]


@pytest.mark.parametrize(("name", "how"), [("items", "shorter"), ("user_first", "longer"), ("catalogue", "missing")])
def test_a_column_of_another_length_is_never_opened(name: str, how: str, folder: Path) -> None:
    path = file_of(folder, name)
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if how == "shorter" else content + b"\0")
    with pytest.raises(DataError, match=f"damaged: {path.name} ") as caught:
        open_store(folder)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m | {"events": 499}, "was changed"),
        (lambda m: m | {"synthetic": False}, "was changed"),
        (lambda m: m | {"version": 1}, "format 'recperf-events' 1; this recperf reads 'recperf-events' 2"),
        (lambda m: m | {"format": "other"}, "format 'other' 2"),
        (lambda m: [m], "is damaged: it is not an object"),
        (lambda m: {key: value for key, value in m.items() if key != "seal"}, "was changed"),
    ],
)
def test_a_changed_manifest_is_refused(change: Make, says: str, folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=says):
        open_store(folder)
    path.write_text("{")
    with pytest.raises(DataError, match="is damaged: "):
        open_store(folder)


def test_a_store_too_small_for_anchors_is_described_without(folder: Path) -> None:
    statistics = describe(open_store(folder), WindowConfig(min_history=600))
    assert (statistics["events"], statistics["items_with_events"]) == (500, 50)
    assert statistics["windows"] == {"seconds": 86_400, "count": 0, "first_anchor": None, "last_anchor": None}
    anchors = {"min_history": 600, "total": 0, "in_the_last_window": 0, "a_window": None, "users_with_enough": 0}
    assert statistics["anchors"] == anchors


def test_a_folder_without_a_manifest_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no event store"):
        open_store(tmp_path)
    with StoreWriter(tmp_path / "s", identity={}):
        pass
    with pytest.raises(DataError, match="store is not complete"):
        open_store(tmp_path / "s")


@pytest.mark.parametrize("organic", [0, 1])
def test_kinds_follow_the_definition_of_the_pools(organic: int) -> None:
    cases = {
        (0, 0): SKIP, (0, 49): SKIP, (0, 50): LISTEN_PLUS, (0, 300): LISTEN_PLUS,
        (1, 0): LIKE, (1, 99): LIKE, (2, 99): 0, (3, 0): 0, (4, 50): 0,
    }  # fmt: skip
    types, played = (np.array(part) for part in zip(*cases))
    kinds = kinds_of(types.astype(np.uint8), played.astype(np.uint16), np.full(len(cases), organic, np.uint8))
    expected = [pool | organic * ORGANIC | code << TYPE_SHIFT for (code, _), pool in cases.items()]
    assert kinds.tolist() == expected
