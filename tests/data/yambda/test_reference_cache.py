"""A reference cache has the same events as the packed store; damage is an error that names the file."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data.yambda.prepare import prepare
from recperf.data.yambda.raw import locate
from recperf.data.yambda.reference.cache import (
    open_events,
    open_reference,
    reference_ratios,
)
from recperf.data.yambda.reference.layout import write_layout
from recperf.data.yambda.schema import ALBUMS_FILE, ARTISTS_FILE
from recperf.data.yambda.store import EventStore, open_store, ratios
from recperf.errors import DataError, MachineError

pytest.importorskip("pyarrow")

_written: list[Path] = []


@pytest.fixture
def cache(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    make_events: Callable[..., Any],
    write_raw: Callable[..., Path],
) -> Path:
    """A cache of its own for each test, written once and copied."""
    if not _written:
        root = tmp_path_factory.mktemp("written")
        files = locate(write_raw(root / "hub", make_events(events=800)))
        store = open_store(prepare(files, root / "store", name="made-up"))
        write_layout(files, store, root / "out", history_length=9, min_history=2)
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
    for name in ("user_ids_U", "user_first_U1", "items_E", "times_E", "catalogue_I2"):
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
            assert np.array_equal(reference_ratios(opened), ratios(packed))
            assert opened.manifest["events"] == np.load(folder / "flat_uid.npy").size
            assert opened.manifest["split"] == json.loads((processed / "split_meta.json").read_text())


def test_columns_are_mapped_where_they_lie(cache: Path) -> None:
    """Shared and read-only, so that processes share one copy and nobody can change it."""
    store = open_reference(cache)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(cache) in line]
    assert {line[1] for line in maps} == {"r--s"}
    assert {Path(line[-1]).stem for line in maps} >= {"flat_item_ids", "flat_timestamps", "flat_is_skip"}
    with pytest.raises(ValueError, match="read-only"):
        store.items_E[:][0] = 1


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


def test_a_cache_without_the_files_beside_it(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the record, which has the digests, it is read unverified, and says so once."""
    monkeypatch.setattr("recperf.errors.quiet", False)
    whole = open_reference(cache)
    assert capsys.readouterr().err == ""
    for name in ("split_meta.json", "item_popularity.npy", ".recperf.json"):
        (cache.parent / name).unlink()
    for path in (*cache.glob("positions*"), *cache.glob("anchor*")):
        path.unlink()
    same_events(open_reference(cache), whole)
    assert "split" not in open_reference(cache).manifest
    assert capsys.readouterr().err.count(f"note: {cache} has no digests") == 1


ANCHORS = ["positions_L9", "positions_L9_m2", "anchor_ts_L9_m2"]


def test_a_column_that_may_not_be_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path.open

    def forbidden(path: Path, *rest: Any, **more: Any) -> Any:
        if path.name == "flat_is_like.npy":
            raise PermissionError(errno.EACCES, "Permission denied")
        return usual(path, *rest, **more)

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(MachineError, match=r"flat_is_like\.npy cannot be read: Permission denied"):
        open_reference(cache)


@pytest.mark.parametrize("name", ["flat_item_ids", "user_start", ANCHORS[0]])
def test_a_column_cut_short_or_of_another_kind(cache: Path, name: str) -> None:
    path = cache / f"{name}.npy"
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 1)
    refused(cache, path.name, "bytes, not the")
    path.write_bytes(whole + b"\0")
    refused(cache, path.name, "bytes, not the")
    for start in (b"", whole[:5], whole[:60], b"PAR1" + whole[4:]):
        path.write_bytes(start)
        refused(cache, path.name, "has no .npy header")
    path.write_bytes(whole)
    change(path, lambda column: column.astype(np.uint16))
    refused(cache, path.name, "holds uint16")
    path.write_bytes(whole)
    change(path, lambda column: column[:, None])
    refused(cache, path.name, "not one column")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b'{"num_users": 3}', b'{"num_users": 0, "total_events": 0}', b"\xff\xfe"]
)
def test_counts_that_cannot_be(cache: Path, content: bytes) -> None:
    (cache / "store_meta.json").write_bytes(content)
    refused(cache, "store_meta.json", "state")


