"""Disk errors, a second process, a NaN loss: a one-line error, and nothing is lost."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from killable import KILLED, Killable, Trouble
from tiny_v4 import EVENTS, QUIETLY, begin, finish, interrupted, outcome, resume, straight

from recperf.data.known.yambda import synthesize
from recperf.train import checkpoint_folder
from recperf.train.checkpoint import CheckpointStore

CHECKPOINTS = Path("checkpoints") / "seed-42"


def fails_with(process: Killable, code: int, *messages: str) -> None:
    """The process ended with that exit code and a one-line error."""
    assert process.wait() == code, process.output
    assert "Traceback" not in process.output
    errors = [line for line in process.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, process.output
    for text in messages:
        assert text in process.output


def finishes_like_an_uninterrupted_run(folder: Path) -> None:
    finish(folder)
    assert outcome(folder) == straight()


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trouble = ("refuse", {"functions": ["write"], "number": errno.ENOSPC, "point": "save: begun", "nth": 3})
    fails_with(begin(folder, trouble), 4, "the disk is full")
    finishes_like_an_uninterrupted_run(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if not mount or subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_read_only_file_system(small_disk: Path, tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "first")
    shutil.copytree(folder, small_disk / "run", ignore=shutil.ignore_patterns("step-*"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    fails_with(resume(small_disk / "run", log=tmp_path / "resumed"), 4, "the file system is read-only")
    fails_with(Killable(["run", "dlrm-v4", "--run-dir", str(small_disk / "new")], tmp_path / "log"), 4, "read-only")


def test_an_unreadable_checkpoint_is_skipped_for_an_older_one(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run")
    damaged = CheckpointStore(folder=folder / CHECKPOINTS, notice=pytest.fail).saved()[0]
    place = f"{damaged.name}/rank0-00000.safetensors"
    again = resume(folder, ("unreadable", {"name": place, "number": errno.EIO, "until": "save: begun"}))
    assert again.wait() == 0, again.output
    assert f"checkpoint {damaged.name} is damaged" in again.output
    assert "the newest intact one" in again.output
    assert outcome(folder) == straight()


@pytest.mark.long
@pytest.mark.parametrize(("name", "code"), [("run/config.json", 3), ("events/kinds.u1", 4)])
def test_an_unreadable_file_of_the_run(name: str, code: int, tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run")
    trouble: Trouble = ("unreadable", {"name": name, "number": errno.EIO, "until": "save: begun"})
    fails_with(resume(folder, trouble), code, "nput/output error")
    finishes_like_an_uninterrupted_run(folder)


def test_two_processes_on_one_run_folder(tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    first = begin(folder, ("pause_at", {"point": "window: entered", "nth": 2, "mark": str(mark)}))
    first.until(mark.exists)
    fails_with(resume(folder), 4, "another process is using this run folder")
    assert first.kill() == KILLED
    finishes_like_an_uninterrupted_run(folder)


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run")
    synthesize.write_store(replace(EVENTS, seed=4), tmp_path / "events")
    arguments = ["run", "--resume", str(folder), "--data.path", str(tmp_path / "events"), *QUIETLY]
    fails_with(Killable(arguments, tmp_path / "log"), 3, "the data changed since the run started")


def test_a_nan_loss(tmp_path: Path) -> None:
    """The run stops, names the step and keeps earlier checkpoints; a resume fails again until the cause is gone."""
    folder = tmp_path / "run"
    poison: Trouble = ("poison", {"step": 12})
    fails_with(begin(folder, poison), 5, "the loss is nan at step 12")
    saved = CheckpointStore(folder=folder / CHECKPOINTS, notice=pytest.fail).saved()
    assert saved
    assert all(checkpoint_folder.fault(path) is None and int(path.name[5:]) < 12 for path in saved)
    assert not (folder / "result.json").exists()
    fails_with(resume(folder, poison), 5, "the loss is nan at step 12")
    finishes_like_an_uninterrupted_run(folder)
    assert json.loads((folder / "result.json").read_text())["provenance"]["resumes"] == 2
