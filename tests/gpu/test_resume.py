"""dlrm-v4 on a GPU, held to the same bits: killed or stopped and resumed it ends as one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_v4 import DAY, QUIETLY, logged, state_of

from recperf.data.known.yambda.synthesize import write_store
from recperf.data.known.yambda.yambda_like import YambdaLike
from recperf.train.checkpoint import CheckpointStore

DEVICE = os.environ.get("RECPERF_TEST_DEVICE", "cuda")
"""`cpu` to try the test itself where there is no GPU."""
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no GPU")

TROUBLES = Path(__file__).parents[1] / "reliability"
CHILD = "import sys, killable_troubles as t, recperf.cli as c; {arm}; sys.exit(c.main(sys.argv[1:]))"
EVENTS = YambdaLike(users=24, events_per_user=60, items=60, genres=4, seed=3)
WORDS = [
    "--data.history.length", "20", "--data.history.scan", "40", "--data.windows.min-history", "2",
    "--data.windows.seconds", str(50 * DAY), "--train.batch-size", "32", "--target.beat", "none",
    "--evaluate.every-windows", "1", "--train.checkpoint-steps", "5", "--train.checkpoint-background", "on",
    "--train.deterministic", "--model.row-scale", "0.02", "--model.table-dim", "64", "--model.hstu.dim", "64",
    "--model.hstu.layers", "2", "--model.hstu.heads", "2", "--model.hstu.qk-dim", "32", "--model.hstu.v-dim", "32",
    "--model.hstu.max-length", "64", "--model.hstu.dropout", "0.1", "--train.device", DEVICE, *QUIETLY,
]  # fmt: skip


def run(arguments: list[str], arm: str = "pass") -> int:
    path = os.pathsep.join([str(TROUBLES), *sys.path])
    command = [sys.executable, "-c", CHILD.format(arm=arm), *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    sys.stdout.write(done.stdout[-2000:] + done.stderr[-4000:])
    return done.returncode


def outcome(folder: Path) -> dict[str, Any]:
    state = CheckpointStore(folder=folder / "checkpoints" / "seed-42", notice=print).load()
    assert state is not None
    quality = json.loads((folder / "result.json").read_text())["quality"]
    return {"state": state_of(state), "events": logged(folder), "quality": quality}


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(EVENTS, tmp_path_factory.mktemp("events") / "store")


@pytest.fixture(scope="module")
def straight(events: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert run(begin(events, folder)) == 0
    return outcome(folder)


def begin(events: Path, folder: Path) -> list[str]:
    return ["run", "dlrm-v4", "--data.path", str(events), "--run-dir", str(folder), *WORDS]


def finished(folder: Path) -> dict[str, Any]:
    assert run(["run", "--resume", str(folder), *QUIETLY]) == 0
    return outcome(folder)


def test_a_kill_inside_a_save(events: Path, straight: dict[str, Any], tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    arm = f"t.kill_at('save: tensors written', 3, {str(mark)!r})"
    assert run(begin(events, folder), arm) == -signal.SIGKILL
    assert mark.exists()
    assert finished(folder) == straight