def test_tables_of_users_that_contradict_each_other(cache: Path) -> None:
    users = np.load(cache / "unique_uids.npy")

    def one_later(table: Any) -> Any:
        table[users[3]] += 1
        return table

    def swapped(column: Any) -> Any:
        return np.concatenate([column[[1, 0]], column[2:]])

    for name, by, how in (
        ("unique_uids", swapped, "ascending ids"),
        ("unique_uids", lambda column: column - column[0] - 1, "ascending ids"),
        ("unique_uids", lambda column: np.append(column[:-1], 10**6), "ends before user"),
        ("user_start", lambda table: table[:-1], "ends before user"),
        ("user_end", lambda table: table[:-1], "ends before user"),
        ("user_start", lambda table: np.where(table == 0, 1, table), "divide the events"),
        ("user_start", lambda table: np.full_like(table, -1), "divide the events"),
        ("user_end", one_later, "where the next begins"),
        ("user_start", one_later, "where the next begins|divide the events"),
        ("flat_uid", lambda column: np.roll(column, 1), "differs from its checksum|table of users"),
    ):
        path = cache / f"{name}.npy"
        whole = path.read_bytes()
        change(path, by)
        with pytest.raises(DataError, match=how):
            open_reference(cache)
        path.write_bytes(whole)
    open_reference(cache)


def test_popularity_must_be_of_these_events(cache: Path) -> None:
    popularity = cache.parent / "item_popularity.npy"
    whole = popularity.read_bytes()
    change(popularity, lambda counts: counts + 1)
    refused(cache, popularity.name, "counts .* events; the cache has")
    os.truncate(popularity, 200)
    refused(cache, popularity.name, "bytes, not the")
    popularity.write_bytes(whole)
    open_reference(cache)


def other_maps(folder: Path, items: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for name, file in (("artist_id", ARTISTS_FILE), ("album_id", ALBUMS_FILE)):
        ids = pa.array(np.arange(1, items), pa.uint32())
        pq.write_table(pa.table({"item_id": ids, name: ids}), folder / file)
    return folder


@pytest.mark.parametrize("counted", [True, False])
def test_maps_must_hold_every_item(cache: Path, tmp_path: Path, counted: bool) -> None:
    """Also where there is no popularity to tell the largest item."""
    items = len(np.load(cache.parent / "item_popularity.npy"))
    if not counted:
        (cache.parent / "item_popularity.npy").unlink()
    enough = open_reference(cache, maps=other_maps(tmp_path / "enough", items))
    assert enough.items == items
    assert enough.catalogue_I2[5].tolist() == [5, 5]
    # The sizes of Yambda share one catalogue: the last items may have no event.
    assert open_reference(cache, maps=other_maps(tmp_path / "more", items + 3)).items == items + 3
    with pytest.raises(DataError, match=f"the maps end at item {items - 2}; the cache has events of item {items - 1}"):
        open_reference(cache, maps=other_maps(tmp_path / "fewer", items - 1))


@pytest.mark.parametrize("name", [ARTISTS_FILE, ALBUMS_FILE])
def test_missing_and_damaged_maps(cache: Path, name: str) -> None:
    path = cache.parents[1] / "shared_metadata" / name
    os.truncate(path, 50)
    with pytest.raises(DataError, match=name):
        open_reference(cache)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        open_reference(cache)


def test_the_digest_identifies_a_cache(cache: Path, tmp_path: Path) -> None:
    digest = open_reference(cache).digest
    shutil.copytree(tmp_path / "out", tmp_path / "moved")
    assert open_reference(tmp_path / "moved" / cache.parent.name / cache.name).digest == digest
    (cache / "positions_L9_m2.npy").unlink()
    assert open_reference(cache).digest == digest
    for name in ("flat_played_ratio", "flat_is_like"):
        path = cache / f"{name}.npy"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert open_reference(cache).digest != digest
        path.write_bytes(whole)
    assert open_reference(cache).digest == digest
