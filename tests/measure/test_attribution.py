"""The limit of each operator, from its counted work and the ceilings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recperf.measure.attribution import LIMITS, attribute, classify
from recperf.measure.ceilings import Ceilings
from recperf.measure.limits import TEXTS, decide
from recperf.measure.operators import kind_of_call

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


def test_a_ceiling_that_cannot_apply_is_not_believed() -> None:
    row = operator("aten::mm", ms=1.0, flops=1e9)
    row = classify(row, CEILINGS, INSIDE)
    divided, note = row["limits"], row["note"]
    assert "compute" not in divided
    assert "the ceiling does not apply: its arithmetic would take 10" in note


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


def test_the_page_shows_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    assert tuple(TEXTS) == LIMITS
    for limit, texts in TEXTS.items():
        assert f"| `{limit}` | {texts['meaning']} |" in page
