"""What a task declares is what targets, epochs and reports use."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from recperf import tasks, workloads
from recperf.runs.derive import meets
from recperf.runs.report.quality_sections import lowest, quality_fact, quality_table, target_text
from recperf.runs.result import (
    Data,
    Difference,
    Evaluation,
    ModelInterval,
    Performance,
    Provenance,
    Quality,
    Result,
    Target,
    TrialResult,
)
from recperf.train.config import TargetConfig

STARS = replace(
    tasks.CLICK_LABELS,
    name="stars",
    leading="r2",
    choosing="validation_error",
    scored_rows="held-out rows after the epoch with the lowest error on others",
    columns=("r2",),
    baselines={"mean": "mean rating"},
)


def test_importing_the_tasks_imports_no_torch() -> None:
    code = "import sys, recperf.tasks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_a_target_may_name_each_baseline_of_a_task(name: str) -> None:
    task = workloads.find(name).task
    assert task in tasks.TASKS
    assert set(task.baselines) <= set(get_args(get_type_hints(TargetConfig)["beat"]))


def test_the_task_of_a_run_follows_from_its_metrics() -> None:
    assert tasks.of({"log_loss": 0.5, "auc": 0.7, "ndcg_10": 0.1}) is tasks.CLICK_LABELS
    assert tasks.of({"ndcg_10": 0.1, "mrr": 0.1}) is tasks.NEXT_ITEM


@pytest.mark.parametrize(
    ("history", "chosen"),
    [
        ([{"auc": 0.8}, {"auc": 0.7}], 1),
        ([{"auc": 0.8, "validation_log_loss": 0.5}, {"auc": 0.7, "validation_log_loss": 0.4}], 1),
        ([{"auc": 0.8, "validation_log_loss": 0.4}, {"auc": 0.9, "validation_log_loss": 0.5}], 0),
        ([{"ndcg_10": 0.1, "validation_ndcg_10": 0.3}, {"ndcg_10": 0.2, "validation_ndcg_10": 0.2}], 0),
    ],
)
def test_a_task_chooses_the_epoch(history: list[dict[str, float]], chosen: int) -> None:
    assert tasks.chosen_evaluation(history) == chosen


def test_a_new_task_is_one_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leading metric decides about the target and stands in the summary and on the page, without another change."""
    monkeypatch.setattr(tasks, "TASKS", (*tasks.TASKS, STARS))
    metrics, baselines = {"error": 0.8, "r2": 0.4, "validation_error": 0.9}, {"mean": {"r2": 0.1}, "planted": {"r2": 1}}
    target = Target(beat="best", accuracy=None, auc=None)
    seed = TrialResult(1, metrics, Evaluation(10, 1, metrics))
    quality = Quality(metrics=metrics, spread={}, seeds=[seed], target=target, met=True, baselines=baselines)
    result = Result(
        schema=3,
        workload="stars",
        run="stars-1",
        quality=quality,
        performance=Performance("cpu", {}, None, None, None, None, None),
        data=Data("stars", "0", 100, 80, 20, "random", synthetic=False),
        provenance=Provenance(None, None, {}, "", 1, "0", [], "", "", 0),
    )
    assert meets(metrics, baselines, target)
    assert not meets({"r2": 0.1}, baselines, target)
    assert lowest(quality) == {"r2": 0.1}
    assert target_text(result).startswith("r2 above mean")
    # An interval of the AUC says nothing about another metric.
    quality.interval = ModelInterval(0.1, 0.2, by="rows", units=100, replicates=200)
    quality.differences = (Difference(0.1, 0.2, "auc", "mean", 0.15, 0.0, 1, "above"),)
    assert quality_fact(result) == "r2 0.4000"
    assert "lowest error on others" in quality_table(result).caption
    assert tasks.chosen_evaluation([metrics, {**metrics, "validation_error": 1.0}]) == 0
