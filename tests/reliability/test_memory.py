"""Memory does not grow with the number of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from killable import Killable
from tiny_v4 import MODEL, QUIETLY, STREAM, own, profile, store, straight

MIB = 1 << 20
MOST = 4 * MIB
"""Allowed growth between step 500 and 2,000: 2.7 KiB for each step, less than a leaked batch."""


@pytest.mark.long
def test_resident_memory_is_flat_over_two_thousand_steps(tmp_path: Path) -> None:
    """The real loop with its loader, evaluations every 250 steps and checkpoints every 100."""
    straight()
    folder, measured = tmp_path / "run", tmp_path / "resident"
    own(folder)
    (folder / "profile.json").write_bytes(profile().read_bytes())
    arguments = ["run", "dlrm-v4", "--data.path", str(store()), "--run-dir", str(folder), *STREAM, *MODEL, *QUIETLY]
    arguments += [
        "--train.batch-size", "2", "--train.epochs", "8", "--train.max-steps", "2000", "--data.holdout-windows", "1",
        "--model.hstu.dropout", "0", "--model.input-dropout", "0",
    ]  # fmt: skip
    arguments += [
        "--train.evaluate-steps",
        "250",
        "--train.checkpoint-steps",
        "100",
        "--train.checkpoint-background",
        "on",
    ]
    process = Killable(arguments, tmp_path / "log", ("write_memory", {"path": str(measured), "every": 100}))
    assert process.wait(240) == 0, process.output
    resident = {int(step): int(size) for step, size in map(str.split, measured.read_text().splitlines())}
    assert max(resident) == 2000
    assert resident[2000] - resident[500] < MOST, resident
