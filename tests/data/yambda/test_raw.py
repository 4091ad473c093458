"""Raw Yambda: files are found, chunks cover the file, and an invalid value is an error with its row number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recperf.data.yambda.raw import RawEvents, catalogue, locate
from recperf.data.yambda.schema import ALBUMS_FILE, ARTISTS_FILE, EVENT_TYPES, EVENTS_FILE
from recperf.errors import DataError

Make = Callable[..., Any]


def read(path: Path, **how: Any) -> dict[str, np.ndarray[Any, Any]]:
    """All chunks joined, in the form of `make_events` but with 0 for null."""
    chunks = list(RawEvents(path).chunks(**how))
    names = ("uids", "items", "times", "types", "organic", "ratios")
    return {name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names}


@pytest.mark.parametrize("layout", ["hub", "raw", "plain"])
def test_files_are_found_in_every_layout(layout: str, tmp_path: Path, make_events: Make, write_raw: Make) -> None:
    with pytest.raises(DataError, match=f"no {EVENTS_FILE}"):
        locate(tmp_path, "5b")
    write_raw(tmp_path, make_events(), size="500m", layout=layout)
    files = locate(tmp_path, "500m")
    assert (files.events.name, files.artists.name, files.albums.name) == (EVENTS_FILE, ARTISTS_FILE, ALBUMS_FILE)
    assert all(path.is_file() for path in (files.events, files.artists, files.albums))
    assert files.size == "500m"
    assert locate(tmp_path, None).events == files.events
    if layout != "plain":
        with pytest.raises(DataError, match=f"no {EVENTS_FILE}") as caught:
            locate(tmp_path, "5b")
        assert caught.value.where["there are"].endswith("/500m")
    files.albums.unlink()
    with pytest.raises(DataError, match=f"no {ALBUMS_FILE}") as caught:
        locate(tmp_path, "500m")
    assert str(tmp_path) in caught.value.where["looked in"]


@pytest.mark.parametrize(("group", "rows"), [(7, 7), (45, 64), (5000, 4096)])
def test_chunks_are_the_file_whatever_its_row_groups(
    group: int, rows: int, tmp_path: Path, make_events: Make, write_raw: Make
) -> None:
    events = make_events(seed=group, events=90)
    write_raw(tmp_path, events, row_group_size=group, data_page_size=512)
    path = locate(tmp_path).events
    raw = RawEvents(path)
    assert raw.rows == 90
    for start in (0, 6, 7, 46, 89, 90):
        chunks = list(raw.chunks(start, rows))
        assert all(len(chunk) <= rows for chunk in chunks)
        assert sum(map(len, chunks)) == 90 - start
        if start < 90:
            joined = read(path, start_row=start, rows=rows)
            for name, array in joined.items():
                np.testing.assert_array_equal(array, np.maximum(events[name], 0)[start:], name)


def changed(events: dict[str, Any], name: str, row: int, value: Any) -> dict[str, Any]:
    kinds = {"uids": "uid", "times": "timestamp", "items": "item_id", "organic": "is_organic", "types": "event_type"}
    source = [EVENT_TYPES[code] for code in events["types"]] if name == "types" else events[name].tolist()
    source[row] = value
    return {kinds[name]: pa.array(source, pa.string() if name == "types" else pa.int64())}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("uids", None, "uid is null"),
        ("uids", -4, "uid is -4"),
        ("uids", 0, "user 0 comes after user"),
        ("items", None, "item_id is null"),
        ("items", 1 << 32, "item_id is 4294967296"),
        ("items", 1 << 31, "item_id is 2147483648; it must be 0 to 2,147,483,647"),
        ("times", None, "timestamp is null"),
        ("times", -5, "timestamp is -5"),
        ("organic", None, "is_organic is null"),
        ("organic", 2, "is_organic is 2"),
        ("types", None, "event_type is null"),
        ("types", "shazam", "event_type is 'shazam'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_row(
    name: str, value: Any, says: str, tmp_path: Path, make_events: Make, write_raw: Make
) -> None:
    events = make_events()
    write_raw(tmp_path, events, columns=changed(events, name, 617, value), row_group_size=300)
    with pytest.raises(DataError, match=f"row 618 of {EVENTS_FILE}: {says}") as caught:
        read(locate(tmp_path).events, rows=128)
    assert caught.value.exit_code == 3
    assert caught.value.where == {"file": str(locate(tmp_path).events), "row": "618"}


def test_a_truncated_file_is_one_clear_error(tmp_path: Path, make_events: Make, write_raw: Make) -> None:
    path = locate(write_raw(tmp_path, make_events())).events
    content = path.read_bytes()
    for length in (0, 1, 3, 8, 11, 500, len(content) // 2, len(content) - 9, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=EVENTS_FILE) as caught:
            read(path)
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
        ({"artist_id": [1, None], "item_id": [1, 2]}, "row 2 of .*: artist_id is null"),
        ({"artist_id": [1, 2, 3], "item_id": [1, 2, -7]}, "row 3 of .*: item_id is -7; it must be 0 to 2,147,483,647"),
        ({"artist_id": [1, 2], "item_id": [1, 1 << 30]}, "row 2 of .*: item_id is 1,073,741,824; maps as long as"),
        ({"artist_id": ["a"], "item_id": [1]}, "column artist_id is string"),
        ({"item_id": [1]}, "column artist_id is missing"),
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
