"""A store is opened only if complete, damage is located, and after any interruption it resumes with the same bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_events import make_events

from recperf.data.events import writer as writer_module
from recperf.data.events.manifest import EventManifest
from recperf.data.events.store import COLUMNS, EVENT_COLUMNS, MANIFEST, file_of, open_store, verify
from recperf.data.events.writer import JOURNAL, StoreWriter
from recperf.data.known.event_files import describe
from recperf.data.known.yambda.rows import kinds_of
from recperf.errors import DataError, MachineError

Make = Callable[..., Any]
Events = dict[str, Any]
EVENTS, BLOCK = 500, 300
FACTS = EventManifest(name="t", synthetic=True, licence="none", groups=["artists", "albums"])
GROUPS = np.arange(102, dtype=np.uint32).reshape(-1, 2)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    """Blocks of digests that a test fills many of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recperf.data.events.store.DIGEST_BLOCK", BLOCK)
        yield


def stored_events() -> Events:
    made = make_events(events=EVENTS)
    kinds = kinds_of(made["types"], made["ratios"].clip(0).astype(np.uint16), made["organic"])
    return {**{name: made[name] for name in ("uids", "items", "times")}, "kinds": kinds}


events = pytest.fixture(stored_events)


def write(folder: Path, events: Events) -> Path:
    with StoreWriter(folder, identity={"source": 1}) as writer:
        writer.append(**events)
        return writer.finish(GROUPS, FACTS)


@pytest.fixture
def folder(events: Events, tmp_path: Path) -> Path:
    return write(tmp_path / "s", events)


@pytest.mark.parametrize("name", list(COLUMNS))
def test_a_flipped_bit_is_found_when_its_block_is_read(name: str, folder: Path) -> None:
    """Tables when the store is opened, events when they are read; other blocks can still be used."""
    path = file_of(folder, name)
    content = bytearray(path.read_bytes())
    place = len(content) * 2 // 3
    content[place] ^= 1
    path.write_bytes(content)
    says = f"{path.name} differs from its checksum in block {place // 300} "
    if name not in EVENT_COLUMNS:
        with pytest.raises(DataError, match=says):
            open_store(folder)
        return
    store, width = open_store(folder), np.dtype(COLUMNS[name]).itemsize
    columns = {"items": store.items_E, "times": store.times_E, "kinds": store.kind_columns[0]}
    column = columns[name]
    first, stop = place // 300 * 300 // width, min(len(content), (place // 300 + 1) * 300) // width
    for rows in (slice(first), slice(stop, None), np.array([first - 1, 0, stop % 500])):
        column[rows]
    for rows in (slice(first - 1, stop), slice(None), np.array([0, stop - 1]), first):
        with pytest.raises(DataError, match=says) as caught:
            column[rows]
    assert (caught.value.exit_code, caught.value.where["file"]) == (3, str(path))
    seen: list[tuple[int, int]] = []
    with pytest.raises(DataError, match=says):
        verify(open_store(folder), lambda done, total: seen.append((done, total)))
    assert all(done <= total for done, total in seen)


@pytest.mark.parametrize(
    "rows",
    [np.arange(500) >= 450, True, slice(None, None, -1), slice(480, 470, -3), -1, [-500, -20], np.uint32(499)],
    ids=["mask", "all", "reversed", "strided", "last", "negative", "unsigned"],
)
def test_every_kind_of_index_verifies_what_it_reads(folder: Path, rows: Any) -> None:
    """Only the first 75 items, in the first block, are verified before; the damage is in the others."""
    column = open_store(folder).items_E
    whole, path = column.array.copy(), file_of(folder, "items")
    np.testing.assert_array_equal(column[rows], whole[rows])
    path.write_bytes(path.read_bytes()[:300] + b"\xff" * (path.stat().st_size - 300))
    column = open_store(folder).items_E
    column[:75]
    with pytest.raises(DataError, match="differs from its checksum"):
        column[rows]


