"""A checkpoint that the machine cannot read just now is not damaged: nothing takes its place, and it is kept."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.errors import MachineError
from recperf.train import checkpoint_file, checkpoint_folder
from recperf.train.checkpoint import CheckpointStore


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(folder=tmp_path, notice=pytest.fail, keep_last=2)
    for step in (1, 2):
        store.save(step, {"weights": torch.full((3,), float(step))}, best=False)
    return store


def goes_on(store: CheckpointStore) -> None:
    """The newest one is still there, and nothing was said of it."""
    state = store.load()
    assert state is not None
    assert state["weights"].tolist() == [2.0, 2.0, 2.0]
    assert len(store.saved()) == 2


def test_without_memory(saved: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as lacking:
        lacking.setattr(checkpoint_file.TensorFile, "read", lambda *_: torch.empty(1 << 46))
        with pytest.raises(MemoryError, match="allocate"):
            saved.load()
    goes_on(saved)


def refusing(number: int) -> Any:
    def refuse(*_: Any) -> None:
        raise OSError(number, "no")

    return refuse


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_files_that_cannot_be_read_although_their_digests_hold(
    saved: CheckpointStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr("os.preadv", refusing(number))
        with pytest.raises(MachineError, match="checkpoint step-00000002 cannot be read: no"):
            saved.load()
    goes_on(saved)


def test_files_that_cannot_be_looked_at(saved: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(checkpoint_folder, "sha256", refusing(errno.EMFILE))
        with pytest.raises(MachineError, match="checkpoint step-00000002 cannot be read: no"):
            saved.load()
    goes_on(saved)
