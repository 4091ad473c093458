"""Raw Yambda: invalid values are errors with their row; preparing gives the golden events, also after any kill."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_events import make_events, write_raw

from recperf.data.events.kinds import LIKE, NEGATIVE, POSITIVE
from recperf.data.events.store import open_store, verify
from recperf.data.known.yambda import raw as raw_module
from recperf.data.known.yambda.raw import RawEvents, catalogue, locate, prepare
from recperf.data.known.yambda.rows import EVENT_TYPES, TYPE_SHIFT
from recperf.data.known.yambda.schema import ALBUMS_FILE, ARTISTS_FILE, EVENTS_FILE, split_of
from recperf.data.streaming.features import ORGANIC
from recperf.errors import DataError


@pytest.mark.parametrize("layout", ["hub", "raw", "plain"])
def test_files_are_found_in_every_layout(layout: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"there are 0 files {EVENTS_FILE}"):
        locate(tmp_path, "5b")
    write_raw(tmp_path, make_events(), size="500m", layout=layout)
    files = locate(tmp_path, "500m")
    assert (files.events.name, files.artists.name, files.albums.name) == (EVENTS_FILE, ARTISTS_FILE, ALBUMS_FILE)
    assert all(path.is_file() for path in (files.events, files.artists, files.albums))
    assert files.size == "500m"
    assert locate(tmp_path, None).events == files.events
    if layout != "plain":
        with pytest.raises(DataError, match=f"there are 0 files {EVENTS_FILE}"):
            locate(tmp_path, "5b")
    files.albums.unlink()
    with pytest.raises(DataError, match=f"no {ALBUMS_FILE}") as caught:
        locate(tmp_path, "500m")
    assert str(tmp_path) in caught.value.where["looked in"]


@pytest.mark.parametrize(("group", "rows"), [(7, 7), (45, 64), (5000, 4096)])
def test_chunks_are_the_file_whatever_its_row_groups(group: int, rows: int, tmp_path: Path) -> None:
    events = make_events(seed=group, events=90)
    write_raw(tmp_path, events, row_group_size=group, data_page_size=512)
    raw = RawEvents(locate(tmp_path).events)
    for start in (0, 6, 7, 46, 89):
        chunks = list(raw.chunks(start, rows))
        assert all(len(chunk) <= rows for chunk in chunks)
        for name in ("uids", "items", "times", "types", "organic", "ratios"):
            joined = np.concatenate([getattr(chunk, name) for chunk in chunks])
            np.testing.assert_array_equal(joined, np.maximum(events[name], 0)[start:], name)
    assert list(raw.chunks(90, rows)) == []


def changed(events: dict[str, Any], name: str, row: int, value: Any) -> dict[str, Any]:
    kinds = {"uids": "uid", "times": "timestamp", "items": "item_id", "organic": "is_organic", "types": "event_type"}
    source = [EVENT_TYPES[code] for code in events["types"]] if name == "types" else events[name].tolist()
    source[row] = value
    return {kinds[name]: pa.array(source, pa.string() if name == "types" else pa.int64())}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("uids", -4, "uid is -4"),
        ("uids", 0, "user 0 comes after user"),
        ("items", 1 << 31, "item_id is 2147483648; it must be 0 to 2,147,483,647"),
        ("times", -5, "timestamp is -5"),
        ("organic", 2, "is_organic is 2"),
        ("types", None, "event_type is null"),
        ("types", "shazam", "event_type is 'shazam'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_row(name: str, value: Any, says: str, tmp_path: Path) -> None:
    events = make_events()
    write_raw(tmp_path, events, columns=changed(events, name, 617, value), row_group_size=300)
    with pytest.raises(DataError, match=f"row 618 of {EVENTS_FILE}: {says}") as caught:
        list(RawEvents(locate(tmp_path).events).chunks(rows=128))
    assert caught.value.exit_code == 3
    assert caught.value.where == {"file": str(locate(tmp_path).events), "row": "618"}


def test_a_truncated_file_is_one_clear_error(tmp_path: Path) -> None:
    path = locate(write_raw(tmp_path, make_events())).events
    content = path.read_bytes()
    for length in (0, 1, 3, 8, 11, 500, len(content) // 2, len(content) - 9, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=EVENTS_FILE) as caught:
            list(RawEvents(path).chunks())
        assert caught.value.where["file"] == str(path)
    path.unlink()
    with pytest.raises(DataError, match="missing"):
        RawEvents(path)


def write_maps(folder: Path, artists: dict[str, Any], albums: dict[str, Any]) -> tuple[Path, Path]:
    pq.write_table(pa.table(artists), folder / ARTISTS_FILE)
    pq.write_table(pa.table(albums), folder / ALBUMS_FILE)
    return folder / ARTISTS_FILE, folder / ALBUMS_FILE


def test_the_last_row_of_an_item_counts(tmp_path: Path) -> None:
    artists = {"artist_id": [7, 8, 9], "item_id": [2, 3, 2]}
    maps = write_maps(tmp_path, artists, {"item_id": [5, 1, 5, 5], "album_id": [1, 2, 3, 4]})
    assert catalogue(*maps).tolist() == [[0, 0], [0, 2], [9, 0], [8, 0], [0, 0], [0, 4]]


@pytest.mark.parametrize(
    ("artists", "says"),
    [
        ({"artist_id": [1, 2, 3], "item_id": [1, 2, -7]}, "row 3 of .*: item_id is -7; it must be 0 to 2,147,483,647"),
        ({"artist_id": [1, 2], "item_id": [1, 1 << 30]}, "row 2 of .*: item_id is 1,073,741,824; maps as long as"),
        ({"artist_id": ["a"], "item_id": [1]}, "column artist_id is string"),
        ({"artist_id": pa.array([], pa.uint32()), "item_id": pa.array([], pa.uint32())}, "no items"),
    ],
)
def test_a_broken_map_is_refused(artists: dict[str, Any], says: str, tmp_path: Path) -> None:
    maps = write_maps(tmp_path, artists, {"item_id": [1], "album_id": [1]})
    with pytest.raises(DataError, match=says) as caught:
        catalogue(*maps)
    assert caught.value.where["file"] == str(maps[0])
    maps[1].write_bytes(b"PAR1 but nothing more PAR1")
    with pytest.raises(DataError):
        catalogue(maps[1], maps[1])


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("rows", [77, 1 << 20])
def test_a_golden_case_gives_the_reference_s_events(
    rows: int, yambda_case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_module, "CHUNK_ROWS", rows)
    for processed in sorted(yambda_case.glob("processed_*")):
        size = processed.name.removeprefix("processed_")
        store = open_store(prepare(locate(yambda_case, size), tmp_path / size, name=size))
        verify(store)
        [cache] = processed.glob("hstu_cache_L*")
        flat = {path.stem: np.load(path) for path in cache.glob("*.npy")}
        np.testing.assert_array_equal(store.user_ids_U[store.users_of(np.arange(store.events))], flat["flat_uid"])
        np.testing.assert_array_equal(store.items_E, flat["flat_item_ids"])
        np.testing.assert_array_equal(store.times_E, flat["flat_timestamps"])
        kinds = store.kinds(slice(None))
        np.testing.assert_array_equal(kinds >> TYPE_SHIFT, flat["flat_event_types"])
        for bit, name in ((ORGANIC, "organic"), (POSITIVE, "listen_plus"), (LIKE, "like"), (NEGATIVE, "skip")):
            np.testing.assert_array_equal(kinds & bit > 0, flat[f"flat_is_{name}"].astype(bool), name)
        np.testing.assert_array_equal(store.user_ids_U, flat["unique_uids"])
        for name, positions in (("user_start", store.user_first_U1[:-1]), ("user_end", store.user_first_U1[1:])):
            by_id = np.full(len(flat[name]), -1)
            by_id[store.user_ids_U] = positions
            np.testing.assert_array_equal(by_id, flat[name], name)
        expected = json.loads((processed / "split_meta.json").read_text())
        split = store.manifest.split
        for name in ("t_min", "t_max", "train_start", "train_end", "test_start", "test_end"):
            assert split[name] == expected[name]
        assert split["train_events"] == store.events == expected["num_train_events"]
        assert split["test_events"] == expected["num_test_events"]
        assert store.users == expected["num_users"]


def test_every_boundary_of_the_split_is_where_the_benchmark_has_it(tmp_path: Path) -> None:
    """Events at each of the four boundaries, and one second to either side."""
    split = split_of(300 * 86_400 + 100_000)
    edges = [split.train_start, split.train_end, split.test_start, split.test_end]
    times = [edge + step for edge in edges for step in (-1, 0, 1)][:-1]
    events = make_events(users=1, events=len(times))
    events["times"] = np.array(times, np.uint32)
    store = open_store(prepare(locate(write_raw(tmp_path, events)), tmp_path / "s", name="x"))
    start, end = split.train_start, split.train_end
    assert store.times_E[:].tolist() == [start, start + 1, end - 1]
    split_facts = store.manifest.split
    assert {name: split_facts[name] for name in asdict(split)} == asdict(split)
    counted = ("dropped_before", "train_events", "dropped_gap", "test_events", "dropped_last")
    assert [split_facts[name] for name in counted] == [1, 3, 3, 3, 1]


def test_a_prepared_store_is_not_replaced(tmp_path: Path) -> None:
    files = locate(write_raw(tmp_path / "raw", make_events(seed=1)))
    folder = prepare(files, tmp_path / "s", name="x")
    before = contents(folder)
    other = locate(write_raw(tmp_path / "other", make_events(seed=2), catalogue_I2=np.ones((51, 2), np.uint32)))
    for source in (other, replace(files, albums=other.albums)):
        with pytest.raises(DataError, match="of another source"):
            prepare(source, tmp_path / "s", name="x")
    assert prepare(files, tmp_path / "s", name="x") == folder
    assert contents(folder) == before
