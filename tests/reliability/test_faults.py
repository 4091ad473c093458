"""Disk errors, a second process, a NaN loss: a one-line error, and nothing is lost."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from killable import KILLED, Killable, Trouble
from tiny_v4 import begin, finish, interrupted, outcome, resume, store, straight

from recperf.train import checkpoint_folder
from recperf.train.checkpoint import CheckpointStore

CHECKPOINTS = Path("checkpoints") / "seed-42"
WRITING = ["write", "mkdir", "replace", "fsync", "ftruncate"]


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
    assert outcome(folder) == straight().outcome


def newest(folder: Path) -> Path:
    return CheckpointStore(folder=folder / CHECKPOINTS, notice=pytest.fail).saved()[0]


@pytest.mark.parametrize(
    ("functions", "number", "point", "nth", "message"),
    [
        (["write"], errno.ENOSPC, "save: begun", 3, "the disk is full"),
        (WRITING, errno.EROFS, "save: renamed", 2, "the file system is read-only"),
    ],
)
def test_a_disk_that_starts_to_fail(
    functions: list[str], number: int, point: str, nth: int, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    trouble = ("refuse", {"functions": functions, "number": number, "point": point, "nth": nth})
    fails_with(begin(folder, trouble), 4, message)
    finishes_like_an_uninterrupted_run(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if not mount or subprocess.run([mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_read_only_file_system(small_disk: Path, tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "first")
    shutil.copytree(folder, small_disk / "run", ignore=shutil.ignore_patterns("step-*"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    fails_with(resume(small_disk / "run", log=tmp_path / "resumed"), 4, "the file system is read-only")
    fails_with(Killable(["run", "dlrm-v4", "--run-dir", str(small_disk / "new")], tmp_path / "log"), 4, "read-only")


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["run", "dlrm-v4", "--data.path", str(store()), "--run-dir", str(tmp_path / "file" / "run")]
    fails_with(Killable(arguments, tmp_path / "log"), 4, "a part of the path is a file, not a folder")


@pytest.mark.parametrize("name", ["manifest.json", "rank0-00000.safetensors"])
def test_an_unreadable_checkpoint_is_skipped_for_an_older_one(name: str, tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run")
    damaged = newest(folder)
    place = f"{damaged.name}/{name}"
    again = resume(folder, ("unreadable", {"name": place, "number": errno.EIO, "until": "save: begun"}))
    assert again.wait() == 0, again.output
    assert f"checkpoint {damaged.name} is damaged" in again.output
    assert "the newest intact one" in again.output
    assert outcome(folder) == straight().outcome


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("run/config.json", 3),
        ("run/events.jsonl", 4),
        ("run/baselines.json", 3),
        ("events/kinds.u1", 4),
    ],
)
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


@pytest.mark.parametrize("step", [1, 12])
def test_a_nan_loss(step: int, tmp_path: Path) -> None:
    """The run stops, names the step and keeps earlier checkpoints; a resume fails again until the cause is gone."""
    folder = tmp_path / "run"
    poison: Trouble = ("poison", {"step": step})
    fails_with(begin(folder, poison), 5, f"the loss is nan at step {step}")
    saved = CheckpointStore(folder=folder / CHECKPOINTS, notice=pytest.fail).saved()
    assert all(checkpoint_folder.fault(path) is None and int(path.name[5:]) < step for path in saved)
    assert bool(saved) == (step > 3)
    assert not (folder / "result.json").exists()
    fails_with(resume(folder, poison), 5, f"the loss is nan at step {step}")
    finishes_like_an_uninterrupted_run(folder)
    assert json.loads((folder / "result.json").read_text())["provenance"]["resumes"] == 2
