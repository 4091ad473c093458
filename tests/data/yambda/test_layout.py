"""The reference's folder as recperf writes it equals the golden files; writing it is resumable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recperf.data.yambda.prepare import prepare
from recperf.data.yambda.raw import RawFiles, locate
from recperf.data.yambda.reference.cache import RECORD, open_events, open_reference
from recperf.data.yambda.reference.layout import write_layout
from recperf.data.yambda.schema import ALBUMS_FILE, ARTISTS_FILE
from recperf.data.yambda.store import EventStore, block_digests, open_store
from recperf.errors import ConfigError, DataError, MachineError, UsageError
from recperf.files import sha256

pq = pytest.importorskip("pyarrow.parquet")

LENGTH, LEAST = 12, 3
Source = tuple[RawFiles, EventStore]


def prepared(root: Path, place: Path, size: str | None = None) -> Source:
    files = locate(root, size)
    return files, open_store(prepare(files, place, name="made-up"))


@pytest.fixture
def source(tmp_path: Path, make_events: Callable[..., Any], write_raw: Callable[..., Path]) -> Source:
    return prepared(write_raw(tmp_path / "hub", make_events(events=1500)), tmp_path / "store")


def write(source: Source, folder: Path, **how: Any) -> Path:
    return write_layout(*source, folder, **{"history_length": LENGTH, "min_history": LEAST, "block": 200} | how)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_order(table: Any) -> Any:
    return table.sort_by([(name, "ascending") for name in table.column_names])


@pytest.mark.parametrize("block", [None, 1000, 37])
def test_every_file_is_the_reference_s(yambda_case: Path, tmp_path: Path, block: int | None) -> None:
    settings = json.loads((yambda_case / "expected_meta.json").read_text())
    for raw in sorted((yambda_case / "raw").iterdir()):
        source = prepared(yambda_case, tmp_path / f"store_{raw.name}", raw.name)
        how = {"history_length": settings["history_length"], "min_history": settings["min_history"], "block": block}
        ours = write_layout(*source, tmp_path / "out", **how)
        theirs = yambda_case / f"processed_{raw.name}"
        assert ours.name == theirs.name
        assert contents(ours).keys() - {RECORD} == contents(theirs).keys()
        for name, content in contents(theirs).items():
            if not name.endswith(".parquet"):
                assert (ours / name).read_bytes() == content, name
                continue
            expected, written = pq.read_table(theirs / name), pq.read_table(ours / name)
            assert written.schema.equals(expected.schema), name
            if name == "test_events.parquet":
                # The reference leaves them in the order its join happens to give.
                expected, written = in_order(expected), in_order(written)
            assert written.equals(expected), name
    for path in (yambda_case / "shared_metadata").iterdir():
        assert (tmp_path / "out" / "shared_metadata" / path.name).read_bytes() == path.read_bytes()


def test_work_is_done_in_blocks(source: Source, tmp_path: Path) -> None:
    ours = write(source, tmp_path / "out", block=50)
    assert pq.ParquetFile(ours / "train_sessions.parquet").num_row_groups > 5
    whole = write(source, tmp_path / "whole", block=10_000)
    assert pq.ParquetFile(whole / "train_sessions.parquet").num_row_groups == 1
    parquet = {name for name in contents(whole) if name.endswith(".parquet")} | {RECORD}
    small, large = contents(ours), contents(whole)
    assert {name: small[name] for name in small.keys() - parquet} == {
        name: large[name] for name in large.keys() - parquet
    }


def test_files_of_anchors(source: Source, tmp_path: Path) -> None:
    """The default is always there; times are those of what was asked for."""

    def files_of(processed: Path) -> list[str]:
        cache = processed / f"hstu_cache_L{LENGTH}"
        return sorted(path.name for path in cache.iterdir() if path.name.startswith(("positions", "anchor")))

    usual = write(source, tmp_path / "usual", min_history=None)
    assert files_of(usual) == [f"anchor_ts_L{LENGTH}.npy", f"positions_L{LENGTH}.npy"]
    same = write(source, tmp_path / "same", min_history=LENGTH)
    assert files_of(same) == files_of(usual)
    cache = usual / f"hstu_cache_L{LENGTH}"
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert write(source, tmp_path / "usual", min_history=LEAST) == usual
    added = {f"anchor_ts_L{LENGTH}_m{LEAST}.npy", f"positions_L{LENGTH}_m{LEAST}.npy"}
    assert {path.name for path in cache.iterdir()} - before.keys() == added
    assert {name: (cache / name).stat().st_mtime_ns for name in before} == before

    store = source[1]
    positions = np.load(cache / f"positions_L{LENGTH}_m{LEAST}.npy")
    kinds = store.kinds(slice(None))
    users = store.users_by_position(np.arange(store.events))
    expected = [
        position
        for position in range(store.events)
        if kinds[position] & 5 and position - store.user_first_U1[users[position]] >= LEAST
    ]
    assert positions.tolist() == expected
    assert np.load(cache / f"anchor_ts_L{LENGTH}_m{LEAST}.npy").tolist() == store.times_E[positions].tolist()


KILLED = """
import os, sys
from pathlib import Path
from recperf.data.yambda.reference.layout import write_layout
from recperf.data.yambda.raw import locate
from recperf.data.yambda.store import open_store

