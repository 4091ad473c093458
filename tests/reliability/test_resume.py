"""micro-dlrm, killed and resumed, ends bit for bit like an uninterrupted run; chaos.py kills at random."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from killable import KILLED, Killable, claims

from recperf.data.movielens_like import generate, write
from recperf.train.checkpoint import CheckpointStore

FOLDER = Path(tempfile.mkdtemp(prefix="recperf-tiny-"))
"""Few ratings, so that a run takes a fraction of a second."""
COMMAND = [
    "run",
    "micro-dlrm",
    "--data.path",
    str(FOLDER / "tiny"),
    "--train.epochs",
    "2",
    "--train.batch-size",
    "200",
]
COMMAND += ["--train.checkpoint-steps", "7", "--target.beat", "none", "--train.device", "cpu"]
QUIETLY = ["--no-peaks", "--no-report"]
COMMAND += QUIETLY


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    write(generate(3, users=120, items=200, ratings=5000), FOLDER / "tiny")
    yield
    shutil.rmtree(FOLDER)


def outcome(folder: Path) -> dict[str, Any]:
    """What interruptions must not change: the last state, the logs and the result, except times."""
    store = CheckpointStore(folder=folder / "checkpoints" / "seed-42", notice=print)
    state = store.load()
    best = store.best()
    assert state is not None
    assert best is not None
    names = [path.name for path in store.saved()]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    logged = [{k: v for k, v in e.items() if k != "t"} for e in events if e["kind"] in ("step", "metric")]
    result = json.loads((folder / "result.json").read_text())
    return {
        "state": flat(state["trial"]),
        "kept": names,
        "best": best.name,
        "events": logged,
        "quality": result["quality"],
        "claims": claims(folder),
    }


def flat(value: Any) -> Any:
    """Tensors as their bytes, so that equality means every bit."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, dict):
        return {key: flat(inner) for key, inner in value.items()}
    return [flat(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def finish(folder: Path, log: Path) -> None:
    """Resume a run to its end, or start it where it has no config yet, as a user would."""
    resume = (folder / "config.json").exists()
    arguments = ["run", "--resume", str(folder), *QUIETLY] if resume else [*COMMAND, "--run-dir", str(folder)]
    process = Killable(arguments, log)
    assert process.wait() == 0, process.output


@pytest.fixture(scope="module")
def straight(tiny: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("straight")
    process = Killable([*COMMAND, "--run-dir", str(folder / "run")], folder / "log")
    assert process.wait() == 0, process.output
    expected = outcome(folder / "run")
    assert len(expected["events"]) == 42
    return expected


def test_a_kill_while_a_resumed_run_cuts_its_log(straight: dict[str, Any], tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    first = Killable([*COMMAND, "--run-dir", str(folder)], log, ("kill_in", {"function": "replace", "nth": 20}))
    assert first.wait() == KILLED
    again = Killable(["run", "--resume", str(folder), *QUIETLY], log, ("kill_in", {"function": "ftruncate", "nth": 1}))
    assert again.wait() == KILLED, again.output
    finish(folder, log)
    assert outcome(folder) == straight


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "tiny", tmp_path / "data")
    folder = tmp_path / "run"
    arguments = [str(tmp_path / "data") if word == str(FOLDER / "tiny") else word for word in COMMAND]
    trouble = ("kill_in", {"function": "replace", "nth": 20})
    process = Killable([*arguments, "--run-dir", str(folder)], tmp_path / "log", trouble)
    assert process.wait() == KILLED
    shutil.rmtree(tmp_path / "data")
    write(generate(4, users=120, items=200, ratings=5000), tmp_path / "data")
    again = Killable(["run", "--resume", str(folder), *QUIETLY], tmp_path / "log-2")
    assert again.wait() == 3
    assert "the data changed since the run started" in again.output
