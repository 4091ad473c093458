"""Checkpoints under their names: whole, verified, the newest intact one used, and what is not there said."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf import points
from recperf.errors import DataError, MachineError
from recperf.train import checkpoint_folder
from recperf.train.checkpoint import CheckpointStore

NOBODY = 2**22 + 1
"""A process number that the system never gives."""


def store(folder: Path, **fields: Any) -> tuple[CheckpointStore, list[str]]:
    said: list[str] = []
    return CheckpointStore(folder=folder, notice=said.append, **fields), said


def state(value: int) -> dict[str, Any]:
    return {"weights": torch.arange(100) * value, "table": torch.full((20_000,), float(value)), "value": value}


def value_of(checkpoints: CheckpointStore, which: str = "last") -> int:
    found = checkpoints.load(which)
    assert found is not None
    assert torch.equal(found["weights"], torch.arange(100) * found["value"])
    assert found["table"].unique().tolist() == [found["value"]]
    return int(found["value"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.fixture
def at_point(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    return lambda listener: monkeypatch.setattr(points, "listener", listener)


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    for step, best in ((10, True), (20, True), (30, False), (40, False)):
        checkpoints.save(step, state(step), best=best)
    assert names(tmp_path) == ["index.json", "step-00000020", "step-00000040"]
    assert value_of(checkpoints) == 40
    assert value_of(checkpoints, "best") == 20


def test_keeps_as_many_as_are_asked_for(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path, keep_last=3)
    for step in range(1, 7):
        checkpoints.save(step, state(step), best=step == 1)
    assert [checkpoint_folder.step_of(path) for path in checkpoints.saved()] == [6, 5, 4, 1]
    # Damaged ones do not count.
    (tmp_path / "step-00000005" / "rank0-00000.safetensors").unlink()
    checkpoints.save(7, state(7), best=False)
    assert [checkpoint_folder.step_of(path) for path in checkpoints.saved()] == [7, 6, 4, 1]


def test_steps_of_many_digits_stay_in_order(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(99_999_999, state(1), best=True)
    checkpoints.save(100_000_000, state(2), best=False)
    assert value_of(checkpoints) == 2


def test_nothing_saved_is_not_an_error(tmp_path: Path) -> None:
    assert store(tmp_path / "none")[0].load() is None
    # Nor is a first save that was killed.
    (tmp_path / f".step-00000010.{NOBODY}.tmp").mkdir()
    assert store(tmp_path)[0].load() is None


def test_a_step_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(1), best=False)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in (tmp_path / "step-00000010").iterdir()}
    checkpoints.save(10, state(2), best=True)
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in (tmp_path / "step-00000010").iterdir()} == before
    checkpoints.save(20, state(20), best=False)
    assert store(tmp_path)[0].best() == tmp_path / "step-00000010"
    # What index.json says is a help, not a need.
    (tmp_path / "index.json").write_text("[")
    assert value_of(checkpoints) == 20


def test_a_damaged_step_is_replaced(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(1), best=False)
    flip(tmp_path / "step-00000010" / "rank0-00000.safetensors", 5)
    checkpoints.save(10, state(2), best=False)
    assert value_of(checkpoints) == 2
    assert names(tmp_path) == ["index.json", "step-00000010"]


def test_what_was_passed_over_is_not_left_to_be_found_later(tmp_path: Path) -> None:
    checkpoints, said = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    checkpoints.save(20, state(20), best=False)
    file = tmp_path / "step-00000020" / "rank0-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(b"")
    again, said = store(tmp_path)
    assert value_of(again) == 10
    assert said == [
        f"checkpoint step-00000020 is damaged (rank0-00000.safetensors has 0 bytes instead of {len(content)})",
        "continuing from checkpoint step-00000010, the newest intact one",
    ]
    # The disk's trouble was a passing one; the state there is still not that of the training which went on.
    file.write_bytes(content)
    again.save(20, state(5), best=False)
    assert value_of(again) == 5
    assert again.best() == tmp_path / "step-00000010"


def test_a_training_that_went_back_keeps_its_own(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    checkpoints.save(30, state(30), best=False)
    flip(tmp_path / "step-00000030" / "rank0-00000.safetensors", 0)
    again, _ = store(tmp_path)
    again.load()
    again.save(20, state(20), best=False)
    assert names(tmp_path) == ["index.json", "step-00000010", "step-00000020"]


def test_never_a_silent_fresh_start(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    (tmp_path / "step-00000010" / "rank0-00000.safetensors").unlink()
    with pytest.raises(DataError, match=r"none of the 1 checkpoints is intact \(step-00000010: rank0-0.* is missing"):
        checkpoints.load()
    shutil.rmtree(tmp_path / "step-00000010")
    with pytest.raises(DataError, match="all checkpoints of this run are missing"):
        checkpoints.load()
    (tmp_path / "index.json").unlink()
    (tmp_path / "step-00000010").write_text("a file")
    with pytest.raises(DataError, match="it is not a folder"):
        checkpoints.load()


def test_a_checkpoint_of_the_first_format_is_refused_clearly(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000010"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": 10, "best": True, "files": {}}))
    with pytest.raises(DataError, match="it has format 1; this version reads format 4"):
        store(tmp_path)[0].load()


def test_left_overs_of_dead_processes_are_swept_and_those_of_others_are_not(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    for name in (f".step-00000010.{NOBODY}.tmp", f".step-00000005.{NOBODY}.aside", f".step-00000010.{os.getpid()}.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / f".index.json.{NOBODY}.tmp").write_text("{")
    alive = tmp_path / ".step-00000030.1.tmp"
    alive.mkdir()
    checkpoints.save(20, state(20), best=True)
    assert names(tmp_path) == [".step-00000030.1.tmp", "index.json", "step-00000020"]


def test_an_older_one_goes_only_after_the_newer_was_read_back(tmp_path: Path, at_point: Any) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=False)

    def damage(name: str) -> None:
        assert name != "prune: begun"
        if name == "save: folder synced":
            assert (tmp_path / "step-00000010").is_dir()
            flip(tmp_path / "step-00000020" / "rank0-00000.safetensors", 500)

    at_point(damage)
    with pytest.raises(MachineError, match=r"cannot be read back: rank0-00000.safetensors does not match its digest"):
        checkpoints.save(20, state(20), best=False)
    at_point(lambda name: None)
    assert value_of(store(tmp_path)[0]) == 10


class Death(BaseException):
    pass


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", [name for name in points.NAMES if name.startswith(("save: ", "prune: "))])
def test_a_stop_at_any_point_leaves_an_intact_state(tmp_path: Path, name: str, background: bool, at_point: Any) -> None:
    checkpoints, _ = store(tmp_path, background=background, keep_last=2)
    for step in (10, 20):
        checkpoints.save(step, state(step), best=step == 10)
    checkpoints.wait()
    damaged = name == "save: damaged one set aside"
    if damaged:
        checkpoints.save(30, state(3), best=False)
        checkpoints.wait()
        flip(tmp_path / "step-00000030" / "rank0-00000.safetensors", 3)
    passed = []

    def die(now: str) -> None:
        passed.append(now)
        if now == name:
            raise Death

    at_point(die)
    with pytest.raises(Death):
        # Two saves: only the second has something to prune.
        for step in (30, 40):
            checkpoints.save(step, state(step), best=step == 40)
            checkpoints.wait()
    at_point(lambda name: None)
    again, said = store(tmp_path, keep_last=2)
    assert value_of(again) in ((20,) if damaged else (20, 30, 40))
    assert said == []
    again.save(50, state(50), best=False)
    assert value_of(again) == 50
    assert len(again.saved()) <= 3
    assert not list(tmp_path.glob(".*"))


def test_every_point_of_a_save_is_listed(tmp_path: Path, at_point: Any) -> None:
    passed: list[str] = []
    at_point(passed.append)
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=False)
    checkpoints.save(20, state(20), best=False)
    flip(tmp_path / "step-00000020" / "rank0-00000.safetensors", 3)
    checkpoints.save(20, state(20), best=False)
    assert set(passed) == {name for name in points.NAMES if name.startswith(("save: ", "prune: "))}
    with pytest.raises(KeyError, match="not among"):
        points.reached("save: no such moment")


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, number: int, after: int) -> None:
    """Let a function of `os` fail from its n-th call on."""
    original, calls = getattr(os, function), [0]

    def failing(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(number, os.strerror(number))
        return original(*arguments, **named)

    monkeypatch.setattr(os, function, failing)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("function", "number", "after", "message"),
    [
        ("write", 28, 0, "the disk is full"),
        ("write", 5, 3, "input/output error"),
        ("fsync", 5, 0, "input/output error"),
        ("fsync", 28, 2, "the disk is full"),
        ("replace", 30, 0, "read-only"),
    ],
)
def test_a_disk_that_fails_is_said_and_the_old_checkpoint_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
    function: str,
    number: int,
    after: int,
    message: str,
) -> None:
    checkpoints, _ = store(tmp_path, background=background)
    checkpoints.save(10, state(10), best=True)
    checkpoints.wait()
    refuse(monkeypatch, function, number, after)
    with pytest.raises(MachineError, match=message) as refused:
        checkpoints.save(20, state(20), best=False)
        if background:
            checkpoints.save(30, state(30), best=False)
    monkeypatch.undo()
    assert "\n" not in refused.value.what
    assert value_of(checkpoints) == 10
    assert not list(tmp_path.glob(".step-*"))
    checkpoints.save(40, state(40), best=False)
    assert value_of(checkpoints) == 40


def test_a_failure_in_the_background_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, said = store(tmp_path, background=True)
    for leave in (checkpoints.wait, checkpoints.load):
        with monkeypatch.context() as patched:
            refuse(patched, "write", 28, 0)
            checkpoints.save(20, state(20), best=False)
            with pytest.raises(MachineError, match="the disk is full"):
                leave()
    with monkeypatch.context() as patched:
        refuse(patched, "write", 28, 0)
        with pytest.raises(MachineError, match="the disk is full"), checkpoints:
            checkpoints.save(20, state(20), best=False)
        # Another error that is under way stays the one that is seen.
        with pytest.raises(KeyError), checkpoints:
            checkpoints.save(20, state(20), best=False)
            raise KeyError
    assert said == ["the last checkpoint was not written: cannot write step-00000020: the disk is full"]


def test_a_background_save_returns_at_once_and_keeps_the_state_of_that_moment(tmp_path: Path, at_point: Any) -> None:
    go = threading.Event()
    at_point(lambda name: name == "save: begun" and go.wait(30))
    checkpoints, _ = store(tmp_path, background=True)
    training = state(1)
    checkpoints.save(10, training, best=False)
    assert not checkpoints.saved()
    for tensor in (training["weights"], training["table"]):
        tensor += 1
    go.set()
    checkpoints.wait()
    assert value_of(checkpoints) == 1
    assert "checkpoint" not in {thread.name for thread in threading.enumerate()}


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path, background=True)
    for step in range(1, 6):
        checkpoints.save(step, state(step), best=step == 2)
    checkpoints.wait()
    assert names(tmp_path) == ["index.json", "step-00000002", "step-00000005"]
    assert value_of(checkpoints) == 5


def test_a_newest_checkpoint_that_is_gone_as_a_whole_is_said(tmp_path: Path) -> None:
    checkpoints, said = store(tmp_path, keep_last=2)
    for step in (1, 2):
        checkpoints.save(step, state(step), best=False)
    shutil.rmtree(tmp_path / "step-00000002")
    assert value_of(checkpoints) == 1
    assert said == [
        "checkpoint step-00000002 is missing",
        "continuing from checkpoint step-00000001, the newest intact one",
    ]
