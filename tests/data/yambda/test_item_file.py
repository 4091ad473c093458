"""A file of items beside imported events: titles, features, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recperf.data.yambda import catalogue
from recperf.data.yambda.import_options import ImportOptions
from recperf.data.yambda.imports import import_events
from recperf.data.yambda.item_features import FILE, ItemFeatures, read_items
from recperf.data.yambda.manifest import ItemFileFacts
from recperf.data.yambda.store import EventStore, open_store, originals
from recperf.errors import DataError, UsageError

EVENTS = "user,item,time,label\n1,10,5,1\n1,7,6,0\n2,7,7,1\n2,9,8,1\n"


def imported(folder: Path, items: str | bytes, name: str = "items.csv", **options: Any) -> EventStore:
    (folder / "log.csv").write_text(EVENTS)
    (folder / name).write_bytes(items if isinstance(items, bytes) else items.encode())
    requested = ImportOptions(events=folder / "log.csv", items=folder / name, **options)
    return open_store(import_events(requested, folder / "store"))


def facts(store: EventStore) -> ItemFileFacts:
    assert store.imported is not None
    assert store.imported.item_file is not None
    return store.imported.item_file


def features(store: EventStore) -> dict[str, list[list[str]]]:
    """The values of every feature, by item."""
    items = read_items(store)
    assert isinstance(items, ItemFeatures)
    return {
        name: [
            [one.names[value - 1] for value in one.values_V[one.offsets_I1[item] : one.offsets_I1[item + 1]]]
            for item in range(1, store.items)
        ]
        for name, one in items.features.items()
    }


def test_titles_and_features_by_the_numbers_of_the_store_with_the_first_feature_as_artist_and_album(
    tmp_path: Path,
) -> None:
    rows = "brand,Item_ID,title,tags,url\nB,10,Ten,x|y,u1\nA,7,,y,u2\nA,8,Eight,z,u3\n,9, Nine ,,u4\n"
    store = imported(tmp_path, rows)
    items = read_items(store)
    assert items is not None
    # Items 7, 9 and 10 have the numbers 1, 2 and 3; 8 has no events.
    assert items.titles == [None, None, "Nine", "Ten"]
    assert features(store) == {"brand": [["A"], [], ["B"]], "tags": [["y"], [], ["x", "y"]]}
    assert facts(store).left_out == {"url": "3 different values"}
    assert originals(store.folder, "artists") == ["A", "B"]
    assert store.catalogue_I2[:, 0].tolist() == [0, 1, 0, 2]
    checked = catalogue.check_store(store, lambda *_: None)
    assert FILE in checked["verified_by_digest"]
    (store.folder / FILE).write_bytes(b"other")
    with pytest.raises(DataError, match="the event store is damaged"):
        read_items(store)


def test_a_file_without_a_header_in_latin_1_as_movielens_has(tmp_path: Path) -> None:
    rows = "7::Misérables, Les (1995)::Drama|Musical\n10::Heat::Drama\n"
    store = imported(tmp_path, rows.encode("latin-1"), "movies.dat")
    items = read_items(store)
    assert items is not None
    assert items.titles == [None, "Misérables, Les (1995)", None, "Heat"]
    assert features(store) == {"3": [["Drama", "Musical"], [], ["Drama"]]}
    assert facts(store).without == 1


def test_bad_files_of_items_are_refused_by_row_and_cause(tmp_path: Path) -> None:
    for rows, message in (
        ("id,title\n7,a\n9,b\n7,c\n", "row 3: item '7' is in an earlier row, 1, too"),
        ("id,title\n7,a\n,b\n", "row 2: no item id"),
        ("id,title\n7,a\n9\n", "row 2 has 1 columns; the first line has 2"),
        ("id,title\n77,a\n78,b\n", "no item of the events is in the file of items, whose ids are like '77'"),
    ):
        with pytest.raises(DataError, match=message):
            imported(tmp_path, rows)
        assert not (tmp_path / "store").exists()
    with pytest.raises(DataError, match="the file of items cannot be read"):
        import_events(ImportOptions(events=tmp_path / "log.csv", items=tmp_path / "none.csv"), tmp_path / "store")
    with pytest.raises(UsageError, match="columns of a file of items"):
        ImportOptions(events=tmp_path / "log.csv", items_id="1")
    store = imported(tmp_path, "id,title\n7,a\n9,b\n7,c\n", skip_bad=1)
    assert read_items(store).titles[1] == "a"  # type: ignore[union-attr]
