"""`--train.stop-at-target`: the run ends at the target, reports it, and does not train on when it is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from movielens_files import write_files

from recperf.cli import main
from recperf.train.checkpoint import CheckpointStore

QUIETLY = ["--no-peaks", "--no-report", "--quiet"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny"
    write_files(folder)
    return folder


def arguments(data: Path, run: Path, *more: str) -> list[str]:
    start = ["run", "micro-dlrm", "--data.path", str(data), "--run-dir", str(run), "--train.device", "cpu"]
    start += ["--train.epochs", "3", "--train.batch-size", "200", "--target.beat", "none"]
    return [*start, "--train.evaluate-steps", "8", "--train.stop-at-target", *more, *QUIETLY]


def quality(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "result.json").read_text())["quality"])


def logged(run: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == kind]


@pytest.mark.long
def test_it_stops_at_the_target_and_reports_it(data: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(arguments(data, whole, "--target.auc", "1.0")) == 5
    curve = [(event["step"], event["auc"]) for event in logged(whole, "metric")]
    assert [step for step, _ in curve] == [8, 16, 20, 24, 32, 40, 48, 56, 60]
    assert "stopped_early" not in quality(whole)["seeds"][0]
    bound = sorted(value for _, value in curve)[4]
    first = next(step for step, value in curve if value >= bound)
    assert 8 < first < 60
    assert main(arguments(data, run, "--target.auc", repr(bound), "--seeds", "2")) in (0, 5)
    one, other = quality(run)["seeds"]
    assert one["stopped_early"] == first
    assert one["metrics"]["auc"] == dict(curve)[first]
    assert [event["step"] for event in logged(run, "step") if event["seed"] == 42] == list(range(1, first + 1))
    assert any(f"step {first} of 60" in event["text"] for event in logged(run, "notice"))
    assert "stopped_early" not in other or other["metrics"]["auc"] >= bound


def test_a_resumed_run_does_not_train_on(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(arguments(data, run, "--target.auc", "0.0", "--train.checkpoint-steps", "3")) == 0
    before, steps = quality(run), logged(run, "step")
    assert before["seeds"][0]["stopped_early"] == 8
    store = CheckpointStore(folder=run / "checkpoints" / "seed-42", notice=print)
    state = store.load()
    assert state is not None
    assert state["position"]["step"] == 8
    # As if it was killed between its last checkpoint and writing the trial's file.
    for name in ("seal.json", "result.json", "trial-42.json", "profile.json"):
        (run / name).unlink()
    assert main(["run", "--resume", str(run), *QUIETLY]) == 0
    assert quality(run) == before
    assert logged(run, "step") == steps
    assert len(logged(run, "notice")) == 1
