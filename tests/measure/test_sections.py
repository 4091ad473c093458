"""Verdict, roofline and tables of synthetic profiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recperf.measure.explain import verdict
from recperf.measure.sections import embeddings, roofline

PEAKS: dict[str, Any] = {
    "gemm": {"float32": {"p50": 1e11}},
    "copy": {"p50": 5e10},
    "dispatch": {"op": {"p50": 2000.0}},
    "machine": {"caches": {"L1": 1 << 16, "L3": 1 << 20}},
    "gather": {"dram": {"rows": [{"row_bytes": 256, "ns": {"p50": 60.0}}]}},
}


def profile(*, overhead: float = 0.02, p80: float = 10.2, **shares: float) -> dict[str, Any]:
    """A step of 10 ms with 1000 operators and hardly any work."""
    parts = {"data": 0.05, "embedding": 0.1, "top": 0.85, **shares}
    return {
        "device": "cpu",
        "step_ms": {"p20": 9.8, "p50": 10.0, "p80": p80},
        "overhead": {"share": overhead},
        "operators": 1000,
        "components": [
            {"name": name, "phase": "forward", "ms": {"p50": 10.0 * share}, "share": share, "flops": 0, "bytes": 0}
            for name, share in parts.items()
        ],
        "ids": {"lookups": 1000, "row_bytes": 256, "touched_bytes": 1 << 19},
    }


def test_clear_readings_give_high_confidence() -> None:
    section = verdict(profile(data=0.8), PEAKS)
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
    section = verdict(profile(**change), PEAKS)
    assert (section["name"], section["confidence"]) == ("input-bound", "medium")
    assert why in section["why_confidence"]


def test_two_doubts_or_no_regime_give_low_confidence() -> None:
    both = verdict(profile(data=0.52, p80=20.0), PEAKS)
    assert both["confidence"] == "low"
    assert both["why_confidence"].count(";") == 1
    unclear = {**profile(), "operators": 10}
    assert verdict(unclear, PEAKS)["name"] == "unclear"
    assert verdict(unclear, PEAKS)["confidence"] == "low"
    assert verdict(profile(), None)["confidence"] == "low"


def test_the_second_limit_is_the_largest_other_share() -> None:
    section = verdict(profile(data=0.6, embedding=0.3), PEAKS)
    assert section["second"] == "embedding tables: 30% of the step"
    worked = profile(data=0.6, embedding=0.3)
    worked["components"][-1]["flops"] = 4e8
    assert verdict(worked, PEAKS)["second"] == "arithmetic: the counted FLOPs alone take 40% of the step"
    waiting = profile(data=0.6, embedding=0.3)
    waiting["idle"] = {"wall_ms": 10.0, "causes": {"input wait": 6.0, "host wait": 2.0, "sync": 1.5}}
    assert verdict(waiting, PEAKS)["second"] == "launch overhead: the device waits for the host for 35% of the step"
    # The first limit is not repeated, and small shares are not named.
    assert verdict(profile(embedding=0.9), PEAKS)["second"] is None
    assert verdict(profile(data=0.6, embedding=0.1), PEAKS)["second"] is None


def part(name: str, ms: float, flops: float | None, moved: float | None) -> dict[str, Any]:
    return {"name": name, "phase": "forward", "ms": {"p50": ms}, "share": 0.1, "flops": flops, "bytes": moved}


def test_roofline() -> None:
    step = profile()
    step["components"] = [
        part("top", 10.0, 8e8, 1e6),
        part("copying", 10.0, 0, 4e8),
        part("small", 10.0, 1e6, 1e6),
        part("uncounted", 1.0, None, None),
        part("never ran", 0.0, 1e6, 1e6),
        part("on paper", 1.0, 1e6, None),
    ]
    rows = roofline(step, PEAKS)
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
    assert "recperf peaks" in roofline(profile(), None)["missing"]  # type: ignore[call-overload]
    assert roofline({**profile(), "device": "a GPU"}, PEAKS) == roofline(profile(), None)
    assert roofline(profile(), PEAKS) == {"missing": "no part with counted work was timed"}


def test_rows_are_counted_table_by_table() -> None:
    """Tables of 200, 3 and 5 rows; two batches. The second table is looked up once a batch, the third never."""
    head = [7] * 50 + [8] * 10
    batches = [torch.tensor([*head, *range(100, 140), 200]), torch.tensor([*head, *range(120, 160), 201])]
    section = embeddings(profile(), PEAKS, [("a", 200), ("b", 3), ("c", 5)], batches)
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
    section = embeddings(profile(), PEAKS, tables, [torch.tensor(rows)])
    assert section["skew"]["gini"] == pytest.approx(gini)
    empty = embeddings(profile(), PEAKS, tables, [torch.tensor([], dtype=torch.int64)])
    assert empty["skew"] == {"largest_table_share": 0.0, "gini": 0.0}
    assert empty["unique_ratio"] == 0.0


def test_rates_are_counted_bytes_over_time() -> None:
    step = profile()
    step["components"] = [
        part("embedding", 2.0, 0, 4e6), part("embedding_backward", 3.0, 0, 1e6), part("sparse_update", 1.0, 0, 3e6),
    ]  # fmt: skip
    section = embeddings(step, PEAKS, [("t", 4)], [torch.tensor([1])])["gb_per_s"]
    assert section == {"forward": pytest.approx(2.0), "backward_and_update": pytest.approx(1.0)}
    step["components"] = step["components"][:1]
    assert embeddings(step, PEAKS, [("t", 4)], [torch.tensor([1])])["gb_per_s"]["backward_and_update"] is None


def test_cached_means_that_touched_rows_fit_the_last_level_cache() -> None:
    def cached(touched: int, peaks: dict[str, Any] | None) -> dict[str, Any]:
        step = profile()
        step["ids"]["touched_bytes"] = touched
        section: dict[str, Any] = embeddings(step, peaks, [("t", 4)], [torch.tensor([1])])["cached"]
        return section

    assert cached(1 << 19, PEAKS) == {
        "fits": True,
        "why": "the touched rows are 0.5 times the last-level cache",
    }
    assert cached(3 << 20, PEAKS) == {
        "fits": False,
        "why": "the touched rows are 3 times the last-level cache",
    }
    assert cached(1, None)["fits"] is None
    assert cached(1, {**PEAKS, "machine": {"caches": {}}})["fits"] is None
