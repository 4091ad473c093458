"""Verdict, roofline and tables of synthetic profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.measure.ceilings import row_time
from recperf.measure.explain import READINGS, RULES, UNCLEAR, explain, read, verdict
from recperf.measure.sections import embeddings, roofline

PEAKS: dict[str, Any] = {
    "gemm": {"float32": {"p50": 1e11}},
    "copy": {"p50": 5e10},
    "calls": {"elementwise": {"p50": 2000.0}},
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


SMALL_CACHE = PEAKS | {
    "machine": {"caches": {"L1": 1 << 16, "L3": 1 << 20}},
    "gather": {"dram": {"rows": [{"row_bytes": 256, "ns": {"p50": 60.0}}]}},
}


def step_profile(*, overhead: float = 0.02, p80: float = 10.2, **shares: float) -> dict[str, Any]:
    """The same step on a CPU with a small cache, how much it varied and what measuring cost."""
    times = {"p20": 9.8, "p50": 10.0, "p80": p80}
    ids = {"lookups": 1000, "row_bytes": 256, "touched_bytes": 1 << 19}
    return profile(**shares) | {"device": "cpu", "step_ms": times, "overhead": {"share": overhead}, "ids": ids}


def test_clear_readings_give_high_confidence() -> None:
    section = verdict(step_profile(data=0.8), SMALL_CACHE)
    assert (section["name"], section["confidence"]) == ("input-bound", "high")
    assert section["second"] is None
    assert section["evidence"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"data": 0.52}, "within 10 % of its threshold (0.52, at least 0.5)"),
        ({"data": 0.8, "p80": 12.5}, "steps vary: p80 is 1.28 times p20"),
        ({"data": 0.8, "overhead": 0.13}, "measuring changed the step by 13%"),
    ],
)
def test_one_doubt_gives_medium_confidence(change: dict[str, float], why: str) -> None:
    section = verdict(step_profile(**change), SMALL_CACHE)
    assert (section["name"], section["confidence"]) == ("input-bound", "medium")
    assert why in section["why_confidence"]


def test_two_doubts_or_no_regime_give_low_confidence() -> None:
    both = verdict(step_profile(data=0.52, p80=20.0), SMALL_CACHE)
    assert both["confidence"] == "low"
    assert both["why_confidence"].count(";") == 1
    unclear = {**step_profile(), "operators": 10}
    assert verdict(unclear, SMALL_CACHE)["name"] == "unclear"
    assert verdict(unclear, SMALL_CACHE)["confidence"] == "low"
    assert verdict(step_profile(), None)["confidence"] == "low"


def test_the_second_limit_is_the_largest_other_share() -> None:
    section = verdict(step_profile(data=0.6, embedding=0.3), SMALL_CACHE)
    assert section["second"] == "embedding tables: 30% of the step"
    worked = step_profile(data=0.6, embedding=0.3)
    worked["components"][-1]["flops"] = 4e8
    assert verdict(worked, SMALL_CACHE)["second"] == "arithmetic: the counted FLOPs alone take 40% of the step"
    waiting = step_profile(data=0.6, embedding=0.3)
    waiting["idle"] = {"wall_ms": 10.0, "causes": {"input wait": 6.0, "host wait": 2.0, "sync": 1.5}}
    launch = "launch overhead: the device waits for the host for 35% of the step"
    assert verdict(waiting, SMALL_CACHE)["second"] == launch
    # The first limit is not repeated, and small shares are not named.
    assert verdict(step_profile(embedding=0.9), SMALL_CACHE)["second"] is None
    assert verdict(step_profile(data=0.6, embedding=0.1), SMALL_CACHE)["second"] is None


def part(name: str, ms: float, flops: float | None, moved: float | None) -> dict[str, Any]:
    return {"name": name, "phase": "forward", "ms": {"p50": ms}, "share": 0.1, "flops": flops, "bytes": moved}


def test_roofline() -> None:
    step = step_profile()
    step["components"] = [
        part("top", 10.0, 8e8, 1e6),
        part("copying", 10.0, 0, 4e8),
        part("small", 10.0, 1e6, 1e6),
        part("uncounted", 1.0, None, None),
        part("never ran", 0.0, 1e6, 1e6),
        part("on paper", 1.0, 1e6, None),
    ]
    rows = roofline(step, SMALL_CACHE)
    assert isinstance(rows, list)
    section = {row["name"]: row for row in rows}
    assert list(section) == ["top", "copying", "small", "on paper"]
    assert [row["bound"] for row in rows] == ["compute", "memory", "neither", "neither"]
    assert section["top"]["share_of_roof"] == pytest.approx(0.8)
    assert section["top"]["flops_per_s"] == pytest.approx(8e10)
    assert section["top"]["intensity"] == pytest.approx(800)
    assert section["copying"]["share_of_roof"] == pytest.approx(0.8)
    assert section["copying"]["bytes_per_s"] == pytest.approx(4e10)
    assert section["copying"]["intensity"] == 0
    assert section["on paper"]["intensity"] is None
    assert {row["ceiling_flops_per_s"] for row in rows} == {1e11}
    assert {row["ceiling_bytes_per_s"] for row in rows} == {5e10}


def test_a_roofline_needs_ceilings_and_counted_work() -> None:
    assert "recperf peaks" in roofline(step_profile(), None)["missing"]  # type: ignore[call-overload]
    assert roofline({**step_profile(), "device": "a GPU"}, SMALL_CACHE) == roofline(step_profile(), None)
    assert roofline(step_profile(), SMALL_CACHE) == {"missing": "no part with counted work was timed"}


def test_rows_are_counted_table_by_table() -> None:
    """Tables of 200, 3 and 5 rows; two batches. The second table is looked up once a batch, the third never."""
    head = [7] * 50 + [8] * 10
    batches = [torch.tensor([*head, *range(100, 140), 200]), torch.tensor([*head, *range(120, 160), 201])]
    section = embeddings(step_profile(), SMALL_CACHE, [("a", 200), ("b", 3), ("c", 5)], batches)
    a, b, c = section["tables"]
    assert (a["name"], a["rows"], a["row_bytes"], a["lookups"], a["unique"]) == ("a", 200, 256, 100.0, 42.0)
    assert a["unique_ratio"] == pytest.approx(0.42)
    # 7, 8 and 100 to 159 over both batches.
    assert a["touched_bytes"] == 62 * 256
    # The commonest 1 % of 62 rows is one row.
    assert a["busiest_share"] == pytest.approx(100 / 200)
    assert (b["lookups"], b["unique"], b["touched_bytes"], b["busiest_share"]) == (1.0, 1.0, 512, 0.5)
    assert (c["lookups"], c["unique"], c["unique_ratio"], c["touched_bytes"], c["busiest_share"]) == (0, 0, 0, 0, 0)
    assert (section["lookups"], section["unique"]) == (101.0, 43.0)
    assert section["unique_ratio"] == pytest.approx(43 / 101)
    assert section["skew"]["largest_table_share"] == pytest.approx(100 / 101)


@pytest.mark.parametrize(("rows", "gini"), [([0, 1, 2, 3], 0.0), ([0, 0, 0, 0], 0.75), ([0, 0, 0, 1], 0.625)])
def test_the_gini_of_lookups_over_tables(rows: list[int], gini: float) -> None:
    tables = [(str(index), 1) for index in range(4)]
    section = embeddings(step_profile(), SMALL_CACHE, tables, [torch.tensor(rows)])
    assert section["skew"]["gini"] == pytest.approx(gini)
    empty = embeddings(step_profile(), SMALL_CACHE, tables, [torch.tensor([], dtype=torch.int64)])
    assert empty["skew"] == {"largest_table_share": 0.0, "gini": 0.0}
    assert empty["unique_ratio"] == 0.0


def test_rates_are_counted_bytes_over_time() -> None:
    step = step_profile()
    step["components"] = [
        part("embedding", 2.0, 0, 4e6), part("embedding_backward", 3.0, 0, 1e6), part("sparse_update", 1.0, 0, 3e6),
    ]  # fmt: skip
    section = embeddings(step, SMALL_CACHE, [("t", 4)], [torch.tensor([1])])["gb_per_s"]
    assert section == {"forward": pytest.approx(2.0), "backward_and_update": pytest.approx(1.0)}
    step["components"] = step["components"][:1]
    assert embeddings(step, SMALL_CACHE, [("t", 4)], [torch.tensor([1])])["gb_per_s"]["backward_and_update"] is None


def test_cached_means_that_touched_rows_fit_the_last_level_cache() -> None:
    def cached(touched: int, peaks: dict[str, Any] | None) -> dict[str, Any]:
        step = step_profile()
        step["ids"]["touched_bytes"] = touched
        section: dict[str, Any] = embeddings(step, peaks, [("t", 4)], [torch.tensor([1])])["cached"]
        return section

    assert cached(1 << 19, SMALL_CACHE) == {
        "fits": True,
        "why": "the touched rows are 0.5 times the last-level cache",
    }
    assert cached(3 << 20, SMALL_CACHE) == {
        "fits": False,
        "why": "the touched rows are 3 times the last-level cache",
    }
    assert cached(1, None)["fits"] is None
    assert cached(1, {**SMALL_CACHE, "machine": {"caches": {}}})["fits"] is None
