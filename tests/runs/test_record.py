from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from recperf.errors import DataError, MachineError, RecperfError, UsageError
from recperf.files import write_atomic, write_json
from recperf.runs.record import Run, read_config


def events(run: Run) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]


def test_events_are_whole_lines_also_after_a_torn_one(tmp_path: Path) -> None:
    run = Run.create("w", {}, folder=tmp_path / "r")
    run.event("step", step=1, loss=0.5)
    run.close()
    with (tmp_path / "r" / "events.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    again = Run.open(tmp_path / "r")
    again.event("step", step=2, loss=0.4)
    assert [event["step"] for event in events(again)] == [1, 2]
    again.close()


def test_rewinding_drops_what_a_checkpoint_has_not_seen(tmp_path: Path) -> None:
    run = Run.create("w", {}, folder=tmp_path / "r")
    run.event("step", step=1)
    size = run.event_bytes
    run.event("step", step=2)
    run.rewind_events(size)
    assert [event["step"] for event in events(run)] == [1]
    assert run.log_fault(size + 1000, "") == "events.jsonl is shorter than the checkpoint says"
    assert run.log_fault(size, "another") == "events.jsonl has changed since the checkpoint was saved"
    assert run.log_fault(size, run.event_digest()) is None
    run.close()


def test_a_run_is_held_by_one_process_and_never_overwritten(tmp_path: Path) -> None:
    run = Run.create("w", {}, folder=tmp_path / "r")
    with pytest.raises(MachineError, match="another process"):
        Run.open(tmp_path / "r")
    run.close()
    Run.open(tmp_path / "r").close()
    with pytest.raises(UsageError, match="already holds a run"):
        Run.create("w", {}, folder=tmp_path / "r")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "not a file that recperf wrote"),
        ('{"schema": 1}', "not a config"),
        ('{"schema": 99, "workload": "w", "config": {}}', "schema 99"),
        ('{"schema": 1, "workload": 3, "config": {}}', "workload should be a string, is 3"),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_config(path)


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"old": True})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MachineError, match=r"cannot write result\.json: the disk is full"):
        write_atomic(path, b"new")
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"old": True}


def test_a_log_of_more_than_two_gib_keeps_every_whole_line(tmp_path: Path) -> None:
    Run.create("w", {}, folder=tmp_path / "r").close()
    path, size = tmp_path / "r" / "events.jsonl", (1 << 31) + 12345
    with path.open("r+b") as file:
        file.write(b'{"kind": ')
        file.seek(size - 1)  # A hole: one read of the system returns less than 2 GiB.
        file.write(b'\n{"half": "a li')
    run = Run.open(tmp_path / "r")
    assert run.event_bytes == size
    run.event("step", step=2)
    assert run.event_bytes > size
    run.close()


def test_the_digest_of_a_log_does_not_depend_on_how_it_was_read(tmp_path: Path) -> None:
    run = Run.create("w", {}, folder=tmp_path / "r")
    path = tmp_path / "r" / "events.jsonl"
    for step in range(30):
        run.event("step", step=step, text="x" * 100_000)
        if step % 7 == 0:
            assert run.event_digest() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert run.event_digest(1_500_000) == hashlib.sha256(path.read_bytes()[:1_500_000]).hexdigest()
    run.rewind_events(10)
    run.event("step", step=31, text="y" * 2_000_000)
    assert run.event_digest() == hashlib.sha256(path.read_bytes()).hexdigest()
    run.close()


def test_short_writes_are_completed_and_failed_ones_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create("w", {}, folder=tmp_path / "r")
    write, room = os.write, [1 << 20]

    def short(handle: int, content: bytes) -> int:
        if room[0] == 0:
            raise OSError(28, "No space left on device")
        count = write(handle, bytes(content[: min(7, room[0])]))
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", short)
    run.event("step", step=1, loss=0.5)
    room[0] = 20
    with pytest.raises(MachineError, match="the disk is full"):
        run.event("step", step=2, loss=0.4)
    monkeypatch.undo()
    run.event("step", step=3, loss=0.3)
    assert [event["step"] for event in events(run)] == [1, 3]
    run.close()


RUN_FILES = ("events.jsonl", ".lock", "config.json")


@pytest.mark.parametrize("name", RUN_FILES)
def test_the_target_of_a_link_is_not_touched(tmp_path: Path, name: str) -> None:
    Run.create("w", {}, folder=tmp_path / "r").close()
    precious = tmp_path / "precious"
    precious.write_text("first\nlast line")
    (tmp_path / "r" / name).unlink()
    (tmp_path / "r" / name).symlink_to(precious)
    with pytest.raises(RecperfError, match="it is a link") as refused:
        Run.open(tmp_path / "r")
    assert refused.value.fix == "put the file itself in its place"
    assert precious.read_text() == "first\nlast line"


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_fifo_or_a_folder_in_place_of_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    Run.create("w", {}, folder=tmp_path / "r").close()
    (tmp_path / "r" / name).unlink()
    os.mkfifo(tmp_path / "r" / name)
    with pytest.raises(RecperfError, match="it is not a regular file"):
        Run.open(tmp_path / "r")
    (tmp_path / "r" / name).unlink()
    (tmp_path / "r" / name).mkdir()
    with pytest.raises(RecperfError, match=f"cannot (read|write) {name}"):
        Run.open(tmp_path / "r")
