"""`data check` finds damage of any file and reports how each file was verified."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data.yambda.check import check_raw, check_store
from recperf.data.yambda.config import WindowConfig
from recperf.data.yambda.prepare import prepare
from recperf.data.yambda.raw import locate
from recperf.data.yambda.reference.cache import RECORD, open_events, open_reference
from recperf.data.yambda.reference.layout import write_layout
from recperf.data.yambda.store import COLUMNS, file_of, open_store
from recperf.data.yambda.window_build import ROW_COLUMNS
from recperf.data.yambda.windows import WindowIndex
from recperf.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CACHE = "hstu_cache_L9"
FLAGS = ["flat_is_listen_plus", "flat_is_like", "flat_is_skip"]
SESSIONS = ["flat_item_ids", "flat_timestamps", "flat_event_types", "flat_played_ratio", "flat_is_organic"]
USERS = ["unique_uids", "user_start", "user_end"]
DERIVED = ["flat_uid", *FLAGS, *USERS]
ANCHORS = ["positions_L9", "positions_L9_m2", "anchor_ts_L9_m2"]
BESIDE = ["train_sessions.parquet", "session_index.parquet", "test_events.parquet", "split_meta.json"]
_made: list[Path] = []


@pytest.fixture
def place(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    make_events: Callable[..., Any],
    write_raw: Callable[..., Path],
) -> Path:
    """Raw files, a store and the reference's layout of the same events: hub, store, out; a copy for each test."""
    if not _made:
        root = tmp_path_factory.mktemp("made") / "all"
        files = locate(write_raw(root / "hub", make_events(events=600, users=8, days=30)))
        store = open_store(prepare(files, root / "store", name="made-up"))
        write_layout(files, store, root / "out", history_length=9, min_history=2)
        _made.append(root)
    shutil.copytree(_made[0], tmp_path / "all")
    return tmp_path / "all"


@pytest.fixture
def processed(place: Path) -> Path:
    return place / "out" / "processed_50m"


@pytest.fixture
def foreign(processed: Path) -> Path:
    """The same files as if somebody else had written them."""
    (processed / RECORD).unlink()
    return processed


def checked(path: Path) -> dict[str, Any]:
    progress: list[tuple[int, int]] = []
    answer = check_store(open_events(path), lambda *now: progress.append(now))
    assert {total for _, total in progress} == {answer["events"]}
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1][0] == answer["events"]
    return answer


def flip(path: Path, place: int, bit: int = 1) -> bytes:
    content = path.read_bytes()
    path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
    return content