hub, store, out, length, least = sys.argv[1:]
left = 0

def counted(call):
    def counting(*args):
        global left
        if left == 0:
            os._exit(9)
        left -= 1
        return call(*args)
    return counting

def attempt():
    os.replace, os.fsync = counted(os.replace), counted(os.fsync)
    write_layout(
        locate(Path(hub)),
        open_store(Path(store)),
        Path(out),
        history_length=int(length),
        min_history=int(least),
        block=300,
    )

for left in range(1, 200, 2):
    child = os.fork()
    if not child:
        attempt()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for path in Path(out).rglob("*"):
        if path.is_file() and path.suffix != ".tmp" and path.name not in (".recperf.lock", ".recperf.json"):
            assert path.read_bytes() == (Path(out + "_straight") / path.relative_to(out)).read_bytes(), path
    if code == 0:
        print(left)
        break
    assert code == 9, code
"""


def test_killed_anywhere_it_resumes(source: Source, tmp_path: Path) -> None:
    """Killed at the first sync or rename, then at the third of what is left, and so on until it is done."""
    straight = write(source, tmp_path / "out_straight", block=300)
    names = [tmp_path / "hub", tmp_path / "store", tmp_path / "out", LENGTH, LEAST]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, names)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    ours = contents(tmp_path / "out" / straight.name)
    assert ours == contents(straight)


def test_not_ready_before_the_end(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cache = out / "processed_50m" / f"hstu_cache_L{LENGTH}"
    seen = []

    def look(done: int, total: int) -> None:
        seen.append((done, total))
        with pytest.raises(DataError):
            open_reference(cache)

    write(source, out, progress=look)
    assert open_reference(cache).events == source[1].events
    # However many passes it takes, what is told are events of the store.
    assert {total for _, total in seen} == {source[1].events}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({done for done, _ in seen}) > 30
    assert seen[-1][0] == source[1].events


def test_written_files_are_recorded_with_their_digests(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recperf.data.yambda.store.DIGEST_BLOCK", 1000)
    # The store was written with blocks of the usual size.
    monkeypatch.setattr("recperf.data.yambda.reference.layout.verify", lambda store: None)
    ours = write(source, tmp_path / "out")
    write(source, tmp_path / "out", min_history=LEAST + 1)
    record = json.loads((ours / RECORD).read_text())
    assert record["files"].keys() == contents(ours).keys() - {RECORD}
    for name, entry in record["files"].items():
        path = ours / name
        assert entry == {"bytes": path.stat().st_size, "blocks": [*block_digests(path)]}, name
    maps = {path.name: sha256(path) for path in (tmp_path / "out" / "shared_metadata").iterdir()}
    assert record["maps"] == maps


def test_only_what_is_damaged_is_written_again(source: Source, tmp_path: Path) -> None:
    ours = write(source, tmp_path / "out")
    whole = contents(ours)
    before = {name: (ours / name).stat().st_mtime_ns for name in whole}
    column = ours / f"hstu_cache_L{LENGTH}" / "flat_timestamps.npy"
    os.truncate(column, 500)
    (ours / "session_index.parquet").unlink()

    def look(done: int, total: int) -> None:
        assert not (column.parent / "_READY").exists()

    write(source, tmp_path / "out", progress=look)
    assert contents(ours) == whole
    changed = {name for name in whole if (ours / name).stat().st_mtime_ns != before[name]}
    cache = column.parent.name
    assert changed == {RECORD, "session_index.parquet", f"{cache}/flat_timestamps.npy", f"{cache}/_READY"}


@pytest.mark.parametrize("name", ["train_sessions.parquet", "session_index.parquet", "flat_item_ids.npy"])
def test_a_full_disk_is_one_error_and_can_be_resumed(
    name: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(write(source, tmp_path / "whole"))
    usual = Path.open

    def full(path: Path, mode: str = "r", *rest: Any) -> Any:
        fresh = name in path.name and mode == "x+b"
        return usual(Path("/dev/full"), "w+b") if fresh else usual(path, mode, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(MachineError, match=f"cannot write {name}: the disk is full") as caught:
            write(source, tmp_path / "out")
    assert "resumes" in str(caught.value.fix)
    ours = tmp_path / "out" / "processed_50m"
    assert not [path for path in ours.rglob("*") if path.name == name or path.suffix == ".tmp"]
    with pytest.raises(DataError):
        open_events(ours)
    write(source, tmp_path / "out")
    assert contents(ours) == whole


def test_too_small_a_disk_is_refused_at_once(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=source[1].events * 40))
    with pytest.raises(MachineError, match=r"the disk has [0-9.]+ KiB free; .* need at least [0-9.]+ KiB"):
        write(source, tmp_path / "out")
    assert contents(tmp_path / "out" / "processed_50m").keys() <= {RECORD}


def test_the_store_must_be_of_these_events(
    source: Source, tmp_path: Path, make_events: Callable[..., Any], write_raw: Callable[..., Path]
) -> None:
    events = make_events(events=1500)
    times = events["times"].astype(np.int64)
    train = np.flatnonzero(times < times.max() - 90_000)
    for number, change in enumerate(("items", "uids", "fewer")):
        other = {name: column.copy() for name, column in events.items()}
        if change == "items":
            other["items"][train[700]] = 51 - other["items"][train[700]]
        elif change == "uids":
            other["uids"][other["uids"] == other["uids"][-1]] += 1
        else:
            other = {name: np.delete(column, train[-1]) for name, column in other.items()}
        files = locate(write_raw(tmp_path / f"other{number}", other))
        with pytest.raises(DataError, match="was not prepared from this file"):
            write((files, source[1]), tmp_path / f"out{number}")
        assert contents(tmp_path / f"out{number}" / "processed_50m").keys() <= {RECORD}


def test_files_of_others_are_not_changed(
    source: Source, tmp_path: Path, make_events: Callable[..., Any], write_raw: Callable[..., Path]
) -> None:
    theirs = tmp_path / "theirs" / "processed_50m"
    theirs.mkdir(parents=True)
    (theirs / "train_sessions.parquet").write_bytes(b"precious")
    with pytest.raises(DataError, match=r"recperf did not write: train_sessions\.parquet"):
        write(source, tmp_path / "theirs")
    assert contents(theirs) == {"train_sessions.parquet": b"precious"}

    write(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    other = prepared(write_raw(tmp_path / "hub2", make_events(seed=8)), tmp_path / "store2")
    with pytest.raises(DataError, match="belongs to other events"):
        write(other, tmp_path / "out")
    after = contents(tmp_path / "out")
    assert {name: after[name] for name in before} == before


def test_maps_are_put_where_the_reference_looks(source: Source, tmp_path: Path) -> None:
    files = source[0]
    write(source, tmp_path / "out")
    place = tmp_path / "out" / "shared_metadata"
    for name, path in ((ARTISTS_FILE, files.artists), (ALBUMS_FILE, files.albums)):
        assert (place / name).read_bytes() == path.read_bytes()
    other = tmp_path / "other" / "shared_metadata"
    other.mkdir(parents=True)
    shutil.copy(files.artists, other / ALBUMS_FILE)
    with pytest.raises(DataError, match="another map"):
        write(source, tmp_path / "other")


def test_impossible_options_are_refused(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="history_length"):
        write(source, tmp_path / "out", history_length=0)
    with pytest.raises(ConfigError, match="min_history"):
        write(source, tmp_path / "out", min_history=-1)
    with pytest.raises(UsageError, match="not enough"):
        write(source, tmp_path / "out", block=None, memory=1 << 20)
    assert not (tmp_path / "out").exists()
    ours = write(source, tmp_path / "out")
    with pytest.raises(DataError, match="cache of the reference already"):
        write((source[0], open_events(ours)), tmp_path / "again")
