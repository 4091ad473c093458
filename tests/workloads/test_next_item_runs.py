"""A run of next-item: evaluations every few epochs, a stop and a resume, and what the model and counting know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import recperf
from recperf.cli import main

RUN = ["run", "next-item", "--data.users", "80", "--train.epochs", "5", "--train.evaluate-epochs", "2"]
QUIETLY = ["--train.device", "cpu", "--train.threads", "1", "--no-peaks", "--no-report", "--quiet"]
NEXT = ["--target.beat", "none", "--train.patience", "0", "--train.checkpoint-steps", "3", "--train.keep-last", "30"]


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)
        yield


@pytest.mark.parametrize("average", [0, 3])
def test_a_run_is_evaluated_every_few_epochs_and_resumes_with_its_counts(tmp_path: Path, average: int) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    sizes = ["--train.batch-size", "40", "--train.average-steps", str(average)]
    assert main([*RUN, *NEXT, *QUIETLY, *sizes, "--run-dir", str(whole)]) == 0
    events = map(json.loads, (whole / "events.jsonl").read_text().splitlines())
    assert [event["epoch"] for event in events if event["kind"] == "metric"] == [2, 4, 5]
    metrics = json.loads((whole / "result.json").read_text())["quality"]["metrics"]
    assert metrics["validation_ndcg_10"] > 0
    assert {"validation_ndcg_10_model", "validation_ndcg_10_counts"} <= metrics.keys()
    # From the end of the third epoch, after which nothing is evaluated.
    shutil.copytree(whole, resumed)
    for name in ("seal.json", "result.json", "trial-42.json", "profile.json"):
        (resumed / name).unlink(missing_ok=True)
    checkpoints = resumed / "checkpoints" / "seed-42"
    for folder in checkpoints.glob("step-*"):
        if int(folder.name.removeprefix("step-")) > 6:
            shutil.rmtree(folder)
    (checkpoints / "index.json").write_text(json.dumps({"last": "step-00000006", "best": "step-00000004"}))
    assert main(["run", "--resume", str(resumed), "--no-peaks", "--no-report", "--quiet"]) == 0
    assert (resumed / "trial-42.json").read_bytes() == (whole / "trial-42.json").read_bytes()
    lists = [recperf.open(run).recommend([[1, 2, 3]], k=5)["logit"].tolist() for run in (whole, resumed)]
    assert lists[0] == lists[1]
