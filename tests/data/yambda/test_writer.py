"""A store resumes after any interruption with the same bytes, and is never visible unfinished."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recperf.data.yambda import writer as writer_module
from recperf.data.yambda.store import COLUMNS, MANIFEST, file_of, kinds_of, open_store, verify
from recperf.data.yambda.writer import JOURNAL, StoreWriter
from recperf.errors import DataError, MachineError
from recperf.folders import alone

FACTS = {"name": "t", "synthetic": True, "licence": "none"}
CATALOGUE = np.arange(102, dtype=np.uint32).reshape(-1, 2)
Events = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    """Blocks of digests that a test fills many of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recperf.data.yambda.store.DIGEST_BLOCK", 256)
        yield


@pytest.fixture
def events(make_events: Callable[..., Any]) -> Events:
    made = make_events(events=400)
    ratios = made["ratios"].clip(0).astype(np.uint16)
    kinds = kinds_of(made["types"], ratios, made["organic"])
    return {**{name: made[name] for name in ("uids", "items", "times")}, "kinds": kinds}


def part(events: Events, start: int, stop: int) -> Events:
    return {name: array[start:stop] for name, array in events.items()}


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def write(folder: Path, events: Events) -> Path:
    with StoreWriter(folder, identity={"source": 1}) as writer:
        writer.append(**events)
        return writer.finish(CATALOGUE, FACTS)


def test_digests_taken_in_passing_are_those_of_the_files(tmp_path: Path, events: Events) -> None:
    store = open_store(write(tmp_path / "s", events))
    for name in COLUMNS:
        content = file_of(store.folder, name).read_bytes()
        blocks = [hashlib.sha256(content[at : at + 256]).hexdigest() for at in range(0, len(content), 256)]
        assert store.manifest["columns"][name]["blocks"] == blocks
    assert len(store.manifest["columns"]["items"]["blocks"]) == -(-400 * 4 // 256)
    verify(store)
    assert sorted(contents(store.folder)) == sorted([MANIFEST, *(file_of(Path(), name).name for name in COLUMNS)])


@settings(max_examples=6, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 150), st.sampled_from(["append", "commit", "drop"])), max_size=14))
def test_any_history_of_appends_commits_and_stops_gives_the_same_bytes(
    steps: list[tuple[int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = np.random.default_rng(5)
    kinds = draw.integers(0, 80, 400).astype(np.uint8)
    events = {
        "uids": np.sort(draw.integers(1, 30, 400)).astype(np.uint32),
        "items": draw.integers(1, 51, 400).astype(np.uint32),
        "times": np.arange(400, dtype=np.uint32),
        "kinds": kinds,
    }
    place = tmp_path_factory.mktemp("stores")
    straight = contents(write(place / "straight", events))
    for count, then in [*steps, (400, "finish")]:
        with StoreWriter(place / "s", identity={"source": 1}) as writer:
            assert writer.bookmark == (writer.events or None)
            for start in (writer.events, writer.events + count // 2):
                stop = min(400, writer.events + count // 2 if start == writer.events else writer.events + count)
                writer.append(**part(events, start, stop))
            if then == "commit" and writer.events:
                writer.commit(writer.events)
            if then == "finish":
                writer.append(**part(events, writer.events, 400))
                assert contents(writer.finish(CATALOGUE, FACTS)) == straight


@pytest.mark.parametrize("content", ["", "{"])
def test_a_journal_that_cannot_be_read_means_starting_over(content: str, tmp_path: Path, events: Events) -> None:
    with StoreWriter(tmp_path / "s", identity={"source": 1}) as writer:
        writer.append(**part(events, 0, 200))
        writer.commit(200)
    path = tmp_path / "s.building" / JOURNAL
    path.write_text(content or path.read_text().replace('"bookmark": 200', '"bookmark": 100'))
    with StoreWriter(tmp_path / "s", identity={"source": 1}) as writer:
        assert (writer.discarded, writer.events) == (True, 0)
    folder = write(tmp_path / "s", events)
    assert contents(folder) == contents(write(tmp_path / "straight", events))


def test_what_is_there_already_is_never_written_over(tmp_path: Path, events: Events) -> None:
    folder = write(tmp_path / "s", events)
    before = contents(folder)
    with pytest.raises(DataError, match="there is a store already"):
        write(folder, events)
    other = tmp_path / "photos"
    other.mkdir()
    (other / "one.jpg").write_text("dear")
    with pytest.raises(DataError, match="is not empty"):
        write(other, events)
    (tmp_path / "file").write_text("dear")
    with pytest.raises(DataError, match="is not empty"):
        write(tmp_path / "file", events)
    assert contents(folder) == before
    assert (other / "one.jpg").read_text() == "dear"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert contents(write(empty, events)) == before


@pytest.mark.parametrize("name", ["one.jpg", "items.u4/one.jpg", "sub/journal.json"])
@pytest.mark.parametrize("journal", [False, True])
def test_a_folder_that_only_has_the_name_of_a_draft_is_not_changed(
    name: str, journal: bool, tmp_path: Path, events: Events
) -> None:
    """Whatever else is in it: beginning anew would have emptied it."""
    draft = tmp_path / "photos.building"
    if journal:
        with StoreWriter(tmp_path / "photos", identity={"source": 2}) as writer:
            writer.append(**part(events, 0, 200))
            writer.commit(200)
        file_of(draft, "items").unlink()
    (draft / name).parent.mkdir(parents=True, exist_ok=True)
    (draft / name).write_text("dear")
    before = {path: path.read_bytes() for path in draft.rglob("*") if path.is_file()}
    with pytest.raises(DataError, match=f"recperf did not write .*: {name.split('/')[0]}") as caught:
        write(tmp_path / "photos", events)
    assert caught.value.where["folder"] == str(draft)
    assert {path: path.read_bytes() for path in draft.rglob("*") if path.is_file()} == before


def test_what_a_killed_writer_or_import_leaves_is_cleaned_up(tmp_path: Path, events: Events) -> None:
    draft = tmp_path / "s.building"
    with alone(draft, what="writing", ours=".*"):
        (draft / "sorting").mkdir()
    left = [".journal.json.77.tmp", ".store.json.8.tmp", "store.json", "users.jsonl", "sorting/events"]
    for name in (*left, *(file_of(Path(), column).name for column in COLUMNS)):
        (draft / name).write_text("left")
    folder = write(tmp_path / "s", events)
    assert contents(folder) == contents(write(tmp_path / "straight", events))


def test_a_full_disk_is_an_error_and_can_be_resumed(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for ever fewer bytes: the disk takes a part of a write and refuses the next."""
    straight = contents(write(tmp_path / "straight", events))
    real, room = os.write, 0

    def write_some(handle: int, content: Any) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(handle, content[: min(room, 700)])
        room -= written
        return written

    refused: list[MachineError] = []
    monkeypatch.setattr(writer_module.os, "write", write_some)
    for budget in range(0, 40_000, 1350):
        room = budget
        try:
            with StoreWriter(tmp_path / "s", identity={"source": 1}) as writer:
                for start in range(writer.events, 400, 40):
                    writer.append(**part(events, start, start + 40))
                    if budget % 4:
                        writer.commit(writer.events)
                folder = writer.finish(CATALOGUE, FACTS)
                break
        except MachineError as error:
            refused.append(error)
            with pytest.raises(DataError):
                open_store(tmp_path / "s")
    assert len(refused) >= 3
    for error in refused:
        assert error.exit_code == 4
        assert "the disk is full" in error.what
        assert "it resumes" in str(error.fix)
    assert contents(folder) == straight