def refused(path: Path, changed: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        checked(path)
    assert caught.value.exit_code == 3
    assert caught.value.fix
    # Of tables of users that disagree, any may be named.
    names = USERS if changed.stem in USERS else [changed.name]
    assert any(name in str(caught.value) + str(caught.value.where) for name in names)
    return caught.value


def test_raw_files_and_a_store_that_are_whole(place: Path) -> None:
    facts = check_raw(locate(place / "hub"), lambda *_: None)
    answer = checked(place / "store")
    assert (facts["events"], facts["users"]) == (600, 8)
    assert 0 < answer["events"] < 600
    assert answer["verified_by_digest"] == sorted(file_of(Path(), name).name for name in COLUMNS)
    assert answer["indexes"] == []


@pytest.mark.parametrize("name", COLUMNS)
def test_any_flipped_bit_of_a_store(name: str, place: Path) -> None:
    path = file_of(place / "store", name)
    for at in range(0, path.stat().st_size, 1 + path.stat().st_size // 5):
        content = flip(path, at)
        refused(place / "store", path)
        path.write_bytes(content)


@pytest.mark.parametrize("name", ROW_COLUMNS)
@pytest.mark.parametrize("layout", ["packed", "reference"])
def test_indexes_of_windows_belong_to_what_is_checked(name: str, layout: str, place: Path, processed: Path) -> None:
    folder = place / "store" if layout == "packed" else processed
    index = WindowIndex.open(open_events(folder), WindowConfig(seconds=86_400, min_history=2))
    assert checked(folder)["indexes"] == [str(index.folder)]
    flip(index.folder / name, 9)
    assert str(index.folder) in str(refused(folder, index.folder).fix)


def test_what_recperf_wrote_is_verified_by_digest(place: Path, processed: Path) -> None:
    answer = checked(processed)
    written = {str(path.relative_to(processed)) for path in processed.rglob("*") if path.is_file()} - {RECORD}
    maps = {f"shared_metadata/{path.name}" for path in (place / "out" / "shared_metadata").iterdir()}
    assert answer["verified_by_digest"] == sorted(written | maps)
    assert answer["verified_by_derivation"] == answer["verified_by_range"] == []
    assert answer["unverified"] == answer["absent"] == []


def test_damage_of_any_file_that_recperf_wrote(place: Path, processed: Path) -> None:
    files = [path for path in (place / "out").rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 20
    for path in files:
        size = path.stat().st_size
        if path.name != RECORD:
            for at in (size // 3, size - 1):
                content = flip(path, at)
                refused(processed, path)
                path.write_bytes(content)
        content = path.read_bytes()
        os.truncate(path, size // 2)
        refused(processed, path)
        if path.name != RECORD:
            path.unlink()
            refused(processed, path)
        path.write_bytes(content)
    checked(processed)


def test_anchors_the_reference_added_are_derived(processed: Path) -> None:
    cache = processed / CACHE
    shutil.copy(cache / "positions_L9_m2.npy", cache / "positions_L2.npy")
    (cache / "notes.txt").write_text("mine")
    answer = checked(processed)
    assert answer["verified_by_derivation"] == [f"{CACHE}/positions_L2.npy"]
    assert answer["unverified"] == [f"{CACHE}/notes.txt"]
    shutil.copy(cache / "positions_L9_m2.npy", cache / "positions_L3.npy")
    refused(processed, cache / "positions_L3.npy")


def names(*stems: str) -> list[str]:
    return [f"{CACHE}/{stem}.npy" for stem in stems]


def test_a_foreign_cache_is_verified_by_derivation(foreign: Path) -> None:
    answer = checked(foreign)
    meta = [f"{CACHE}/_READY", f"{CACHE}/store_meta.json", "item_popularity.npy", "split_meta.json"]
    derived = [*names(*DERIVED, *SESSIONS, *ANCHORS), *meta, "train_sessions.parquet", "session_index.parquet"]
    assert answer["verified_by_digest"] == answer["absent"] == answer["unverified"] == []
    assert answer["verified_by_derivation"] == sorted(derived)
    assert [Path(name).name[:5] for name in answer["verified_by_range"]] == ["album", "artis", "test_"]


@pytest.mark.parametrize("name", [*DERIVED, *SESSIONS, *ANCHORS])
def test_any_flipped_bit_of_a_foreign_cache(name: str, foreign: Path) -> None:
    """The file named may be the other of two that disagree."""
    path = foreign / CACHE / f"{name}.npy"
    size, draw = path.stat().st_size, np.random.default_rng(2)
    for at in draw.integers(128, size, 10).tolist():
        content = flip(path, at, 1 << int(draw.integers(0, 8)))
        refused(foreign, foreign if name in SESSIONS else path)
        path.write_bytes(content)
    checked(foreign)


@pytest.mark.parametrize("name", [*DERIVED, *ANCHORS, "flat_is_organic"])
def test_without_sessions_fewer_files_are_verified(name: str, foreign: Path) -> None:
    for beside in BESIDE:
        (foreign / beside).unlink()
    answer = checked(foreign)
    assert answer["absent"] == sorted(BESIDE)
    assert {*names(*SESSIONS)} < {*answer["verified_by_range"]}
    assert {*names(*DERIVED, *ANCHORS)} < {*answer["verified_by_derivation"]}
    path = foreign / CACHE / f"{name}.npy"
    for at in np.random.default_rng(3).integers(128, path.stat().st_size, 5).tolist():
        # The low bit of an origin is as good as the other.
        content = flip(path, at, 2)
        refused(foreign, path)
        path.write_bytes(content)


def test_invalid_values_are_found(foreign: Path) -> None:
    for beside in BESIDE:
        (foreign / beside).unlink()
    for name, value in (
        ("flat_event_types", 5),
        ("flat_event_types", -1),
        ("flat_played_ratio", 50.5),
        ("flat_played_ratio", -0.0),
        ("flat_played_ratio", np.nan),
        ("flat_played_ratio", 65_536),
        ("flat_is_organic", -1),
        ("flat_item_ids", -1),
        ("flat_timestamps", -5),
    ):
        path = foreign / CACHE / f"{name}.npy"
        content = path.read_bytes()
        values = np.load(path)
        values[40] = value
        np.save(path, values)
        assert "first at event 40" in refused(foreign, path).what
        path.write_bytes(content)


@pytest.mark.parametrize("name", BESIDE)
def test_files_beside_a_foreign_cache_may_be_absent_but_not_cut_short(name: str, foreign: Path) -> None:
    path = foreign / name
    content = path.read_bytes()
    for length in (0, 20, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(foreign, path)
    path.unlink()
    assert checked(foreign)["absent"] == [name]


def rewritten(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


def later(name: str, by: int = 1) -> Callable[[list[dict[str, Any]]], None]:
    """The last value of row 7 is another."""

    def change(rows: list[dict[str, Any]]) -> None:
        if isinstance(rows[7][name], list):
            rows[7][name][-1] = (rows[7][name][-1] or 0) + by
        else:
            rows[7][name] += by

    return change


@pytest.mark.parametrize(
    ("file", "change"),
    [
        *(("train_sessions.parquet", later(name)) for name in ("uid", "session_id", "item_ids", "timestamps")),
        *(("train_sessions.parquet", later(name)) for name in ("event_types", "is_organic", "played_ratio_pct")),
        ("train_sessions.parquet", lambda rows: rows.pop()),
        ("train_sessions.parquet", lambda rows: rows.append(rows[-1])),
        ("train_sessions.parquet", lambda rows: rows.reverse()),
        *(("session_index.parquet", later(name)) for name in ("uid", "session_offsets")),
        ("session_index.parquet", lambda rows: rows.pop()),
        ("session_index.parquet", lambda rows: rows.append(rows[-1])),
        ("test_events.parquet", lambda rows: rows[0].update(uid=10_000)),
        ("test_events.parquet", lambda rows: rows[0].update(timestamp=5)),
        ("test_events.parquet", lambda rows: rows[0].update(event_type=5)),
        ("test_events.parquet", lambda rows: rows[0].update(uid=None)),
    ],
)
def test_sessions_and_test_day_that_contradict_the_cache(
    file: str, change: Callable[[list[dict[str, Any]]], Any], foreign: Path
) -> None:
    rewritten(foreign / file, lambda rows: None)
    checked(foreign)
    rewritten(foreign / file, change)
    refused(foreign, foreign / file)


@pytest.mark.parametrize("file", BESIDE[:3])
def test_a_parquet_file_of_other_columns(file: str, foreign: Path) -> None:
    table = pq.read_table(foreign / file)
    pq.write_table(table.drop_columns(["uid"]), foreign / file)
    assert "no column uid" in refused(foreign, foreign / file).what
    words = pa.array(["x"] * len(table))
    pq.write_table(table.set_column(0, "uid", words), foreign / file)
    assert "uid as string" in refused(foreign, foreign / file).what


@pytest.mark.parametrize("name", ["t_max", "train_start", "gap_minutes", "num_train_events", "num_sessions"])
def test_a_split_that_contradicts_the_cache(name: str, foreign: Path) -> None:
    path = foreign / "split_meta.json"
    split = json.loads(path.read_text())
    for wrong in (split | {name: split[name] + 10_000_000}, {key: split[key] for key in split if key != name}):
        path.write_text(json.dumps(wrong))
        refused(foreign, path)


def test_sessions_cut_by_another_rule_are_not_compared(foreign: Path) -> None:
    path = foreign / "split_meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"session_gap_seconds": 600}))
    answer = checked(foreign)
    assert answer["unverified"] == ["session_index.parquet", "train_sessions.parquet"]
    assert {*names(*SESSIONS)} < {*answer["verified_by_range"]}


def test_a_damaged_record_is_an_error(processed: Path) -> None:
    for content in ("", "{", "[]", '{"files": 3}', '{"files": {"split_meta.json": {"bytes": 3}}}'):
        (processed / RECORD).write_text(content)
        with pytest.raises(DataError, match=r"\.recperf\.json cannot be read"):
            check_store(open_events(processed), lambda *_: None)


def test_the_reference_s_own_caches_are_whole(yambda_case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when sessions and blocks do not end together."""
    for block in (1 << 20, 700):
        monkeypatch.setattr("recperf.data.yambda.reference.verify._BLOCK", block)
        monkeypatch.setattr("recperf.data.yambda.reference.session_rows._ROWS", 97)
        for folder in yambda_case.glob("processed_*/hstu_cache_L*"):
            answer = check_store(open_reference(folder), lambda *_: None)
            assert answer["verified_by_digest"] == answer["unverified"] == answer["absent"] == []
            assert {"train_sessions.parquet", "session_index.parquet"} < {*answer["verified_by_derivation"]}
