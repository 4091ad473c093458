"""dlrm-v4 killed at every named moment and resumed ends bit for bit like an uninterrupted run; memory does not grow."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from killable import KILLED, Killable, home
from tiny_v4 import MODEL, QUIETLY, STREAM, begin, continued, finish, outcome, own, resume, straight, straight_run

from recperf import stop as points

ASIDE = "save: damaged one set aside"


@pytest.mark.parametrize(
    "kind", ["save", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("prune", "window", "evaluation"))]
)
def test_a_kill_at_every_named_moment(kind: str, tmp_path: Path) -> None:
    """One run, killed at each moment of a kind in turn; a moment that is never reached fails the test."""
    folder, mark = tmp_path / "run", tmp_path / "mark"
    for name in points.POINTS:
        if name.startswith(f"{kind}:") and name != ASIDE:
            process = continued(folder, ("kill_at", {"point": name, "nth": 1, "mark": str(mark)}))
            assert process.wait() == KILLED, f"no run reaches {name!r}\n{process.output}"
            assert mark.read_text() == name
    finish(folder)
    assert outcome(folder) == straight()


@pytest.mark.long
def test_a_kill_while_damaged_checkpoints_are_replaced(tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    first = begin(folder, ("kill_at", {"point": "save: indexed", "nth": 8, "mark": str(mark)}))
    assert first.wait() == KILLED, first.output
    newest = sorted((folder / "checkpoints" / "seed-42").glob("step-*"))[-2:]
    for path in newest:
        (path / "rank0-00000.safetensors").write_bytes(b"{}")
    process = resume(folder, ("kill_at", {"point": ASIDE, "nth": 1, "mark": str(mark)}))
    assert process.wait() == KILLED, process.output
    assert mark.read_text() == ASIDE
    for path in newest:
        assert f"checkpoint {path.name} is damaged (rank0-00000.safetensors has 2 bytes" in process.output
    assert "the newest intact one" in process.output
    finish(folder)
    assert outcome(folder) == straight()


@pytest.mark.parametrize(
    ("number", "code", "nth", "step"),
    [(signal.SIGTERM, 75, 1, 4), pytest.param(signal.SIGINT, 130, 3, 11, marks=pytest.mark.long)],
)
def test_signals_save_and_say_how_to_resume(number: int, code: int, nth: int, step: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = begin(folder, ("signal_at", {"point": "window: entered", "nth": nth, "number": number}))
    assert process.wait() == code, process.output
    # Training stops after the first batch of the window.
    assert f"at step {step} of 20; the state is saved" in process.output
    assert f"recperf run --resume {folder}" in process.output
    assert "Traceback" not in process.output
    assert (folder / "checkpoints" / "seed-42" / f"step-{step:08d}").is_dir()
    finish(folder)
    assert outcome(folder) == straight()


MIB = 1 << 20
MOST = 4 * MIB
"""Allowed growth between step 500 and 2,000: 2.7 KiB for each step, less than a leaked batch."""


@pytest.mark.long
def test_resident_memory_is_flat_over_two_thousand_steps(tmp_path: Path) -> None:
    """The real loop with its loader, evaluations every 250 steps and checkpoints every 100."""
    folder, measured = tmp_path / "run", tmp_path / "resident"
    own(folder)
    (folder / "profile.json").write_bytes((straight_run() / "profile.json").read_bytes())
    arguments = [
        "run",
        "dlrm-v4",
        "--data.path",
        str(home() / "events"),
        "--run-dir",
        str(folder),
        *STREAM,
        *MODEL,
        *QUIETLY,
    ]
    arguments += [
        "--train.batch-size", "2", "--train.epochs", "8", "--train.max-steps", "2000", "--data.holdout-windows", "1",
        "--model.hstu.dropout", "0", "--model.input-dropout", "0", "--train.evaluate-steps", "250",
        "--train.checkpoint-steps", "100", "--train.checkpoint-background", "on",
    ]  # fmt: skip
    process = Killable(arguments, tmp_path / "log", ("write_memory", {"path": str(measured), "every": 100}))
    assert process.wait() == 0, process.output
    resident = {int(step): int(size) for step, size in map(str.split, measured.read_text().splitlines())}
    assert max(resident) == 2000
    assert resident[2000] - resident[500] < MOST, resident
