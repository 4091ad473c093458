"""What changed between runs, and what forbids a naive reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import example_runs as examples
import msgspec
import pytest

from recperf.runs.compare import Comparison, compare
from recperf.runs.compare_report import summary
from recperf.runs.sides import load


def compared(tmp_path: Path, change: dict[str, Any] | None = None, **two: Any) -> Comparison:
    """A run and another one, of whose files some fields are changed."""
    folders = examples.make_run(tmp_path / "one", seeds=two.get("seeds", 1)), examples.make_run(tmp_path / "two", **two)
    for place, value in (change or {}).items():
        examples.change(folders[1], *place.split(":"), value)
    return compare(*map(load, folders))


def test_two_runs(tmp_path: Path) -> None:
    change = {
        "result.json:performance.step_ms": {"p20": 2.2, "p50": 2.24, "p80": 2.3},
        "profile.json:verdict.limit": "latency",
    }
    found = compared(tmp_path, change, auc=0.83, config={"train": {"epochs": 9, "batch_size": 256}})
    assert found.config["train.epochs"] == (4, 9)
    assert found.config["train.learning_rate"] == (0.005, None)
    assert (found.quality["auc"].old, found.quality["auc"].new) == (0.8212, 0.83)
    assert found.quality["auc"].remark == "one seed: may be chance"
    (step,) = found.groups["training"]
    assert (step.text, step.says, found.step.says) == ("+100.0%", "slower", "same")
    assert found.limits == ("dispatch", "latency")
    assert summary(found) == (
        "2 config fields differ, step +0.0% (same); AUC 0.8212 → 0.8300 (one seed: may be chance); dispatch → latency."
    )
    assert json.loads(json.dumps(msgspec.to_builtins(found), allow_nan=False))["config"]["train.epochs"] == [4, 9]


@pytest.mark.parametrize(
    ("auc", "remark"), [(0.8215, "within the seeds' spread"), (0.9, "beyond the seeds' spread"), (0.8212, "")]
)
def test_a_difference_is_held_against_the_spread_of_the_seeds(tmp_path: Path, auc: float, remark: str) -> None:
    assert compared(tmp_path, seeds=3, auc=auc).quality["auc"].remark == remark


def test_what_is_not_comparable_is_said(tmp_path: Path) -> None:
    change = {
        "result.json:data.digest": "ff",
        "result.json:provenance.machine": "another",
        "result.json:provenance.commit": "5" * 40,
        "result.json:performance.device": "NVIDIA H200",
        "result.json:performance.step_ms": None,
    }
    found = compared(tmp_path, change, workload="other", measured=())
    said = "; ".join([*found.warnings, *found.notes])
    for what in ("different workloads: micro-dlrm and other", "different data or split", "machine: 0", "commit: 4"):
        assert what in said
    assert "different devices: cpu and NVIDIA H200" in said
    assert not found.comparable
    assert found.limits == ("dispatch", None)
    assert (found.step.says, found.groups) == ("gone", {})
