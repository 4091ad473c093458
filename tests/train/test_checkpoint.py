"""Saving, pruning and loading checkpoints: complete, verified, the newest intact one is used."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_states import FILE, flip, state, store, value_of

from recperf import stop as points
from recperf.errors import DataError, MachineError
from recperf.files import draft_of
from recperf.train import checkpoint_folder

NOBODY = 2**22 + 1
"""A process number that the system never gives."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def at_point(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    return lambda listener: monkeypatch.setattr(points, "listener", listener)


def test_keeps_the_requested_number(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path, keep_last=3)
    for step in range(1, 7):
        checkpoints.save(step, state(step), best=step == 1)
    assert [checkpoint_folder.step_of(path) for path in checkpoints.saved()] == [6, 5, 4, 1]
    # Damaged checkpoints do not count.
    (tmp_path / "step-00000005" / FILE).unlink()
    checkpoints.save(7, state(7), best=False)
    assert [checkpoint_folder.step_of(path) for path in checkpoints.saved()] == [7, 6, 4, 1]


def test_an_intact_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(1), best=False)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in (tmp_path / "step-00000010").iterdir()}
    checkpoints.save(10, state(2), best=True)
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in (tmp_path / "step-00000010").iterdir()} == before
    checkpoints.save(20, state(20), best=False)
    assert store(tmp_path)[0].best() == tmp_path / "step-00000010"
    assert value_of(checkpoints, "best") == 1
    # Nothing but marks of the best is lost with index.json.
    (tmp_path / "index.json").write_text("[")
    assert value_of(checkpoints) == 20


def test_never_a_silent_fresh_start(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    (tmp_path / "step-00000010" / FILE).unlink()
    with pytest.raises(DataError, match=r"none of the 1 checkpoints is intact \(step-00000010: rank0-0.* is missing"):
        checkpoints.load()
    shutil.rmtree(tmp_path / "step-00000010")
    with pytest.raises(DataError, match="all checkpoints of this training are missing"):
        checkpoints.load()
    (tmp_path / "index.json").unlink()
    (tmp_path / "step-00000010").write_text("a file")
    with pytest.raises(DataError, match="it is not a folder"):
        checkpoints.load()


def test_drafts_of_dead_processes_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    step, index = tmp_path / "step-00000010", tmp_path / "index.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.getpid", lambda: NOBODY)
        left = draft_of(step), draft_of(step, "aside")
        draft_of(index).write_text("{")
        patched.setattr("os.getpid", lambda: 1)
        alive = draft_of(step)
    users = [tmp_path / f".step-00000010.{NOBODY}.tmp", tmp_path / f".step-00000010.{NOBODY}-0123456789abcdef.tmp"]
    for draft in (*left, draft_of(step), alive, *users):
        draft.mkdir()
    checkpoints.save(20, state(20), best=True)
    assert names(tmp_path) == sorted([*(path.name for path in (alive, *users)), "index.json", "step-00000020"])


def test_an_older_checkpoint_goes_only_after_the_newer_was_read_back(tmp_path: Path, at_point: Any) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=False)

    def damage(name: str) -> None:
        assert name != "prune: begun"
        if name == "save: folder synced":
            assert (tmp_path / "step-00000010").is_dir()
            flip(tmp_path / "step-00000020" / FILE, 500)

    at_point(damage)
    with pytest.raises(MachineError, match=rf"cannot be read back: {FILE} does not match its digest"):
        checkpoints.save(20, state(20), best=False)
    at_point(lambda name: None)
    assert value_of(store(tmp_path)[0]) == 10


class Death(BaseException):
    pass


@pytest.mark.parametrize("name", [name for name in points.POINTS if name.startswith(("save: ", "prune: "))])
def test_a_stop_at_any_point_leaves_an_intact_state(tmp_path: Path, name: str, at_point: Any) -> None:
    checkpoints, _ = store(tmp_path, background=True, keep_last=2)
    for step in (10, 20):
        checkpoints.save(step, state(step), best=step == 10)
    checkpoints.wait()
    damaged = name == "save: damaged one set aside"
    if damaged:
        checkpoints.save(30, state(3), best=False)
        checkpoints.wait()
        flip(tmp_path / "step-00000030" / FILE, 3)

    def die(now: str) -> None:
        if now == name:
            raise Death

    at_point(die)
    with pytest.raises(Death):
        # Two saves: only the second has something to prune.
        for step in (30, 40):
            checkpoints.save(step, state(step), best=step == 40)
            checkpoints.wait()
    at_point(lambda name: None)
    again, notices = store(tmp_path, keep_last=2)
    assert value_of(again) in ((20,) if damaged else (20, 30, 40))
    assert notices == []
    again.save(50, state(50), best=False)
    assert value_of(again) == 50
    assert len(again.saved()) <= 3
    assert not list(tmp_path.glob(".*"))


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, number: int, after: int) -> None:
    """Let a function of `os` fail after a number of calls."""
    original, calls = getattr(os, function), [0]

    def failing(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    monkeypatch.setattr(os, function, failing)


@pytest.mark.parametrize(
    ("function", "number", "after", "message"),
    [
        ("write", 28, 0, "the disk is full"),
        ("fsync", 5, 0, "input/output error"),
        ("replace", 30, 0, "read-only"),
    ],
)
def test_a_disk_error_is_reported_and_the_old_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int, after: int, message: str
) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    refuse(monkeypatch, function, number, after)
    with pytest.raises(MachineError, match=message) as refused:
        checkpoints.save(20, state(20), best=False)
    monkeypatch.undo()
    assert "\n" not in refused.value.what
    assert value_of(checkpoints) == 10
    assert not list(tmp_path.glob(".step-*"))
    checkpoints.save(40, state(40), best=False)
    assert value_of(checkpoints) == 40


def test_a_failure_in_the_background_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, notices = store(tmp_path, background=True)
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
        # An error of the training itself is not replaced.
        with pytest.raises(KeyError), checkpoints:
            checkpoints.save(20, state(20), best=False)
            raise KeyError
    assert notices == ["the last checkpoint was not written: cannot write step-00000020: the disk is full"]


def test_a_background_save_returns_at_once_and_saves_the_state_of_that_moment(tmp_path: Path, at_point: Any) -> None:
    go = threading.Event()
    at_point(lambda name: name == "save: begun" and go.wait(300))
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
    # A second save waits for the first.
    for step in (11, 12, 13):
        checkpoints.save(step, state(step), best=step == 11)
    checkpoints.wait()
    assert names(tmp_path) == ["index.json", "step-00000011", "step-00000013"]


def test_a_changed_index_is_noticed_and_not_believed(tmp_path: Path) -> None:
    checkpoints, notices = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    checkpoints.save(20, state(20), best=False)
    index = tmp_path / "index.json"
    content = json.loads(index.read_text())
    assert (content["last"], content["best"]) == ("step-00000020", "step-00000010")
    assert checkpoint_folder.index_fault(tmp_path) is None
    index.write_text(json.dumps({**content, "best": "step-00000020"}))
    assert "was changed after it was written" in str(checkpoint_folder.index_fault(tmp_path))
    assert checkpoint_folder.best_of(tmp_path) == tmp_path / "step-00000010"
    checkpoints.load()
    assert any("index.json is damaged" in notice for notice in notices)
