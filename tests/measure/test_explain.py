from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recperf.measure.ceilings import row_time
from recperf.measure.explain import READINGS, RULES, UNCLEAR, explain, read

PEAKS: dict[str, Any] = {
    "gemm": {"float32": {"p50": 1e11}},
    "copy": {"p50": 5e10},
    "dispatch": {"op": {"p50": 2000.0}},
    "machine": {"caches": {"L1": 1 << 16, "L3": 32 << 20}},
    "gather": {
        "cache": {"rows": [{"row_bytes": 256, "ns": {"p50": 20.0}}, {"row_bytes": 1024, "ns": {"p50": 60.0}}]},
        "dram": {"rows": [{"row_bytes": 256, "ns": {"p50": 60.0}}, {"row_bytes": 1024, "ns": {"p50": 150.0}}]},
    },
}


def profile(**shares: float) -> dict[str, Any]:
    """A step of 10 ms with 1000 operators, 100,000 lookups of 1 KiB and hardly any work, but for what is given."""
    parts = {"data": 0.05, "embedding": 0.1, "top": 0.85, **shares}
    return {
        "step_ms": {"p50": 10.0},
        "operators": 1000,
        "components": [
            {"name": name, "phase": "forward", "ms": {"p50": 10.0 * share}, "share": share, "flops": 0, "bytes": 0}
            for name, share in parts.items()
        ],
        "ids": {"lookups": 100_000, "row_bytes": 1024, "touched_bytes": 1 << 20},
    }


def with_work(base: dict[str, Any], *, flops: float = 0, moved: float = 0) -> dict[str, Any]:
    base["components"][-1].update(flops=flops, bytes=moved)
    return base


def test_each_regime_is_named_by_its_evidence() -> None:
    assert explain(profile(data=0.6), PEAKS)["name"] == "input-bound"
    assert explain(with_work(profile(), flops=8e8), PEAKS)["name"] == "compute-bound"
    assert explain(with_work(profile(), moved=4e8), PEAKS)["name"] == "bandwidth-bound"
    few = profile()
    few["operators"] = 1000
    assert explain(few, PEAKS)["name"] == "dispatch-bound"
    cold = profile(embedding=0.9)
    cold["ids"]["touched_bytes"] = 1 << 30
    assert explain(cold, PEAKS)["name"] == "latency-bound"
    hot = profile(embedding=0.6)
    assert explain(hot, PEAKS)["name"] == "cache-bound"


def test_popular_ids_over_a_large_table_are_unclear() -> None:
    """Many rows are touched, but most lookups are far quicker than a row from memory."""
    popular = profile(embedding=0.55)
    popular["ids"].update(touched_bytes=1 << 30, lookups=400_000)
    verdict = explain(popular, PEAKS)
    assert verdict["name"] == UNCLEAR
    assert {row["says"] for row in verdict["evidence"]} == {"holds", "does not hold"}


def test_more_work_than_the_machine_can_do_is_no_verdict() -> None:
    verdict = explain(with_work(profile(), flops=8e9), PEAKS)
    assert verdict["name"] == UNCLEAR
    assert "800% of the step, which is impossible" in verdict["sentence"]


def test_ranks_that_share_a_processor_have_a_part_of_its_ceilings() -> None:
    """Half of the rates, and rows that take twice as long: the same step is nearer to what it can do."""
    alone = with_work(profile(embedding=0.5), flops=1e8, moved=1e8)
    before = read(alone, PEAKS)
    after = read({**alone, "communication": {"sharing": 2}}, PEAKS)
    for name, factor in {"compute": 2.0, "stream": 2.0, "of memory": 0.5, "beyond": 2.0}.items():
        known = before[name]
        assert known
        assert after[name] == pytest.approx(factor * known)


def test_without_ceilings_nothing_is_guessed() -> None:
    verdict = explain(profile(), None)
    assert verdict["name"] == UNCLEAR
    assert "recperf peaks" in verdict["sentence"]
    assert explain(profile(data=0.7), None)["name"] == "input-bound"


def test_row_times_lie_on_the_line_between_sizes() -> None:
    rows = PEAKS["gather"]["dram"]["rows"]
    assert row_time(rows, 256) == 60.0
    assert row_time(rows, 640) == pytest.approx(105.0)
    assert row_time(rows, 2048) == pytest.approx(300.0)
    assert row_time(rows, 32) == 60.0
    assert row_time([], 64) is None


def test_the_page_shows_the_table_in_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "regimes.md").read_text()
    for name, text in READINGS.items():
        assert f"| {name} | {text} |" in page
    for name, conditions in RULES.items():
        shown = "; ".join(f"{c.reading} {c.text}" for c in conditions)
        assert f"| {name} | {shown} |" in page
