"""Shares and verdicts from observed figures and ceilings; every threshold and every ceiling matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recperf.measure import attribution, limits
from recperf.measure.attribution import LIMITS, attribute, classify, kind_of_call
from recperf.measure.ceilings import Ceilings, row_time
from recperf.measure.limits import TEXTS, decide

CEILINGS = Ceilings(
    device="cpu", threads=2, flops={"float32": 1e11, "bfloat16": 2e11}, copy=1e10, cached=1e11,
    knee=1 << 24, stream_knee=1 << 24, rows_memory=((64, 100.0), (1024, 200.0)), rows_cache=((64, 10.0), (1024, 40.0)),
    calls={"elementwise": 2000.0, "elementwise_grad": 3000.0, "view": 1000.0}, first_touch=2e9, kernel_ns=2500.0,
)  # fmt: skip
INSIDE = 0.5


def operator(name: str = "aten::x", ms: float = 10.0, **figures: Any) -> dict[str, Any]:
    row = {"name": name, "part": None, "kind": kind_of_call(name), "calls": 1.0, "python_calls": 1.0, "ms": ms}
    return {**row, **dict.fromkeys(("flops", "bytes", "beyond", "fresh", "rows", "missed", "row_bytes"), 0), **figures}


def limit_of(row: dict[str, Any], ceilings: Ceilings | None = CEILINGS) -> str:
    divided = classify(row, ceilings, INSIDE)["limits"]
    return max((name for name in divided), key=lambda name: divided[name])


def observed(waits: dict[str, float], *operators: dict[str, Any], **more: Any) -> dict[str, Any]:
    times = {"p20": 9.9, "p50": 10.0, "p80": 10.1}
    return {"step_ms": times, "other_work": 0.0, "inside": INSIDE, "waits": waits, "operators": list(operators), **more}


ROWS = {"rows": 100_000, "row_bytes": 64, "bytes": 6_400_000}
STREAM = {"bytes": 1e8, "beyond": 1e8}


@pytest.mark.parametrize(
    ("row", "limit"),
    [
        (operator("aten::mm", flops=1e9), "compute"),
        (operator("aten::add", **STREAM), "bandwidth"),
        (operator("aten::embedding", missed=100_000, **ROWS), "latency"),
        (operator("aten::embedding", ms=1.0, **ROWS), "cache"),
        (operator("aten::embedding", ms=5.0, missed=100_000, **ROWS), "latency"),  # prefetched
        (operator("aten::embedding", ms=1.4, missed=100_000, **ROWS), "cache"),
        (operator("recperf::bag_sum", ms=1.4, missed=100_000, **ROWS), "latency"),  # by C code, slower than a stream
        (operator("recperf::bag_sum", ms=0.5, missed=100_000, **ROWS), "cache"),
        # Counted as cached, of a table beyond the knee: lost by then, if it took nearer to memory than to the cache.
        (operator("aten::embedding", ms=5.0, table_rows=1 << 20, **ROWS), "latency"),
        (operator("aten::embedding", ms=2.0, table_rows=1 << 20, **ROWS), "cache"),
        (operator("aten::embedding", ms=5.0, table_rows=1 << 18, **ROWS), "operator"),
        (operator("aten::embedding", ms=5.0, table_rows=1 << 20, flops=5e8, **ROWS), "compute"),
        (operator("aten::add", ms=1.0, bytes=1e8), "cache"),
        (operator("aten::add", ms=0.004), "dispatch"),
        (operator("aten::sort", bytes=1e6), "operator"),
        (operator("_Attention", ms=1.0), "python"),
        (operator("aten::mm", ms=5.0, flops=1e9, precision="bfloat16"), "compute"),
        (operator("nccl::all_reduce", communication=True), "communication"),
    ],
)
def test_each_operator_goes_to_the_ceiling_that_explains_it(row: dict[str, Any], limit: str) -> None:
    assert limit_of(row) == limit
    divided = classify(row, CEILINGS, INSIDE)["limits"]
    assert sum(divided.values()) == pytest.approx(row["ms"])
    assert limit_of(operator("aten::mm", flops=1e9), None) == "operator"


@pytest.mark.parametrize(
    ("row", "change"),
    [
        # Each takes just enough of its ceiling to be explained by it: at half the work it is not.
        (operator("aten::mm", flops=0.4e9), {"flops": {"float32": 2e11}}),
        (operator("aten::mm", flops=0.8e9, precision="bfloat16"), {"flops": {"float32": 1e11, "bfloat16": 4e11}}),
        (operator("aten::add", bytes=4e7, beyond=4e7), {"copy": 2e10}),
        (operator("aten::add", bytes=8e6, beyond=8e6, fresh=8e6), {"first_touch": 4e9}),
        (operator("aten::add", bytes=4e8), {"cached": 2e11}),
        (operator("aten::embedding", missed=40_000, rows=40_000, row_bytes=64), {"rows_memory": ((64, 50.0),)}),
        (operator("aten::embedding", rows=400_000, row_bytes=64), {"rows_cache": ((64, 5.0),)}),
        (operator("aten::add", ms=0.0075), {"calls": {"elementwise": 1000.0}}),
    ],
)
def test_a_ceiling_that_is_twice_as_fast_changes_the_limit(row: dict[str, Any], change: dict[str, Any]) -> None:
    assert limit_of(row) != "operator"
    assert limit_of(row, replace(CEILINGS, **change)) == "operator"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("EXPLAINED", operator("aten::mm", flops=0.4e9)),
        ("BELIEVED", operator("aten::mm", flops=1.4e9)),
        ("SMALL", operator("aten::add", ms=0.007, bytes=40_000)),
        ("CALLS", operator("aten::add", ms=0.0075)),
    ],
)
def test_a_threshold_of_half_or_twice_changes_the_limit(
    name: str, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = classify(row, CEILINGS, INSIDE)["limits"]
    changed = []
    for factor in (0.5, 2.0):
        monkeypatch.setattr(attribution, name, factor * getattr(attribution, name))
        changed.append(classify(row, CEILINGS, INSIDE)["limits"] != before)
        monkeypatch.undo()
    assert any(changed)


def test_a_ceiling_that_cannot_apply_is_not_believed() -> None:
    row = operator("aten::mm", ms=1.0, flops=1e9)
    row = classify(row, CEILINGS, INSIDE)
    divided, note = row["limits"], row["note"]
    assert "compute" not in divided
    assert "the ceiling does not apply: its arithmetic would take 10" in note


def test_shares_sum_to_one_and_calls_from_python_are_dispatch() -> None:
    waits = {"input": 2.0, "blocked": 1.0, "python": 3.0}
    small = operator("aten::add", ms=1.0, calls=1000.0, python_calls=1000.0)
    result = attribute(observed(waits, small, operator("aten::mm", ms=3.0, flops=3e8)), CEILINGS)
    shares = result["shares"]
    assert tuple(shares) == LIMITS
    assert sum(shares.values()) == pytest.approx(1.0)
    # 1000 calls of 2 us: 1 ms inside, 1 ms of what looks like Python.
    assert shares["dispatch"] == pytest.approx(0.2, abs=0.01)
    assert shares["python"] == pytest.approx(0.2, abs=0.01)
    assert shares["input"] == pytest.approx(0.2)


def verdict_of(first: float, second: float, **more: Any) -> limits.Verdict:
    rest = (1 - first - second) / 8
    waits = {"input": 10 * first, "blocked": 10 * second, **dict.fromkeys(LIMITS[2:10], 10 * rest)}
    figures = observed(waits, **more)
    return decide(attribute(figures, CEILINGS), figures, CEILINGS)


def test_confidence_follows_margin_spread_other_work_and_experiments() -> None:
    assert verdict_of(0.7, 0.1).confidence == "high"
    assert verdict_of(0.45, 0.30).confidence == "medium"
    assert verdict_of(0.7, 0.1, other_work=0.2).confidence == "medium"
    assert verdict_of(0.7, 0.1, preempted=0.2).confidence == "medium"
    assert verdict_of(0.7, 0.1, crowded=0.2).confidence == "medium"
    assert verdict_of(0.7, 0.1, scale=0.5).confidence == "medium"
    assert verdict_of(0.45, 0.30, other_work=0.2).confidence == "low"
    assert verdict_of(0.5, 0.2, step_ms={"p20": 5.0, "p50": 10.0, "p80": 15.0}).confidence == "medium"
    figures = observed({"input": 9.0, "python": 1.0})
    disagrees = [{"name": "replay", "expected": "0.1", "measured": "1.0", "agrees": False}]
    assert decide(attribute(figures, CEILINGS), figures, CEILINGS, disagrees).confidence == "medium"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CLEAR", {"first": 0.4, "second": 0.1}),
        ("LEAD", {"first": 0.45, "second": 0.2}),
        ("DISTURBED", {"first": 0.7, "second": 0.1, "other_work": 0.2}),
        ("NOTICEABLE", {"first": 0.6, "second": 0.15}),
        ("DRIFT", {"first": 0.7, "second": 0.1, "scale": 1.7}),
    ],
)
def test_a_threshold_of_twice_changes_the_verdict(
    name: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = verdict_of(**arguments)
    monkeypatch.setattr(limits, name, 2 * getattr(limits, name))
    assert verdict_of(**arguments) != before


def test_no_limit_stands_out() -> None:
    verdict = verdict_of(0.25, 0.2)
    assert (verdict.limit, verdict.confidence) == ("unclear", "low")
    assert "The nearest are input (25%) and blocked (20%)" in verdict.because[0]
    assert verdict.second == "blocked"
    assert all(limits.TEXTS[limit]["advice"] in verdict.advice for limit in ("input", "blocked"))


def test_random_rows_are_latency_or_bandwidth_by_the_measured_widths() -> None:
    """100 ns a row whatever its width and 0.1 ns a byte: half of the time of rows of 1,000 bytes follows the bytes."""
    widths = replace(CEILINGS, rows_memory=tuple((size, 100 + 0.1 * size) for size in (64, 256, 1000, 4000)))
    assert [widths.latency_share(size) for size in (64, 1000, 4000)] == pytest.approx([100 / 106.4, 0.5, 0.2])
    row = operator(
        "aten::embedding", ms=20.001, rows=100_000, missed=100_000, row_bytes=1000, bytes=1e8, precision=None
    )
    for ms, latency, bandwidth in (
        (20.0, 10, 10), (30.0, 15, 15),
        (14.0, 4, 10),  # Prefetched: an implementation can hide latency, but it moves all bytes.
    ):  # fmt: skip
        divided = classify({**row, "ms": ms + INSIDE * 0.002}, widths, INSIDE)["limits"]
        assert (divided["latency"], divided["bandwidth"]) == (pytest.approx(latency), pytest.approx(bandwidth))
    result = attribute(observed({}, row), widths)
    assert result["random"] == pytest.approx(result["shares"]["latency"] + result["shares"]["bandwidth"])
    one_width = replace(CEILINGS, rows_memory=((64, 50.0),))
    assert one_width.latency_share(1024) == 1.0
    verdict = decide(attribute(observed({}, {**row, "row_bytes": 4000, "ms": 50.0}), widths), observed({}), widths)
    assert verdict.limit == "bandwidth"
    assert "(memory: 500, of which 100 ns whatever the width and 400 for the bytes)" in verdict.because[0]


def test_row_times_lie_on_the_line_between_sizes() -> None:
    rows = [{"row_bytes": size, "ns": {"p50": ns}} for size, ns in ((256, 60.0), (1024, 150.0))]
    assert [row_time(rows, size) for size in (32, 256, 640, 2048)] == pytest.approx([60.0, 60.0, 105.0, 300.0])
    assert row_time([], 64) is None


def test_the_page_shows_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    assert tuple(TEXTS) == LIMITS
    for limit, texts in TEXTS.items():
        assert f"| `{limit}` | {texts['meaning']} |" in page
