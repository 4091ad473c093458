"""What a task declares is what targets, epochs and reports use."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest

from recperf import tasks, workloads
from recperf.errors import ConfigError, DataError
from recperf.execution.run import TrainingRun
from recperf.runs.derive import meets
from recperf.runs.report.quality_sections import certainty, needed, quality_fact, quality_table, target_text, tone
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
    leading="error",
    lower=("error", "validation_error"),
    choosing="validation_error",
    scored_rows="held-out rows after the epoch with the lowest error on others",
    columns=("error",),
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
    assert set(task.bounds) <= set(TargetConfig.__dataclass_fields__) & set(Target.__struct_fields__)


def test_the_task_of_a_run_from_before_it_was_named_follows_from_its_metrics() -> None:
    assert tasks.of({"log_loss": 0.5, "auc": 0.7, "ndcg_10": 0.1}) is tasks.CLICK_LABELS
    assert tasks.of({"log_loss": 0.5, "auc": 0.7, "lifetime_auc": 0.1}) is tasks.EVENT_LABELS
    assert tasks.of({"hit_rate_10": 0.3, "ndcg_10": 0.1, "mrr": 0.1}) is tasks.NEXT_ITEM
    assert tasks.of({}) is tasks.CLICK_LABELS


def test_a_task_that_is_not_known_is_refused_by_its_name() -> None:
    assert all(tasks.named(task.name) is task for task in tasks.TASKS)
    unknown = replace(workloads.find("hstu"), task=STARS)
    with pytest.raises(DataError, match="the task 'stars' is not known: there are click-labels, event-labels"):
        TrainingRun(workload=unknown, config=unknown.presets["default"](), report=None)  # type: ignore[arg-type]


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
    assert tasks.of(history[0]).chosen(history) == chosen


def stars(**quality: Any) -> Result:
    metrics = {"error": 0.8, "r2": 0.4, "validation_error": 0.9}
    rules = {"mean": {"error": 0.9}, "worse": {"error": 1.5}, "planted": {"error": 0.1}}
    target, seed = Target(beat="best", accuracy=None, auc=None), TrialResult(1, metrics, Evaluation(10, 1, metrics))
    return Result(
        schema=4,
        workload="stars",
        run="stars-1",
        quality=Quality(metrics, spread={}, seeds=[seed], target=target, met=True, baselines=rules, **quality),
        performance=Performance("cpu", {}, None, None, None, None, None),
        data=Data("stars", "0", 100, 80, 20, "random", synthetic=False),
        provenance=Provenance(None, None, {}, "", 1, "0", [], "", "", 0),
        task="stars",
    )


def test_a_new_task_is_one_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leading metric, of which less is better, decides about the target and stands in the summary and on the page,
    without another change."""
    monkeypatch.setattr(tasks, "TASKS", (*tasks.TASKS, STARS))
    quality = stars().quality
    assert meets(STARS, quality.metrics, quality.baselines, quality.target)
    assert not meets(STARS, {"error": 0.95}, quality.baselines, quality.target)
    assert needed(stars()) == {"error": 0.9}
    assert target_text(stars()).startswith("error below mean")
    assert quality_fact(stars()) == "error 0.8000"
    assert "lowest error on others" in quality_table(stars()).caption
    interval = ModelInterval(0.7, 0.9, by="rows", units=100, replicates=200)
    rows = [Difference(-0.2, -0.1, "error", name, -0.15, 1.0, 1, "below") for name in ("planted", "mean")]
    known = stars(interval=interval, differences=tuple(rows))
    assert quality_fact(known) == "error 0.800 ± 0.100, 0.150 ± 0.050 below mean"
    assert "the baseline is better in 0.0% of the bootstrap samples" in certainty(known)[1]
    assert tone(rows[1]) == "good"
    assert STARS.chosen([quality.metrics, {**quality.metrics, "validation_error": 1.0}]) == 0


def test_less_of_a_metric_can_be_better_than_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", (*tasks.TASKS, STARS))
    result = stars()
    for standing, met in (("below", True), ("level", False), ("above", False)):
        rows = [Difference(-0.2, 0.1, "error", "mean", -0.1, 0.9, 1, standing)]
        assert meets(STARS, result.quality.metrics, result.quality.baselines, result.quality.target, rows) is met


def test_a_bound_of_a_metric_that_the_task_does_not_have_is_refused() -> None:
    hstu = workloads.find("hstu")
    config = replace(hstu.presets["default"](), target=TargetConfig(auc=0.8))
    with pytest.raises(ConfigError, match=r"target\.auc is 0\.8, which hstu does not measure"):
        TrainingRun(workload=hstu, config=config, report=None)  # type: ignore[arg-type]
