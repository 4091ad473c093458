from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from recperf.errors import DataError
from recperf.runs.result import FIELDS, checked, faults

ROOT = Path(__file__).parents[2]

METRICS = {"accuracy": 0.7, "auc": 0.78, "log_loss": 0.5, "calibration": 1.0, "calibration_error": 0.01}
GOOD: dict[str, Any] = {
    "schema": 1,
    "workload": "micro-dlrm",
    "run": "x",
    "quality": {
        "metrics": METRICS,
        "spread": {},
        "seeds": [
            {"seed": 1, "metrics": METRICS, "best": {"step": 1, "epoch": 1, "metrics": METRICS}, "stopped_early": 1}
        ],
        "target": {"beat": None, "accuracy": None, "auc": 0.7},
        "met": True,
        "baselines": {"majority": METRICS},
    },
    "performance": {
        "device": "cpu",
        "settings": {"threads": "1: because"},
        "step_ms": {"p20": 1.0, "p50": 1.1, "p80": 1.2},
        "steps_timed": 100,
        "samples_per_s": 1e5,
        "budget": {"data": 0.25, "other": 0.75},
        "steps_in_budget": 10,
    },
    "data": {
        "name": "d",
        "digest": "0",
        "rows": 3,
        "train_rows": 2,
        "valid_rows": 1,
        "split": "random",
        "synthetic": True,
    },
    "provenance": {
        "commit": None,
        "dirty": None,
        "packages": {"torch": "2"},
        "machine": "f",
        "seed": 1,
        "data_digest": "0",
        "command": ["recperf"],
        "started": "t",
        "ended": "t",
        "resumes": 0,
    },
}


def changed(path: str, value: object) -> dict[str, Any]:
    result = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place: Any = result
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return result


def test_a_good_result_has_no_faults() -> None:
    assert faults(GOOD) == []
    assert checked(GOOD) is GOOD


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("quality.met", ..., "quality.met is missing"),
        ("quality.met", 1, "quality.met should be boolean"),
        ("quality.metrics.auc", float("nan"), "quality.metrics.auc should be number"),
        ("quality.seeds.0.seed", "1", "quality.seeds.0.seed should be integer"),
        ("quality.seeds.0.best.step", ..., "quality.seeds.0.best.step is missing"),
        ("quality.seeds.0.stopped_early", 1.5, "quality.seeds.0.stopped_early should be integer or null"),
        ("performance.step_ms.p50", ..., "performance.step_ms.p50 is missing"),
        ("performance.budget.data", 0.5, "performance.budget does not sum to 1"),
        ("data.rows", True, "data.rows should be integer"),
        ("extra", 1, "extra is not described"),
        ("provenance.extra", 1, "provenance.extra is not described"),
    ],
)
def test_every_fault_is_named(path: str, value: object, message: str) -> None:
    assert any(message in fault for fault in faults(changed(path, value)))
    with pytest.raises(DataError):
        checked(changed(path, value))


def test_a_result_of_before_a_field_existed_is_still_a_result() -> None:
    assert faults(changed("quality.seeds.0.stopped_early", ...)) == []
    assert faults(changed("quality.seeds.0.stopped_early", None)) == []


def test_what_was_not_measured_is_null() -> None:
    assert faults(changed("performance.step_ms", None)) == []
    assert faults(changed("performance.budget", None)) == []


def test_the_page_describes_what_the_code_checks() -> None:
    page = (ROOT / "docs" / "result.md").read_text()
    for field in FIELDS:
        assert f"| `{field.path}` | {field.kind} | {field.meaning} |" in page
    assert page.count("| `") == len(FIELDS) + page.split("## The other files of a run")[1].count("| `")
