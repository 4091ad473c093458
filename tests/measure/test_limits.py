"""The decision at both sides of each of its thresholds, and the figures of its sentences, rooflines and tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from recperf.errors import DataError
from recperf.measure import limits
from recperf.measure.ceilings import Ceilings
from recperf.measure.limit_kinds import LIMITS
from recperf.measure.profile import build_profile, swept_ms
from recperf.measure.profile_records import (
    Communication,
    Component,
    IdFacts,
    MeasuredRank,
    MeasuringCost,
    Missing,
    TableTraffic,
    WorkloadFigures,
)
from recperf.measure.records import (
    Attribution,
    DividedOperator,
    Experiment,
    NativeCode,
    Observed,
    ObservedSteps,
    Percentiles,
    Verdict,
)

CEILINGS = Ceilings(
    device="cpu", threads=2, flops={"float32": 1e11, "bfloat16": 2e11}, stream=2e10, cached=1e11, first_touch=2e9,
    link=5e10, cache_bytes=1 << 20, stream_cache_bytes=1 << 20, largest_cache=1 << 20,
    rows_memory=((64, 164.0), (1064, 1164.0)), rows_cache=((64, 10.0),), calls={"elementwise": 1000.0},
    kernel_ns=2000.0,
)  # fmt: skip
"""A random row takes 100 ns and 1 ns for each byte."""
QUIET = {"other_work": 0.0, "preempted": 0.0, "scale": 1.0, "steps": ObservedSteps(9, 6, 2, 1)}


def row(limit: str, ms: float, name: str = "aten::op", own: float | None = None, **more: Any) -> DividedOperator:
    """An operator of `own` ms, `ms` of which are under one limit."""
    known = {"kind": "elementwise", "calls": 1, "python_calls": 1, "random_ms": 0.0, "note": "", "part": None}
    return DividedOperator(name=name, ms=ms if own is None else own, limits={limit: ms}, **{**known, **more})


def decided(
    shares: dict[str, float], *rows: DividedOperator, ceilings: Ceilings | None = CEILINGS,
    experiments: list[Experiment] | None = None, step: tuple[float, float, float] = (1.0, 1.0, 1.0), **figures: Any,
) -> Verdict:  # fmt: skip
    known = {"device": "cpu", "threads": 2, "waits": {}, **QUIET, **figures}
    observed = Observed(step_ms=Percentiles(*step), operators=list(rows), **known)
    return limits.decide(
        Attribution(dict.fromkeys(LIMITS, 0.0) | shares, 0.0, list(rows)), observed, ceilings, experiments
    )


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        # limit, share, confidence, second, sentences
        ({"compute": 0.3}, ("compute", 0.3, "high", None, 1)),
        ({"compute": 0.29}, ("unclear", 0.29, "low", "input", 2)),
        ({"compute": 0.5, "cache": 0.1}, ("compute", 0.5, "high", "cache", 2)),
        ({"compute": 0.5, "cache": 0.09}, ("compute", 0.5, "high", None, 1)),
        ({"compute": 0.5, "cache": 0.2, "input": 0.15, "sync": 0.15}, ("compute", 0.5, "high", "cache", 3)),
        ({"compute": 0.5, "cache": 0.4}, ("compute", 0.5, "medium", "cache", 2)),
    ],
)
def test_the_largest_share_is_the_verdict(shares: dict[str, float], expected: tuple[Any, ...]) -> None:
    verdict = decided(shares)
    found = (verdict.limit, verdict.share, verdict.confidence, verdict.second, len(verdict.because))
    assert found == expected


@pytest.mark.parametrize(
    ("figures", "doubts"),
    [
        ({}, 0),
        # By how much it leads, less the spread of the steps.
        ({"shares": {"compute": 0.2}}, 0),
        ({"shares": {"compute": 0.19}}, 1),
        ({"shares": {"compute": 0.8, "cache": 0.4}, "step": (0.75, 1.0, 1.25)}, 0),
        ({"shares": {"compute": 0.8, "cache": 0.4}, "step": (1.5, 2.0, 2.6)}, 1),
        ({"shares": {"compute": 0.8, "cache": 0.4}, "step": (0.0, 0.0, 9.0)}, 0),
        # What disturbed the steps, each a doubt only beyond 15 %; one of them is enough.
        ({"other_work": 0.15}, 0),
        ({"other_work": 0.16}, 1),
        ({"crowded": 0.15}, 0),
        ({"crowded": 0.16}, 1),
        ({"preempted": 0.15}, 0),
        ({"preempted": 0.16}, 1),
        ({"other_work": 0.16, "crowded": 0.16, "preempted": 0.16}, 1),
        ({"other_work": None, "preempted": None, "scale": None}, 0),
        ({"other_work": None, "steps": None}, 1),
        ({"other_work": 0.0, "steps": None}, 0),
        ({"ceilings": None}, 0),
        ({"ceilings": None, "rows": [row("compute", 1.0)]}, 1),
        ({"ceilings": replace(CEILINGS, other_work=0.15)}, 0),
        ({"ceilings": replace(CEILINGS, other_work=0.16)}, 1),
        ({"scale": 1.5}, 0),
        ({"scale": 1.51}, 1),
        ({"scale": 1 / 1.5}, 0),
        ({"scale": 0.66}, 1),
        # Kernels of a CUDA graph, where they are more than half of the limit.
        ({"rows": [row("compute", 1.0, by_name="compute"), row("compute", 1.0)]}, 0),
        ({"rows": [row("compute", 1.5, by_name="compute"), row("compute", 1.0)]}, 1),
        ({"rows": [row("compute", 1.0, by_name="compute"), row("cache", 9.0)]}, 1),
        ({"rows": [row("dispatch", 1.0, by_name="compute")], "shares": {"dispatch": 0.9}}, 0),
        ({"rows": [row("cache", 1.0, by_name="cache"), row("compute", 1.0)]}, 0),
        # All together are no lower than low.
        ({"crowded": 0.2, "scale": 2.0}, 2),
        ({"crowded": 0.2, "scale": 2.0, "ceilings": replace(CEILINGS, other_work=0.2)}, 3),
    ],
)
def test_doubts(figures: dict[str, Any], doubts: int) -> None:
    rows, shares = figures.pop("rows", []), figures.pop("shares", {"compute": 0.9})
    verdict = decided(shares, *rows, **figures)
    assert len(verdict.doubts) == doubts, verdict.doubts
    assert (verdict.limit == "not judged") is (figures.get("other_work") == 0.16)
    if verdict.limit == "compute":
        assert verdict.confidence == ("high", "medium", "low", "low")[doubts]


def test_doubts_have_their_figures() -> None:
    (lead,) = decided({"compute": 0.5, "cache": 0.4}, step=(1.5, 2.0, 3.5)).doubts
    assert lead == "compute leads cache by only 0.10 of a step; steps vary by 50%"


def test_a_step_that_is_not_judged() -> None:
    verdict = decided({"compute": 0.7, "input": 0.2, "blocked": 0.1}, other_work=0.3)
    assert (verdict.limit, verdict.share, verdict.confidence, verdict.second) == ("not judged", 0.7, "low", None)
    assert verdict.because[0].startswith("Other work used 30% of the cores.")
    known = verdict.because[0].rpartition(": ")[2]
    assert "input 20%, blocked 10%" in known
    assert "python 0%" in known
    assert "compute" not in known
    for device, preempted, limit, judged in (
        ("H200", None, "latency", True), ("H200", None, "python", False), ("cpu", 0.0, "python", True),
        ("cpu", 0.0, "compute", False),
    ):  # fmt: skip
        beside = decided({limit: 0.8}, other_work=0.3, device=device, preempted=preempted)
        assert (beside.limit == limit) is judged
    one_thread = {"other_work": 0.3, "threads": 1}
    assert decided({"python": 0.8}, **one_thread).limit == "python"
    assert decided({"python": 0.8}, **one_thread, preempted=None).limit == "not judged"


def test_a_step_that_was_not_traced_is_unclear() -> None:
    unknown = {"waits": {"unknown": 6.0, "input": 4.0}}
    verdict = decided({"operator": 0.6, "input": 0.4}, **unknown)
    assert (verdict.limit, verdict.share, verdict.confidence, verdict.second) == ("unclear", 0.6, "low", None)
    assert verdict.because[0].startswith("No step was traced: what takes 60% of the step")
    assert verdict.because[1].startswith("The step waits for its next batch for 40%")
    assert decided({"operator": 0.4, "input": 0.6}, **unknown).limit == "input"
    assert decided({"operator": 0.6, "input": 0.4}).limit == "operator"


@pytest.mark.parametrize(
    ("outcomes", "doubts"),
    [
        ([], 0), (["not run"], 0), (["agrees"], 0), (["agrees", "inconclusive"], 0), (["inconclusive"], 1),
        (["disagrees"], 1), (["disagrees", "inconclusive"], 1), (["disagrees", "agrees", "disagrees"], 2),
    ],
)  # fmt: skip
def test_experiments_raise_doubts(outcomes: list[str], doubts: int) -> None:
    rows = [Experiment("half", "0.50", "0.90", outcome) for outcome in outcomes]
    verdict = decided({"compute": 0.9}, experiments=rows)
    assert len(verdict.doubts) == doubts
    not_run = all(outcome == "not run" for outcome in outcomes)
    assert ("No experiment: the step was not run again." in verdict.because) is not_run
    assert len(decided({"compute": 0.9}).because) == 1


@pytest.mark.parametrize(
    ("native", "start"),
    [
        (NativeCode(0.5, ["numpy"]), "Python code between operators takes 60%"),
        (NativeCode(0.51, ["numpy", "pandas", "scipy", "other"]), "C code outside torch (numpy, pandas, scipy),"),
        (NativeCode(0.9, []), "C code outside torch (of other libraries), called"),
    ],
)  # fmt: skip
def test_c_code_outside_of_torch(native: NativeCode, start: str) -> None:
    assert decided({"python": 0.6}, native=native).because[0].startswith(start)
    assert decided({"blocked": 0.6}, native=native).because[0].startswith("The thread of the step is off")


@pytest.mark.parametrize(
    ("limit", "rows", "detail"),
    [
        ("input", [], "for 50% of its time."),
        ("transfer", [row("transfer", 2.0)], "take 50% of the step."),
        (
            "transfer",
            [row("transfer", 4.0, "fbgemm::lookup", host_bytes=100_000_000)],
            ", 100% of it in fbgemm::lookup: rows in host memory, at 25 GB/s where the link reaches 50 GB/s.",
        ),
        ("communication", [row("compute", 1.0)], "Waiting for other ranks takes 50% of the step."),
        ("dispatch", [row("dispatch", 1.0, calls=30), row("compute", 1.0, calls=12)], ": 42 operator calls."),
        (
            "dispatch",
            [row("dispatch", 1.0, kernels=30), row("compute", 1.0, kernels=12)],
            ": 42 kernels, each of which costs at least 2.00 µs whatever it computes.",
        ),
        (
            "compute",
            [row("compute", 3.0, "aten::mm", flops=2.4e8), row("compute", 1.0, flops=1e9)],
            ", 75% of it in aten::mm, which computes 80 GFLOP/s where this machine reaches 100 GFLOP/s in float32 with "
            "2 threads, 200 GFLOP/s in bfloat16.",
        ),
        ("compute", [row("compute", 2.0, "aten::exp")], ", 100% of it in aten::exp."),
        (
            "bandwidth",
            [row("bandwidth", 2.0, bytes=30_000_000)],
            ", 100% of it in aten::op, at 15 GB/s where this machine streams 20 GB/s.",
        ),
        (
            "bandwidth",
            [row("bandwidth", 2.0, bytes=80_000_000, note="the ceiling is too low: by far")],
            ", at 40 GB/s where this machine streams 20 GB/s; the ceiling is too low.",
        ),
        (
            "bandwidth",
            [row("bandwidth", 2.0, bytes=3_000_000, memory_bytes=3_000_000, new_bytes=3_000_000)],
            ", 100% of it in aten::op, at 1.5 GB/s where this machine gets new memory at 2 GB/s.",
        ),
        ("bandwidth", [row("bandwidth", 2.0, bytes=3_000_000)], "of the step, 100% of it in aten::op."),
        (
            "latency",
            [row("latency", 2.0, rows=8000, memory_rows=4000, row_bytes=400)],
            ": 4,000 of 8,000 random rows of 400 bytes come from memory, at 250 ns a row (memory: 500 ns, of which "
            "100 ns whatever the width and 400 ns for the bytes).",
        ),
        ("operator", [row("operator", 3.0, "aten::sort")], "in aten::sort (3.00 ms, far below every ceiling)."),
        ("cache", [row("cache", 3.0, bytes=9)], "in the caches takes 50% of the step, 100% of it in aten::op."),
    ],
)  # fmt: skip
def test_a_sentence_names_the_operator_and_its_rate(limit: str, rows: list[DividedOperator], detail: str) -> None:
    verdict = decided({limit: 0.5}, *rows, waits={"input": 8.0})
    assert verdict.because[0].endswith(detail), verdict.because[0]


def test_a_sentence_without_ceilings_or_time_has_no_rate() -> None:
    product = row("compute", 3.0, "aten::mm", flops=2.4e8, kernels=7, calls=5)
    assert decided({"compute": 0.5}, product, ceilings=None).because[0].endswith(", 100% of it in aten::mm.")
    (sentence,) = decided({"dispatch": 0.5}, changed(product, limits={"dispatch": 1.0}), ceilings=None).because
    assert sentence.endswith(": 5 operator calls.")
    timeless = changed(product, ms=0.0)
    assert decided({"compute": 0.5}, timeless).because[0].endswith(", 100% of it in aten::mm.")
    other = decided({"compute": 0.5}, changed(product, precision="float16")).because[0]
    assert "where this machine reaches 100 GFLOP/s in float16 with 2 threads" in other
    one = replace(CEILINGS, threads=1, flops={"float32": 1e11})
    sentence = decided({"compute": 0.5}, product, ceilings=one).because[0]
    assert sentence.endswith("in float32 with 1 thread, and no more in a lower precision.")
    assert "float32," in decided({"compute": 0.5}, product, ceilings=replace(one, device="H200")).because[0]
    unknown = row("bandwidth", 2.0, rows=100, memory_rows=100)
    assert "rows of 0 bytes" in decided({"bandwidth": 0.5}, unknown).because[0]


def test_the_busiest_operator_is_that_of_all_its_rows_that_the_limit_explains() -> None:
    rows = [
        row("compute", 4.0, "aten::bmm", flops=1),
        row("compute", 3.0, "aten::mm", own=6.0, flops=100, calls=2),
        row("compute", 2.0, "aten::mm", own=2.0, flops=20, calls=3),
        # Explained by something else, and in another precision.
        row("compute", 0.5, "aten::mm", own=1.5, flops=7),
        row("compute", 0.5, "aten::mm", own=0.5, flops=9, precision="bfloat16"),
    ]
    busiest, share = limits._busiest(rows, "compute")
    assert (busiest.name, busiest.ms, busiest.flops, busiest.calls) == ("aten::mm", 8.0, 120, 5)
    assert share == pytest.approx(0.6)
    # Where the limit explains less than half of every row: the one with most of it.
    few = [row("compute", 1.0, own=9.0, flops=5), row("compute", 2.0, own=5.0, flops=6)]
    busiest, share = limits._busiest(few, "compute")
    assert (busiest.ms, busiest.flops, share) == (5.0, 6, 1.0)


def figures(**more: Any) -> WorkloadFigures:
    ms = Percentiles(9.0, 10.0, 11.0)
    parts = more.pop("components", [Component("forward", "forward", Percentiles(1.0, 2.0, 3.0), 0.2, 2e8, 1e7)])
    return WorkloadFigures(
        device="cpu", steps=5, warmup=1, batch_size=4, step_ms=ms, components=parts, threads=2,
        ids=IdFacts(1, 1, 4, 4, 4), overhead=MeasuringCost(8.0, 10.0, 0.25), **more,
    )  # fmt: skip


def ranks(*own_ms: float, **more: Any) -> Communication:
    each = [MeasuredRank(10.0, ms, 10.0 - ms, None, None, rank, None, "forward") for rank, ms in enumerate(own_ms)]
    known = {"late_ms": None, "exposed_ms": 2.0, "exposed_share": 0.2, "slowest": len(own_ms) - 1, **more}
    return Communication(ranks=len(own_ms), each=each, **known)


def test_ranks() -> None:
    assert limits.ranks_sentence(None) == limits.ranks_sentence(Communication(missing="one rank")) == ""
    text = limits.ranks_sentence(ranks(4.0, 6.0, 8.0, late_ms=1.5, moving_ms=0.5))
    assert text.startswith(
        "Rank 2 of 3 is the slowest: its own work takes 8.00 ms per step, that of the others 5.00 ms."
    )
    assert text.endswith("for 20% of a step, 2.00 ms: 1.50 ms for a late rank, 500 µs for data transfer.")
    assert limits.ranks_sentence(ranks(4.0, 8.0)).endswith("for 20% of a step, 2.00 ms.")
    assert limits.ranks_sentence(ranks(4.0, 8.0, late_ms=0.0)).endswith(": 0 for a late rank, 0 for data transfer.")
    for slowest, close in ((20.0, True), (21.0, False)):
        assert ("by less than 5%" in limits.ranks_sentence(ranks(10.0, 30.0, slowest))) is close


def traffic(**more: Any) -> TableTraffic:
    known = {
        "placement": "host", "cache_bytes": 1 << 20, "rows": 2000.0, "hit_rate": 0.75, "fetched_bytes": 3 << 20,
        "written_back_bytes": 1 << 20, "placing_ms": 500.0, "exposed_ms": 0.5,
    }  # fmt: skip
    return TableTraffic(**{**known, **more})


def test_tables_between_tiers() -> None:
    assert limits.tables_sentence(figures()) == ""
    text = limits.tables_sentence(figures(tables=traffic()))
    assert text == (
        "Tables in host memory: the cache of 1 MiB held 75.0% of the 2,000 rows of a batch; 3 MiB a step were fetched "
        "and 1 MiB written back in 500 ms, 8 MiB/s, beside the step, which waited 500 µs for its batch."
    )
    # A larger cache is worth a word where both take more than a tenth of a step of 10 ms.
    for exposed, placing, larger in ((1.0, 9.0, False), (1.1, 9.0, True), (9.0, 1.0, False)):
        moved = limits.tables_sentence(figures(tables=traffic(exposed_ms=exposed, placing_ms=placing)))
        assert ("A larger cache" in moved) is larger
    for still in ({"placing_ms": 0.0}, {"fetched_bytes": 0, "written_back_bytes": 0}):
        assert "/s" not in limits.tables_sentence(figures(tables=traffic(placement="file", **still)))
    process = {"own": 1 << 30, "files": 2 << 20, "peak": 3 << 30}
    text = limits.tables_sentence(figures(tables=traffic(process=process)))
    assert text.endswith("has 1 GiB of its own in memory and 2 MiB of libraries; at its peak it had 3 GiB.")


@pytest.mark.parametrize(
    ("flops", "moved", "roof", "bound"),
    [
        # In 2 ms this machine computes 2e8 FLOP and moves 4e7 bytes.
        (2e8, 1e7, 1.0, "compute"),
        (1e8, 2e7, 0.5, "compute"),
        (0.98e8, 1e7, 0.49, "neither"),
        (1e8, 4e7, 1.0, "memory"),
        (3e8, 1e7, 1.5, "compute"),
        (3.1e8, 1e7, None, "the ceiling does not apply"),
        (None, 6.1e7, None, "the ceiling does not apply"),
        (2e8, None, 1.0, "compute"),
    ],
)
def test_a_part_and_its_roof(
    flops: float | None, moved: float | None, roof: float | None, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ceilings_of_profile", lambda *_: CEILINGS)
    part = Component("forward", "forward", Percentiles(1.0, 2.0, 9.0), 0.2, flops, moved)
    (point,) = limits.roofline(figures(components=[part]), None)
    assert (point.share_of_roof, point.bound) == (roof and pytest.approx(roof), bound)
    assert (point.flops_per_s, point.bytes_per_s) == (
        pytest.approx(500 * (flops or 0)),
        pytest.approx(500 * (moved or 0)),
    )
    assert point.intensity == (pytest.approx((flops or 0) / moved) if moved else None)
    assert (point.flops, point.bytes) == (flops or 0, moved or 0)
    assert (point.ceiling_flops_per_s, point.ceiling_bytes_per_s) == (1e11, 2e10)


def test_parts_without_time_or_work_have_no_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(limits.roofline(figures(), None), Missing)
    monkeypatch.setattr(limits, "ceilings_of_profile", lambda *_: CEILINGS)
    zero = Percentiles(0.0, 0.0, 0.0)
    timeless, idle = Component("a", "forward", zero, 0.2, 1.0, 1.0), Component("b", "forward", zero, 0.2, None, None)
    assert isinstance(limits.roofline(figures(components=[timeless, idle]), None), Missing)
    short = Component("c", "forward", Percentiles(1e-4, 1e-4, 1e-4), 0.2, 1.0, None)
    assert len(limits.roofline(figures(components=[timeless, short]), None)) == 1


def test_what_lookups_touch_by_table() -> None:
    """Tables of 300, 3 and 2 rows, numbered one after another: the first has 200 rows touched, two of them often."""
    often = [7] * 300 + [8] * 200
    first = [*range(200), *often, 300, 300, 302]
    second = [*often, 300]
    result = limits.embeddings(8, [("a", 300), ("b", 3), ("c", 2)], [torch.tensor(first), torch.tensor(second)])
    a, b, c = result.tables
    assert [(one.name, one.rows, one.row_bytes) for one in (a, b, c)] == [("a", 300, 8), ("b", 3, 8), ("c", 2, 8)]
    assert (a.lookups, a.unique, a.touched_bytes) == (600.0, 101.0, 1600)
    assert a.unique_ratio == pytest.approx(101 / 600)
    # A hundredth of the 200 touched rows.
    assert a.busiest_share == pytest.approx((601 + 401) / 1200)
    assert (b.lookups, b.unique, b.unique_ratio, b.touched_bytes) == (2.0, 1.5, 0.75, 16)
    assert b.busiest_share == pytest.approx(3 / 4)
    assert (c.lookups, c.unique, c.unique_ratio, c.touched_bytes, c.busiest_share) == (0.0, 0.0, 0.0, 0, 0.0)
    assert (result.lookups, result.unique, result.unique_ratio) == (602.0, 102.5, pytest.approx(102.5 / 602))
    nothing = limits.embeddings(8, [("a", 3)], [torch.tensor([], dtype=torch.int64)])
    assert (nothing.lookups, nothing.unique_ratio) == (0.0, 0.0)


def test_times_of_parts() -> None:
    clocked = figures()
    assert limits.part_ms(clocked, "step").p50 == 10.0
    assert limits.part_ms(clocked, "forward").p50 == 2.0
    with pytest.raises(DataError, match="no part 'tower'"):
        limits.part_ms(clocked, "tower")
    seen = Observed("cpu", 2, Percentiles(7.0, 8.0, 9.0), {"python": 8.0}, [], **QUIET)
    profile = build_profile(seen, CEILINGS, None, [], {})
    profile.workload = clocked
    assert (swept_ms(profile, "step").p50, swept_ms(profile, "forward").p50) == (8.0, 2.0)
