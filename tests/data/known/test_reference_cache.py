"""A reference cache has the same events as the packed store; damage is an error that names the file or the event."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_events import make_events, write_cache, write_raw

from recperf.data.events.store import EventStore, open_store
from recperf.data.known.event_files import check_store, open_events
from recperf.data.known.yambda.mlperf_cache import open_reference
from recperf.data.known.yambda.raw import locate, prepare
from recperf.errors import DataError

_written: list[Path] = []


@pytest.fixture
def cache(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of its own for each test, written once and copied."""
    if not _written:
        root = tmp_path_factory.mktemp("written")
        files = locate(write_raw(root / "hub", make_events(events=800)))
        store = open_store(prepare(files, root / "store", name="made-up"))
        write_cache(root / "out", files, store)
        _written.append(root / "out")
    shutil.copytree(_written[0], tmp_path / "out")
    return tmp_path / "out" / "processed_50m" / "hstu_cache_L9"


def change(path: Path, by: Callable[[Any], Any]) -> None:
    np.save(path, by(np.load(path)))


def refused(cache: Path, name: str, how: str) -> None:
    with pytest.raises(DataError, match=how) as caught:
        open_reference(cache)
    assert name in caught.value.what
    assert caught.value.fix


def same_events(one: EventStore, other: EventStore) -> None:
    assert (one.events, one.users, one.items) == (other.events, other.users, other.items)
    for name in ("user_ids_U", "user_first_U1", "items_E", "times_E", "groups_IG"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert np.array_equal(one.kinds(slice(None)), other.kinds(slice(None)))
    some = np.arange(0, one.events, 7)
    assert np.array_equal(one.kinds(some), other.kinds(some))


def test_the_reference_s_own_cache_holds_the_events_of_the_store(yambda_case: Path, tmp_path: Path) -> None:
    for processed in sorted(yambda_case.glob("processed_*")):
        size = processed.name.removeprefix("processed_")
        packed = open_store(prepare(locate(yambda_case, size), tmp_path / size, name="made-up"))
        for folder in sorted(processed.glob("hstu_cache_L*")):
            opened = open_reference(folder)
            assert opened.layout == "reference"
            same_events(opened, packed)
            assert opened.manifest.events == np.load(folder / "flat_uid.npy").size
            assert check_store(opened, lambda *_: None)["verified_by_digest"] == []


def test_a_folder_is_opened_by_what_is_in_it(cache: Path, tmp_path: Path) -> None:
    store = open_store(_written[0].parent / "store")
    for path in (store.folder, cache, cache.parent):
        same_events(open_events(path), store)
    assert open_events(store.folder).layout == "packed"
    assert open_events(cache.parent).layout == "reference"
    with pytest.raises(DataError, match=r"no store\.json .* no _READY .* folder hstu_cache_L\*"):
        open_events(tmp_path)
    with pytest.raises(DataError, match="the folder does not exist"):
        open_events(tmp_path / "nowhere")
    shutil.copytree(cache, cache.with_name("hstu_cache_L7"))
    with pytest.raises(DataError, match="2 caches here: hstu_cache_L7, hstu_cache_L9"):
        open_events(cache.parent)


def test_what_is_not_finished_is_not_opened(cache: Path, tmp_path: Path) -> None:
    (cache / "_READY").unlink()
    for path in (cache, cache.parent):
        with pytest.raises(DataError, match="no complete reference cache here: _READY"):
            open_events(path)
    (tmp_path / "begun.building").mkdir()
    with pytest.raises(DataError, match="not complete"):
        open_events(tmp_path / "begun")


@pytest.mark.parametrize("name", ["flat_item_ids", "user_start"])
def test_a_column_cut_short_or_of_another_kind(cache: Path, name: str) -> None:
    path = cache / f"{name}.npy"
    whole = path.read_bytes()
    for content in (b"", whole[:5], whole[:60], whole[:-1], b"PAR1" + whole[4:]):
        path.write_bytes(content)
        refused(cache, path.name, "is cut short or not a .npy file")
    path.write_bytes(whole)
    change(path, lambda column: column.astype(np.uint16))
    refused(cache, path.name, "holds uint16")
    path.write_bytes(whole)
    change(path, lambda column: column[:, None])
    refused(cache, path.name, "not one column")


@pytest.mark.parametrize(
    ("name", "by", "how"),
    [
        ("unique_uids", lambda column: np.concatenate([column[[1, 0]], column[2:]]), "ascending ids"),
        ("unique_uids", lambda column: column - column[0] - 1, "ascending ids"),
        ("user_start", lambda table: table[:-1], "ends before user"),
        ("user_start", lambda table: np.where(table == 0, 1, table), "divide the events"),
        ("user_end", lambda table: np.where(table == table.max(), table - 1, table), "where the next begins"),
        ("flat_uid", lambda column: np.roll(column, 1), "table of users"),
    ],
)
def test_tables_of_users_that_contradict_each_other(cache: Path, name: str, by: Callable[[Any], Any], how: str) -> None:
    change(cache / f"{name}.npy", by)
    refused(cache, name, how)
