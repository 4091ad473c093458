"""Small states for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recperf.train.checkpoint import CheckpointStore

FILE = "rank0-00000.safetensors"


def store(folder: Path, **fields: Any) -> tuple[CheckpointStore, list[str]]:
    """A store, and the notices it gives."""
    notices: list[str] = []
    return CheckpointStore(folder=folder, notice=notices.append, **fields), notices


def state(value: int) -> dict[str, Any]:
    return {"weights": torch.arange(100) * value, "table": torch.full((20_000,), float(value)), "value": value}


def value_of(checkpoints: CheckpointStore, which: str = "last") -> int:
    """Load a state and check that its parts belong together."""
    loaded = checkpoints.load(which)
    assert loaded is not None
    assert torch.equal(loaded["weights"], torch.arange(100) * loaded["value"])
    assert loaded["table"].unique().tolist() == [loaded["value"]]
    return int(loaded["value"])


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
