from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.errors import DataError, MachineError
from recperf.train.checkpoint import CheckpointStore


def _fail(watched: Any, _: bytes) -> int:
    watched.error = OSError(28, "No space left on device")
    raise watched.error


def store(folder: Path) -> tuple[CheckpointStore, list[str]]:
    said: list[str] = []
    return CheckpointStore(folder=folder, notice=said.append), said


def state(value: int) -> dict[str, object]:
    return {"weights": torch.arange(100) * value, "value": value}


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    for step, best in ((10, True), (20, True), (30, False), (40, False)):
        checkpoints.save(step, state(step), best=best)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000020", "step-00000040"]
    assert checkpoints.load()["value"] == 40
    assert checkpoints.load("best")["value"] == 20


def test_nothing_saved_is_not_an_error(tmp_path: Path) -> None:
    assert store(tmp_path / "none")[0].load() is None


def test_saving_a_step_twice_keeps_one(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(1), best=True)
    checkpoints.save(10, state(2), best=False)
    assert checkpoints.load()["value"] == 2


def test_a_damaged_one_is_said_and_passed_over(tmp_path: Path) -> None:
    checkpoints, said = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    checkpoints.save(20, state(20), best=False)
    payload = tmp_path / "step-00000020" / "state.pt"
    content = bytearray(payload.read_bytes())
    content[len(content) // 2] ^= 1
    payload.write_bytes(content)
    assert checkpoints.load()["value"] == 10
    assert "does not match its digest" in said[0]


def test_never_a_silent_fresh_start(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    (tmp_path / "step-00000010" / "state.pt").unlink()
    with pytest.raises(DataError, match="none of the 1 checkpoints is intact"):
        checkpoints.load()


def test_a_swapped_folder_is_noticed(tmp_path: Path) -> None:
    checkpoints, said = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    checkpoints.save(20, state(20), best=False)
    (tmp_path / "step-00000020").rename(tmp_path / "step-00000030")
    assert checkpoints.load()["value"] == 10
    assert "its manifest is of step 20" in said[0]


def test_any_mutation_is_either_noticed_or_harmless(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    whole = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    draw = random.Random(0)
    for _ in range(120):
        path = draw.choice(sorted(whole))
        content = bytearray(whole[path])
        at = draw.randrange(len(content))
        if draw.random() < 0.3:
            del content[at:]
        else:
            content[at] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            loaded = checkpoints.load()
        except DataError:
            loaded = None
        if loaded is not None:
            assert loaded["value"] == 10
            assert torch.equal(loaded["weights"], state(10)["weights"])
        path.write_bytes(whole[path])


def test_left_overs_of_a_killed_save_are_swept(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    (tmp_path / ".step-00000010.999.tmp").mkdir()
    checkpoints.save(20, state(20), best=True)
    assert not list(tmp_path.glob(".step-*"))
    assert checkpoints.best() == tmp_path / "step-00000020"


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=True)

    def full(state: object, file: Any) -> None:
        # As torch does it: the write fails, and then it stumbles over where it stands in the file.
        try:
            file.write(b"x")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0") from None

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("recperf.train.checkpoint._Watched.write", lambda self, content: self.fail(content))
    monkeypatch.setattr("recperf.train.checkpoint._Watched.fail", _fail, raising=False)
    with pytest.raises(MachineError, match="the disk is full"):
        checkpoints.save(20, state(20), best=False)
    monkeypatch.undo()
    assert checkpoints.load()["value"] == 10
    assert not list(tmp_path.glob(".step-*"))
