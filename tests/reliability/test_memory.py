"""Two thousand steps take no more memory than five hundred."""

from __future__ import annotations

from pathlib import Path

import pytest
from killable import Killable
from tiny_v4 import MODEL, QUIETLY, STREAM, profile, store, straight

MIB = 1 << 20
MOST = 4 * MIB
"""Of growth between the 500th and the 2,000th step: 2.7 KiB a step, less than a batch that is never let go."""


@pytest.mark.long
def test_resident_memory_is_flat_over_two_thousand_steps(tmp_path: Path) -> None:
    """The real loop with its loader, evaluations every 250 steps and at each end of the data, checkpoints every 100."""
    straight()
    folder, found = tmp_path / "run", tmp_path / "resident"
    folder.mkdir()
    (folder / "profile.json").write_bytes(profile().read_bytes())
    words = ["run", "dlrm-v4", "--data.path", str(store()), "--run-dir", str(folder), *STREAM, *MODEL, *QUIETLY]
    words += [
        "--train.batch-size", "2", "--train.epochs", "8", "--train.max-steps", "2000", "--data.holdout-windows", "1",
        "--model.hstu.dropout", "0", "--model.input-dropout", "0",
    ]  # fmt: skip
    words += ["--train.evaluate-steps", "250", "--train.checkpoint-steps", "100", "--train.checkpoint-background", "on"]
    process = Killable(words, tmp_path / "log", ("write_memory", {"path": str(found), "every": 100}))
    assert process.wait(240) == 0, process.output
    resident = {int(step): int(size) for step, size in map(str.split, found.read_text().splitlines())}
    assert max(resident) == 2000
    assert resident[2000] - resident[500] < MOST, resident
