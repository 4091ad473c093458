"""`data check` finds damage of raw files, of a store, and as far as columns contradict each other of a cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data.yambda.check import check_raw, check_store
from recperf.data.yambda.prepare import prepare
from recperf.data.yambda.raw import locate
from recperf.data.yambda.reference import open_events, open_reference
from recperf.data.yambda.store import COLUMNS, file_of, open_store
from recperf.errors import DataError

pytest.importorskip("pyarrow")

_made: list[Path] = []


@pytest.fixture
def place(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    make_events: Callable[..., Any],
    write_raw: Callable[..., Path],
    write_cache: Callable[..., Path],
) -> Path:
    """Raw files, a store and the reference's cache of the same events: hub, store, out; a copy for each test."""
    if not _made:
        root = tmp_path_factory.mktemp("made") / "all"
        files = locate(write_raw(root / "hub", make_events(events=600, users=8, days=30)))
        store = open_store(prepare(files, root / "store", name="made-up"))
        write_cache(root / "out", files, store)
        _made.append(root)
    shutil.copytree(_made[0], tmp_path / "all")
    return tmp_path / "all"


def checked(path: Path) -> dict[str, Any]:
    progress: list[tuple[int, int]] = []
    answer = check_store(open_events(path), lambda *now: progress.append(now))
    assert len({total for _, total in progress}) == 1
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1][0] == progress[-1][1]
    return answer


def test_raw_files_and_a_store_that_are_whole(place: Path) -> None:
    facts = check_raw(locate(place / "hub"), lambda *_: None)
    answer = checked(place / "store")
    assert (facts["events"], facts["users"]) == (600, 8)
    assert 0 < answer["events"] < 600
    assert answer["verified_by_digest"] == sorted(file_of(Path(), name).name for name in COLUMNS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flat_uid", 9),
        ("flat_event_types", 5),
        ("flat_event_types", -1),
        ("flat_item_ids", -1),
        ("flat_item_ids", 1 << 20),
        ("flat_timestamps", -1),
        ("flat_is_like", True),
        ("flat_is_skip", True),
        ("flat_played_ratio", 50.0),
    ],
)
def test_columns_of_a_cache_that_contradict_each_other(name: str, value: Any, place: Path) -> None:
    path = place / "out/processed_50m/hstu_cache_L9" / f"{name}.npy"
    values, flags = np.load(path), np.load(path.with_name("flat_is_listen_plus.npy"))
    # A listen-plus that is no like, and below with a ratio of a listen-plus, a skip.
    at = int(np.flatnonzero(~flags & (np.load(path.with_name("flat_event_types.npy")) == 0))[5])
    at = at if name == "flat_played_ratio" else int(np.flatnonzero(flags)[5])
    values[at] = value
    np.save(path, values)
    with pytest.raises(DataError, match=f"first at event {at}"):
        checked(place / "out/processed_50m")


def test_the_reference_s_own_caches_are_whole(yambda_case: Path) -> None:
    for folder in yambda_case.glob("processed_*/hstu_cache_L*"):
        assert check_store(open_reference(folder), lambda *_: None)["verified_by_digest"] == []