@pytest.mark.parametrize("name", ["items", "catalogue"])
def test_a_column_of_another_length_is_never_opened(name: str, folder: Path) -> None:
    path = file_of(folder, name)
    content = path.read_bytes()
    for other in (content[:-1], content + b"\0", None):
        path.unlink() if other is None else path.write_bytes(other)
        with pytest.raises(DataError, match=f"damaged: {path.name} "):
            open_store(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m | {"events": 499}, "was changed"),
        (lambda m: m | {"version": 1}, "format 'recperf-events' 1; this recperf reads 'recperf-events' 3"),
        (lambda m: [m], "is damaged: it is not an object"),
    ],
)
def test_a_changed_manifest_is_refused(change: Make, says: str, folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=says):
        open_store(folder)
    path.write_text("{")
    with pytest.raises(DataError, match="is damaged: "):
        open_store(folder)


def test_a_store_too_small_for_anchors_is_described_without(folder: Path) -> None:
    statistics = describe(open_store(folder), seconds=86_400, min_history=600)
    assert statistics["events"] == 500
    assert statistics["windows"] == {"seconds": 86_400, "count": 0, "first_anchor": None, "last_anchor": None}
    anchors = {"min_history": 600, "total": 0, "in_the_last_window": 0, "a_window": None, "users_with_enough": 0}
    assert statistics["anchors"] == anchors


def part(events: Events, start: int, stop: int) -> Events:
    return {name: array[start:stop] for name, array in events.items()}


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@settings(max_examples=6, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 150), st.sampled_from(["append", "commit", "drop"])), max_size=14))
def test_any_history_of_appends_commits_and_stops_gives_the_same_bytes(
    steps: list[tuple[int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    events, place = stored_events(), tmp_path_factory.mktemp("stores")
    straight = contents(write(place / "straight", events))
    for count, then in [*steps, (EVENTS, "finish")]:
        with StoreWriter(place / "s", identity={"source": 1}) as writer:
            assert writer.bookmark == (writer.events or None)
            for start in (writer.events, writer.events + count // 2):
                stop = min(EVENTS, writer.events + count // 2 if start == writer.events else writer.events + count)
                writer.append(**part(events, start, stop))
            if then == "commit" and writer.events:
                writer.commit(writer.events)
            if then == "finish":
                writer.append(**part(events, writer.events, EVENTS))
                assert contents(writer.finish(GROUPS, FACTS)) == straight


@pytest.mark.parametrize("content", ["", "{"])
def test_a_journal_that_cannot_be_read_means_starting_over(content: str, tmp_path: Path, events: Events) -> None:
    with StoreWriter(tmp_path / "s", identity={"source": 1}) as writer:
        writer.append(**part(events, 0, 200))
        writer.commit(200)
    path = tmp_path / "s.building" / JOURNAL
    path.write_text(content or path.read_text().replace('"bookmark": 200', '"bookmark": 100'))
    with StoreWriter(tmp_path / "s", identity={"source": 1}) as writer:
        assert writer.events == 0
    folder = write(tmp_path / "s", events)
    assert contents(folder) == contents(write(tmp_path / "straight", events))


def test_what_is_there_already_is_never_written_over(tmp_path: Path, events: Events) -> None:
    folder = write(tmp_path / "s", events)
    before = contents(folder)
    with pytest.raises(DataError, match="there is a store already"):
        write(folder, events)
    assert contents(folder) == before
    (tmp_path / "photos").mkdir()
    for file in (tmp_path / "photos" / "one.jpg", tmp_path / "file"):
        file.write_text("dear")
        with pytest.raises(DataError, match="is not empty"):
            write(tmp_path / file.relative_to(tmp_path).parts[0], events)
        assert file.read_text() == "dear"
    (tmp_path / "empty").mkdir()
    assert contents(write(tmp_path / "empty", events)) == before


@pytest.mark.parametrize(
    ("name", "journal"), [("one.jpg", True), ("items.u4/one.jpg", False), ("sub/journal.json", True)]
)
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
                for start in range(writer.events, EVENTS, 40):
                    writer.append(**part(events, start, start + 40))
                    if budget % 4:
                        writer.commit(writer.events)
                folder = writer.finish(GROUPS, FACTS)
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
