"""Windows have the golden counts and, on random streams, the anchors of a slow search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recperf.data.blocks import Column
from recperf.data.events.kinds import LABELLED, LIKE, NEGATIVE, POSITIVE
from recperf.data.events.manifest import EventManifest
from recperf.data.events.store import EventStore
from recperf.data.known.yambda.mlperf_cache import ReferenceStore, open_reference
from recperf.data.streaming import windows
from recperf.data.streaming.config import WindowConfig
from recperf.data.streaming.fewer import with_fewer
from recperf.data.streaming.windows import WindowIndex, shuffled, unit
from recperf.errors import DataError

User = list[tuple[int, int]]
"""Times and kinds of one user's events."""


def store_of(users: list[User], folder: Path, layout: Any = "packed") -> EventStore:
    times, kinds = np.array([event for user in users for event in sorted(user, key=lambda event: event[0])]).T
    is_packed = layout == "packed"
    columns = [Column((kinds & bit) > 0) for bit in (POSITIVE, LIKE, NEGATIVE, 8)] + [Column(kinds >> 4 & 7)]
    return (EventStore if is_packed else ReferenceStore)(
        folder=folder,
        user_ids_U=np.arange(len(users)) * 3 + 1,
        user_first_U1=np.concatenate([[0], np.cumsum([len(user) for user in users])]),
        groups_IG=np.zeros((2, 2), np.uint32),
        manifest=EventManifest(name="made", synthetic=True, licence="", digest="a"),
        items_E=Column(np.zeros(len(times), np.uint32)),
        times_E=Column(times.astype(np.uint32 if is_packed else np.int64)),
        kind_columns=(Column(kinds.astype(np.uint8)),) if is_packed else tuple(columns),
    )


def slow_anchors(store: EventStore, min_history: int) -> list[int]:
    found = []
    for first, stop in zip(store.user_first_U1.tolist(), store.user_first_U1[1:].tolist()):
        for position in range(first + min_history, stop):
            if store.kinds(slice(position, position + 1))[0] & LABELLED:
                found.append(position)
    return found


def some_users(seed: int = 0, users: int = 12, events: int = 60, span: int = 5000) -> list[User]:
    draw = np.random.default_rng(seed)
    kinds = draw.choice([POSITIVE, NEGATIVE, LIKE, 0x20], (users, events), p=[0.5, 0.3, 0.1, 0.1])
    times = draw.integers(0, span, (users, events)) * 5
    return [list(zip(times[user].tolist(), kinds[user].tolist())) for user in range(users)]


events = st.tuples(st.integers(0, 60), st.sampled_from([POSITIVE, NEGATIVE, LIKE, 0x20]))
streams = st.lists(st.lists(events, min_size=1, max_size=20), min_size=1, max_size=6)


