"""What changed between runs, and what forbids a naive reading of it."""

from __future__ import annotations

import json
from pathlib import Path

import example_runs as examples
import msgspec
import pytest

from recperf.runs.evidence import Evidence
from recperf.runs.report.compare import compare, summary


def test_two_runs(tmp_path: Path) -> None:
    one = examples.make_run(tmp_path / "one")
    two = examples.make_run(tmp_path / "two", auc=0.83, config={"train": {"epochs": 9, "batch_size": 256}})
    examples.change(two, "result.json", "performance.step_ms", {"p20": 2.2, "p50": 2.24, "p80": 2.3})
    examples.change(two, "profile.json", "verdict.limit", "latency")
    found = compare([Evidence(one), Evidence(two)])
    assert found.config["train.epochs"] == (4, 9)
    assert found.config["train.learning_rate"] == (0.005, None)
    assert found.quality["auc"].values == (0.8212, 0.83)
    assert found.quality["auc"].remark == "one seed: may be chance"
    assert found.speed["step ms, p50"].remark == "2.00 x the first"
    assert found.limit == ("dispatch", "latency")
    first, *_, last = found.budget
    assert (first, last) == ("data", "other")
    said = "2 config fields differ; AUC 0.8212 → 0.8300 (one seed: may be chance); step ms, p50 1.12 → 2.24 "
    assert summary(found) == f"{said}(2.00 x the first); dispatch → latency."
    assert json.loads(json.dumps(msgspec.to_builtins(found), allow_nan=False))["config"]["train.epochs"] == [4, 9]


@pytest.mark.parametrize(
    ("auc", "remark"), [(0.8215, "within the seeds' spread"), (0.9, "beyond the seeds' spread"), (0.8212, "")]
)
def test_a_difference_is_held_against_the_spread_of_the_seeds(tmp_path: Path, auc: float, remark: str) -> None:
    one = examples.make_run(tmp_path / "one", seeds=3)
    two = examples.make_run(tmp_path / "two", seeds=3, auc=auc)
    assert compare([Evidence(one), Evidence(two)]).quality["auc"].remark == remark


def test_overlapping_step_times_are_no_difference(tmp_path: Path) -> None:
    one, two = examples.make_run(tmp_path / "one"), examples.make_run(tmp_path / "two")
    examples.change(two, "result.json", "performance.step_ms", {"p20": 1.1, "p50": 1.15, "p80": 1.2})
    assert compare([Evidence(one), Evidence(two)]).speed["step ms, p50"].remark == "p20 to p80 overlap"
    examples.change(two, "result.json", "performance.step_ms", None)
    assert compare([Evidence(one), Evidence(two)]).speed["step ms, p50"].values == (1.12, None)


def test_what_is_not_comparable_is_said(tmp_path: Path) -> None:
    one, two = (
        examples.make_run(tmp_path / "one"),
        examples.make_run(tmp_path / "two", workload="other", measured=()),
    )
    examples.change(two, "result.json", "data.digest", "ff")
    examples.change(two, "result.json", "provenance.machine", "another")
    examples.change(two, "result.json", "provenance.commit", None)
    examples.change(two, "result.json", "performance.device", "NVIDIA H200")
    notes = " ".join(compare([Evidence(one), Evidence(two)]).notes)
    for what in ("workloads (micro-dlrm, other)", "data", "machines", "commits", "devices"):
        assert f"Different {what}" in notes
    assert compare([Evidence(one), Evidence(two)]).limit == ("dispatch", None)
