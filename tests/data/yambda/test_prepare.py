"""Preparing Yambda: golden numbers, the same bytes after any kill, bounded memory, clear errors."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data.yambda import raw as raw_module
from recperf.data.yambda.raw import locate, prepare
from recperf.data.yambda.schema import (
    LIKE,
    LISTEN_PLUS,
    ORGANIC,
    SKIP,
    TYPE_SHIFT,
    split_of,
)
from recperf.data.yambda.store import open_store, verify
from recperf.errors import DataError

Make = Callable[..., Any]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 rows and a commit after every third, so that a small file has many of both."""
    for name, value in (("CHUNK_ROWS", 64), ("COMMIT_ROWS", 150)):
        monkeypatch.setattr(raw_module, name, value)


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
        for bit, name in ((ORGANIC, "organic"), (LISTEN_PLUS, "listen_plus"), (LIKE, "like"), (SKIP, "skip")):
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


def test_every_boundary_of_the_split_is_where_the_benchmark_has_it(
    tmp_path: Path, make_events: Make, write_raw: Make
) -> None:
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


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from recperf.data.yambda import raw as module, store
from recperf.data.yambda.raw import locate
from recperf.data.yambda.store import open_store, verify
from recperf.errors import DataError
import pyarrow.compute, pyarrow.parquet

module.CHUNK_ROWS, module.COMMIT_ROWS = 64, 150
store.DIGEST_BLOCK = 256
source, place = locate(Path(sys.argv[1])), Path(sys.argv[2])

def prepare(folder, deadly=None):
    "In a child; dies at its deadly-th call of the system, in the middle of it where it has one."
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    calls = []
    def counted(name):
        real = getattr(os, name)
        def call(*words, **more):
            calls.append(name)
            if len(calls) == deadly:
                if name == "write":
                    real(words[0], words[1][: len(words[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            # A kill loses nothing the system was given; really syncing would only take time.
            return None if name == "fsync" else real(*words, **more)
        setattr(os, name, call)
    for name in ("write", "fsync", "replace", "rename", "ftruncate", "unlink"):
        counted(name)
    module.prepare(source, folder, name="x")
    (place / "calls").write_text(" ".join(calls))
    os._exit(0)

def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}

assert prepare(place / "straight") == 0
straight = contents(place / "straight")
calls = (place / "calls").read_text().split()
# Every rename and removal, and every fourth of the many writes and syncs.
points = [point for point, name in enumerate(calls, 1) if name in ("replace", "rename", "unlink") or point % 4 == 0]
for point in points:
    folder = place / f"at{point}"
    assert os.WTERMSIG(prepare(folder, point)) == signal.SIGKILL
    try:
        verify(open_store(folder))
    except DataError:
        assert not folder.exists()
    assert prepare(folder) == 0
    assert contents(folder) == straight, point
    shutil.rmtree(folder)

kills = 0
while prepare(place / "chain", 45) != 0:
    kills += 1
assert contents(place / "chain") == straight
print(len(points), kills)
"""


@pytest.mark.long
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, make_events: Make, write_raw: Make) -> None:
    write_raw(tmp_path / "raw", make_events(events=500), row_group_size=210)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "raw", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    points, kills = map(int, done.stdout.split())
    assert points > 25
    assert kills > 1


def test_a_prepared_store_is_returned_at_once_and_not_replaced(
    tmp_path: Path, make_events: Make, write_raw: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = locate(write_raw(tmp_path / "raw", make_events(seed=1)))
    folder = prepare(files, tmp_path / "s", name="x")
    before = contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr(raw_module, "RawEvents", None)
        assert prepare(files, tmp_path / "s", name="x") == folder
    other = locate(write_raw(tmp_path / "other", make_events(seed=2), catalogue_I2=np.ones((51, 2), np.uint32)))
    with pytest.raises(DataError, match="of another source"):
        prepare(other, tmp_path / "s", name="x")
    with pytest.raises(DataError, match="of another source"):
        prepare(replace(files, albums=other.albums), tmp_path / "s", name="x")
    assert contents(folder) == before


def test_bad_data_in_the_middle_leaves_nothing_that_opens(
    tmp_path: Path, make_events: Make, write_raw: Make, small_chunks: None
) -> None:
    events = make_events()
    catalogue_I2 = np.ones((40, 2), np.uint32)
    events["items"] = events["items"] % 40
    events["items"][700] = 40
    write_raw(tmp_path, events, catalogue_I2=catalogue_I2)
    with pytest.raises(DataError, match=r"row 701 of .* item_id is 40; it must be 0 to 39") as caught:
        prepare(locate(tmp_path), tmp_path / "s", name="x")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "s").exists()
    # The repaired file is another source, so that nothing of the bad one survives.
    events["items"][700] = 1
    write_raw(tmp_path, events, catalogue_I2=catalogue_I2)
    folder = prepare(locate(tmp_path), tmp_path / "s", name="x")
    assert contents(folder) == contents(prepare(locate(tmp_path), tmp_path / "straight", name="x"))


MEASURED = """
import sys
from pathlib import Path
from recperf.data.yambda.raw import locate, prepare
prepare(locate(Path(sys.argv[1])), Path(sys.argv[2]), name="x")
assert "torch" not in sys.modules
[peak] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak.split()[1]) << 10)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak is read from /proc")
def test_memory_is_bounded(tmp_path: Path, make_events: Make, write_raw: Make) -> None:
    """Four million rows in one row group: all of them at once would take more."""
    events = make_events(events=4_000_000, users=400, items=1000)
    events["types"][:] = 0
    files = write_raw(tmp_path / "raw", events, row_group_size=1 << 30)
    done = subprocess.run([sys.executable, "-c", MEASURED, files, tmp_path / "s"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500 << 20
    assert open_store(tmp_path / "s").events > 3_000_000