@settings(max_examples=12, deadline=None)
@given(
    users=streams,
    seconds=st.sampled_from([1, 2, 7, 30, 61, 1 << 20, 1 << 40]),
    min_history=st.integers(0, 8),
    chunk=st.sampled_from([1, 3, 16, 1 << 20]),
    layout=st.sampled_from(["packed", "reference"]),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    origin=st.sampled_from([0, 1000, (1 << 32) - 61]),
)
def test_any_stream_has_the_windows_of_a_slow_search(
    users: list[User], seconds: int, min_history: int, chunk: int, layout: str, share: float, origin: int
) -> None:
    moved = [[(time + origin, kind) for time, kind in user] for user in users]
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "CHUNK", chunk)
        patch.setattr(windows, "home", lambda: Path(folder))
        store = store_of(moved, Path(folder), layout)
        config = WindowConfig(seconds=seconds, min_history=min_history, train_share=share, split_salt=5)
        expected = slow_anchors(store, min_history)
        if not expected:
            with pytest.raises(DataError, match="no listen has"):
                WindowIndex.open(store, config)
            return
        index = WindowIndex.open(store, config)
        times = {position: int(store.times_E[position]) for position in expected}
        assert (index.t_min, index.t_max) == (min(times.values()), max(times.values()))
        assert index.windows == -(-(index.t_max - index.t_min + 1) // seconds)
        trains = (unit(store.user_ids_U, 5) < share)[store.users_of(np.array(expected))]
        for who, selected in (("all", [True] * len(expected)), ("train", trains), ("held-out", ~trains)):
            counted = []
            for window in range(index.windows):
                inside = [
                    position
                    for position, mine in zip(expected, selected)
                    if mine and (times[position] - index.t_min) // seconds == window
                ]
                assert index.anchors(window, who).tolist() == inside  # type: ignore[arg-type]
                counted.append(len(inside))
            assert index.counts(who).tolist() == counted  # type: ignore[arg-type]


def test_golden_windows(yambda_case: Path) -> None:
    meta = json.loads((yambda_case / "expected_meta.json").read_text())
    expected = np.load(yambda_case / "expected_samples.npz")
    config = WindowConfig(
        seconds=meta["window_seconds"],
        min_history=meta["min_history"],
        train_share=meta["train_split_percentage"],
        split_salt=meta["split_salt"],
    )
    caches = [*yambda_case.glob("processed_*/hstu_cache_L*")]
    assert caches
    for store in map(open_reference, caches):
        index = WindowIndex.open(store, config)
        anchors = np.array(slow_anchors(store, config.min_history))
        assert np.array_equal(anchors, expected["positions"])
        assert np.array_equal(store.times_E[anchors], expected["anchor_ts"])
        assert (index.t_min, index.t_max) == (int(expected["t_min"]), int(expected["t_max"]))
        assert np.array_equal(index.counts(), expected["windows/count"])
        assert np.array_equal(index.counts("train"), expected["windows/train_count"])
        parts = [index.anchors(window) for window in range(index.windows)]
        assert [len(part) for part in parts] == expected["windows/count"].tolist()
        assert np.array_equal(np.sort(np.concatenate(parts)), anchors)
        first = expected["windows/holdout_first_global_index"]
        scored = range(meta["holdout_start"], meta["holdout_start"] + meta["holdout_windows"])
        held = np.concatenate([index.anchors(window, "held-out") for window in scored])
        assert np.array_equal(np.searchsorted(anchors, held)[: len(first)], first)


def test_golden_hash(yambda_case: Path) -> None:
    expected = np.load(yambda_case / "expected_samples.npz")
    salts = [name for name in expected.files if name.startswith("hash/unit_salt")]
    assert salts
    for name in salts:
        assert np.array_equal(unit(expected["hash/uid"], int(name.removeprefix("hash/unit_salt"))), expected[name])


def test_shuffles_are_those_of_numpy_and_stay_so() -> None:
    positions = np.arange(100, 110)
    assert shuffled(positions, 0.0, 3) is positions
    assert shuffled(positions, 0.1, 3) is positions
    # Values of numpy 2: a numpy that draws others would silently train on another order.
    assert shuffled(positions, 1.0, 3).tolist() == np.random.default_rng(3).permutation(positions).tolist()
    assert shuffled(positions, 1.0, 3).tolist() == [109, 106, 100, 102, 101, 104, 107, 105, 103, 108]
    assert shuffled(positions, 0.4, 3).tolist() == [103, 102, 101, 100, 107, 105, 104, 106, 109, 108]
    assert positions.tolist() == list(range(100, 110))


def test_an_index_is_built_once_and_read_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = list[Path](), windows.build
    monkeypatch.setattr(windows, "build", lambda *given: (built.append(given[1]), build(*given)))
    store, config = store_of(some_users(), tmp_path), WindowConfig(seconds=5000, min_history=5)
    first = WindowIndex.open(store, config)
    second = WindowIndex.open(store, replace(config, train_share=0.5, shuffle=0.5, split_salt=3))
    assert len(built) == 1
    assert first.folder == second.folder
    assert first.folder.parent == tmp_path / "windows"
    assert {path.name for path in first.folder.iterdir()} == {".recperf", windows.MANIFEST, *windows.COLUMNS}
    for other in (replace(config, seconds=4999), replace(config, min_history=6)):
        assert WindowIndex.open(store, other).folder != first.folder
    store = replace(store, manifest=EventManifest(name="made", synthetic=True, licence="", digest="b"))
    assert WindowIndex.open(store, config).folder != first.folder
    assert len(built) == 4


def test_a_large_index_is_verified_as_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows that lie in a block with a flipped bit are refused, all others are as before."""
    monkeypatch.setattr(windows, "AT_ONCE", 0)
    monkeypatch.setattr(windows, "DIGEST_BLOCK", 64)
    store, config = store_of(some_users(), tmp_path), WindowConfig(seconds=5000, min_history=5, train_share=0.5)
    index = WindowIndex.open(store, config)
    path = index.folder / "anchors"
    content = path.read_bytes()
    for place in range(0, len(content), 37):
        path.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
        again = WindowIndex.open(store, config)
        begin, end = place // 64 * 64, place // 64 * 64 + 64
        touched = (index.offsets_W1[:-1] * 4 < end) & (index.offsets_W1[1:] * 4 > begin)
        assert touched.any()
        for window in range(again.windows):
            if not touched[window]:
                assert again.anchors(window).tolist() == index.anchors(window).tolist()
                continue
            with pytest.raises(DataError, match="the index of windows is damaged") as caught:
                again.anchors(window, "train")
            assert str(index.folder) in str(caught.value.fix)
        with pytest.raises(DataError, match="the index of windows is damaged"):
            again.counts()


def test_fewer_anchors_are_trained_on_and_all_are_held_out(tmp_path: Path) -> None:
    store = store_of(some_users(), tmp_path)
    index = WindowIndex.open(store, WindowConfig(seconds=5000, min_history=5, train_share=0.7, shuffle=1.0))

    def trained(share: float, recent: float = 1.0) -> set[int]:
        fewer = with_fewer(index, range(index.windows), "train", share=share, recent=recent)
        anchors = [fewer.order(window, "train").tolist() for window in range(index.windows)]
        assert fewer.counts("train").tolist() == [len(one) for one in anchors]
        for users in ("all", "held-out"):
            assert [fewer.anchors(w, users).tolist() for w in range(index.windows)] == [
                index.anchors(w, users).tolist() for w in range(index.windows)
            ]
        return {position for one in anchors for position in one}

    whole, half, quarter = (trained(share) for share in (1.0, 0.5, 0.25))
    assert quarter < half < whole
    assert 0.4 < len(half) / len(whole) < 0.6
    late = trained(1.0, recent=0.5)
    assert 0.5 <= len(late) / len(whole) < 0.52
    assert min(store.times_E[list(late)]) > max(store.times_E[list(whole - late)])
