"""The attribution and the decision on figures made up for the purpose, and that every threshold and ceiling matters.

Each probe states a few figures near a threshold and what must follow. A threshold or a ceiling that is twice as large
or half as large must make at least one probe fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from recperf.measure import attribution, limits
from recperf.measure.attribution import attribute, classify
from recperf.measure.ceilings import Ceilings
from recperf.measure.limit_kinds import LIMITS, Limit
from recperf.measure.limits import decide
from recperf.measure.operators import kind_of_call
from recperf.measure.records import Attribution, Experiment, NativeCode, Observed, Operator, Percentiles, Verdict
from recperf.runs.report.svg import svg_file

MIB = 1 << 20
KINDS = (
    *("elementwise", "view", "product", "reduction", "index"),
    *("embedding_bag", "allocate", "copy", "node"),
)
CEILINGS = Ceilings(
    device="cpu",
    threads=2,
    flops={"float64": 5e10, "float32": 1e11, "bfloat16": 2e11},
    stream=2e10,
    first_touch=2e9,
    cached=1e11,
    special=1e9,
    cache_bytes=10 * MIB,
    stream_cache_bytes=20 * MIB,
    largest_cache=32 * MIB,
    rows_memory=((64, 50.0), (1024, 200.0)),
    rows_cache=((64, 10.0), (1024, 60.0)),
    calls={**{kind: 1000.0 * place for place, kind in enumerate(KINDS, 1)}, "backward": 50_000.0},
    kernel_ns=1000.0,
)


def row(ms: float, name: str = "aten::op", **figures: Any) -> Operator:
    known = {"part": None, "kind": kind_of_call(name), "calls": 1, "python_calls": 1}
    return Operator(name=name, ms=ms, **{**known, **figures})


def step_of(*rows: Operator, ms: float = 1.0, **more: Any) -> Observed:
    known = {"device": "cpu", "threads": 2, "waits": {}, "inside": 0.5, "other_work": 0.0}
    return Observed(step_ms=Percentiles(ms, ms, ms), operators=list(rows), **{**known, **more})


def shares_of(*rows: Operator, ceilings: Ceilings | None = CEILINGS, **waits: float) -> dict[str, float]:
    return attribute(step_of(*rows, waits=waits), ceilings).shares


def main_limit(*rows: Operator, ceilings: Ceilings = CEILINGS, **waits: float) -> str:
    shares = shares_of(*rows, ceilings=ceilings, **waits)
    return max(shares, key=lambda limit: shares[limit])


def confidence(
    shares: dict[str, float],
    *,
    spread: float = 0.0,
    ceilings: float = 0.0,
    experiments: list[Experiment] | None = None,
    **figures: Any,
) -> Verdict:
    observed = step_of(**{"preempted": 0.0, "scale": 1.0, **figures})
    observed.step_ms = Percentiles(1 - spread, 1.0, 1 + spread)
    every = dict.fromkeys(LIMITS, 0.0) | shares
    return decide(Attribution(every, 0.0, []), observed, replace(CEILINGS, other_work=ceilings), experiments)


PROBES: dict[str, Callable[[Ceilings], bool]] = {
    # Work at 40 % of a ceiling is explained by it, at 20 % it is not.
    "near a roof": lambda c: main_limit(row(10.0, flops=4e8), ceilings=c) == "compute",
    "far from a roof": lambda c: main_limit(row(10.0, flops=2e8), ceilings=c) == "operator",
    "float64": lambda c: main_limit(row(10.0, flops=2e8, precision="float64"), ceilings=c) == "compute",
    "float64, slow": lambda c: main_limit(row(10.0, flops=1e8, precision="float64"), ceilings=c) == "operator",
    "bfloat16": lambda c: main_limit(row(10.0, flops=8e8, precision="bfloat16"), ceilings=c) == "compute",
    "bfloat16, slow": lambda c: main_limit(row(10.0, flops=4e8, precision="bfloat16"), ceilings=c) == "operator",
    "streaming": lambda c: main_limit(row(10.0, bytes=8e7, memory_bytes=8e7), ceilings=c) == "bandwidth",
    "slow streaming": lambda c: main_limit(row(10.0, bytes=4e7, memory_bytes=4e7), ceilings=c) == "operator",
    "new memory": lambda c: (
        main_limit(row(10.0, bytes=8e6, memory_bytes=8e6, new_bytes=8e6), ceilings=c) == "bandwidth"
    ),
    "new memory, slow": lambda c: (
        main_limit(row(10.0, bytes=4e6, memory_bytes=4e6, new_bytes=4e6), ceilings=c) == "operator"
    ),
    "cached": lambda c: main_limit(row(10.0, bytes=4e8), ceilings=c) == "cache",
    "slow in the cache": lambda c: main_limit(row(10.0, bytes=2e8), ceilings=c) == "operator",
    "random rows": lambda c: (
        main_limit(row(10.0, rows=80_000, memory_rows=80_000, row_bytes=64), ceilings=c) == "latency"
    ),
    "slow rows": lambda c: (
        main_limit(row(10.0, rows=40_000, memory_rows=40_000, row_bytes=64), ceilings=c) == "operator"
    ),
    "rows of a cache": lambda c: main_limit(row(10.0, rows=400_000, row_bytes=64), ceilings=c) == "cache",
    "slow rows of a cache": lambda c: main_limit(row(10.0, rows=200_000, row_bytes=64), ceilings=c) == "operator",
    "functions such as exp": lambda c: main_limit(row(10.0, special=4e6), ceilings=c) == "compute",
    "slow functions": lambda c: main_limit(row(10.0, special=2e6), ceilings=c) == "operator",
    # A ceiling that is exceeded by 1.3 times is believed, by 1.8 times it is not.
    "above the ceiling": lambda c: "compute" in classify(row(10.0, flops=1.3e9), c, 0.5).limits,
    "far above the ceiling": lambda c: "compute" not in classify(row(10.0, flops=1.8e9), c, 0.5).limits,
    # More than any cache holds is never cached, however fast; less may be.
    "beyond all caches": lambda c: main_limit(row(1.0, bytes=3e8, memory_bytes=3e8), ceilings=c) == "bandwidth",
    "beyond the knee, fast": lambda c: main_limit(row(0.3, bytes=2e8, memory_bytes=2e8), ceilings=c) == "cache",
    # A call of an operator that computes nothing may take some times the cost of the simplest one.
    "only a call": lambda c: classify(row(0.003), c, 0.5).limits.keys() == {"dispatch"},
    "more than a call": lambda c: "operator" in classify(row(0.0065), c, 0.5).limits,
    "small work": lambda c: classify(row(0.0039, bytes=20_000), c, 0.5).limits.keys() == {"dispatch"},
    "not so small work": lambda c: "cache" in classify(row(0.0039, bytes=40_000), c, 0.5).limits,
    "kernels": lambda c: main_limit(row(1.0, kernels=300), ceilings=c) == "dispatch",
    "long kernels": lambda c: main_limit(row(1.0, kernels=200), ceilings=c) == "operator",
    "clear": lambda c: confidence({"compute": 0.35, "cache": 0.0}).limit == "compute",
    "unclear": lambda c: confidence({"compute": 0.25, "cache": 0.0}).limit == "unclear",
    "leads": lambda c: confidence({"compute": 0.6, "cache": 0.35}).confidence == "high",
    "leads by too little": lambda c: confidence({"compute": 0.6, "cache": 0.45}).confidence == "medium",
    "steps vary": lambda c: confidence({"compute": 0.6, "cache": 0.35}, spread=0.2).confidence == "medium",
    "quiet": lambda c: confidence({"compute": 0.9}, other_work=0.1).confidence == "high",
    "busy": lambda c: confidence({"compute": 0.9}, other_work=0.2).limit == "not judged",
    "busy, one thread": lambda c: confidence({"compute": 0.9}, other_work=0.2, threads=1).confidence == "medium",
    "preempted": lambda c: confidence({"compute": 0.9}, preempted=0.2).confidence == "medium",
    "crowded": lambda c: confidence({"compute": 0.9}, crowded=0.2).confidence == "medium",
    "quiet ceilings": lambda c: confidence({"compute": 0.9}, ceilings=0.1).confidence == "high",
    "busy ceilings": lambda c: confidence({"compute": 0.9}, ceilings=0.2).confidence == "medium",
    "same machine": lambda c: confidence({"compute": 0.9}, scale=1.4).confidence == "high",
    "drifted": lambda c: confidence({"compute": 0.9}, scale=1.6).confidence == "medium",
    "mentioned": lambda c: confidence({"compute": 0.85, "cache": 0.15}).second == "cache",
    "not mentioned": lambda c: confidence({"compute": 0.93, "cache": 0.07}).second is None,
}
for place, kind in enumerate(KINDS, 1):
    # Half of a call's cost is inside the operator: twice its cost is a call and as much again.
    PROBES[f"cost of {kind}"] = lambda c, kind=kind, place=place: (  # type: ignore[misc]
        classify(row(place / 1e3 * 4.5, kind=kind, python_calls=0), c, 0.5).limits.get("dispatch")
        == pytest.approx(place / 2e3)
    )


def failures(ceilings: Ceilings = CEILINGS) -> list[str]:
    return [name for name, holds in PROBES.items() if not holds(ceilings)]


def test_every_probe_holds() -> None:
    assert failures() == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *((attribution, name) for name in ("EXPLAINED", "BELIEVED", "MANY", "SMALL", "CALLS")),
        *((limits, name) for name in ("CLEAR", "LEAD", "DISTURBED", "NOTICEABLE", "DRIFT")),
    ],
)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_changed_threshold_is_noticed(module: Any, name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, getattr(module, name) * factor)
    assert failures()


def changed_ceilings(factor: float) -> dict[str, Ceilings]:
    """Every ceiling that an attribution uses, one at a time."""
    changed = {
        name: replace(CEILINGS, **{name: getattr(CEILINGS, name) * factor})
        for name in ("stream", "first_touch", "cached", "special", "kernel_ns")
    }
    for name in ("flops", "calls"):
        table = getattr(CEILINGS, name)
        for key in table:
            if key != "backward":
                changed[f"{name} {key}"] = replace(CEILINGS, **{name: {**table, key: table[key] * factor}})
    for name in ("rows_memory", "rows_cache"):
        rows = tuple((size, ns * factor) for size, ns in getattr(CEILINGS, name))
        changed[name] = replace(CEILINGS, **{name: rows})
    return changed


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_changed_ceiling_is_noticed(factor: float) -> None:
    unnoticed = [name for name, ceilings in changed_ceilings(factor).items() if not failures(ceilings)]
    assert unnoticed == []


def test_shares_sum_to_one_and_waits_count() -> None:
    shares = shares_of(row(4.0, flops=4e8), input=3.0, blocked=2.0, python=1.0)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["input"] == pytest.approx(0.3)
    assert shares["blocked"] == pytest.approx(0.2)
    assert shares["compute"] == pytest.approx(0.4, abs=0.001)


def test_what_python_spends_on_calls_is_their_overhead() -> None:
    """1,000 calls cost 1 ms, half of it outside of the operators, where it looks like Python."""
    shares = shares_of(row(0.5, calls=1000, python_calls=1000), python=0.6)
    assert shares["dispatch"] == pytest.approx(1.0 / 1.1)
    assert shares["python"] == pytest.approx(0.1 / 1.1)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], "high"),
        (["not run"], "high"),
        (["inconclusive", "not run"], "medium"),
        (["inconclusive", "agrees"], "high"),
        (["agrees", "disagrees"], "medium"),
        (["disagrees", "disagrees"], "low"),
    ],
)
def test_only_an_experiment_that_agrees_supports_a_high_confidence(outcomes: list[str], expected: str) -> None:
    rows = [Experiment("one", "2.00", "2.00", outcome) for outcome in outcomes]
    verdict = confidence({"compute": 0.9}, experiments=rows)
    assert verdict.confidence == expected
    assert [doubt for doubt in verdict.doubts if 'the experiment "one" disagrees' in doubt] == verdict.doubts[
        : outcomes.count("disagrees")
    ]
    assert ("No experiment: the step was not run again." in verdict.because) is (not set(outcomes) - {"not run"})


@pytest.mark.parametrize(
    ("limit", "where", "expected"),
    [
        ("compute", {}, "not judged"),
        ("compute", {"threads": 1}, "compute"),
        # The system does not tell how long the thread waited for a core.
        ("compute", {"threads": 1, "preempted": None}, "not judged"),
        ("compute", {"device": "H200"}, "compute"),
        ("launch", {"device": "H200"}, "not judged"),
    ],
)
def test_beside_other_work_only_what_it_does_not_change_is_judged(limit: str, where: Any, expected: str) -> None:
    verdict = confidence({limit: 0.8, "input": 0.197, "python": 0.003}, other_work=0.4, **where)
    assert verdict.limit == expected
    assert verdict.confidence != "high"
    assert "other work used 40% of the cores" in verdict.doubts
    if expected == "not judged":
        assert "not depend on it: input 20%, blocked 0%" in verdict.because[0]
        assert "python below 1 %" in verdict.because[0]


def test_c_code_outside_torch_is_told_from_the_interpreter() -> None:
    step = step_of(row(1.0), ms=4.0, waits={"python": 3.0})
    for native, start in (
        (None, "Python code between"),
        (NativeCode(0.67, ["numpy"]), "C code outside torch (numpy)"),
    ):
        step.native = native
        assert any(text.startswith(start) for text in decide(attribute(step, CEILINGS), step, CEILINGS).because)


def test_figures_do_not_round_to_nothing() -> None:
    fast = replace(CEILINGS, rows_memory=((64, 0.03), (1024, 0.1)), rows_cache=((64, 0.01), (1024, 0.02)))
    step = step_of(row(30.0, "aten::embedding", rows=1e9, memory_rows=1e9, row_bytes=64, bytes=6.4e10), ms=30.0)
    text = decide(attribute(step, fast), step, fast).because[0]
    assert "at 0.0300 ns a row (memory: 0.0300 ns, of which 0.0" in text


def test_no_limit_stands_out() -> None:
    verdict = confidence({"input": 0.25, "blocked": 0.2})
    assert (verdict.limit, verdict.confidence, verdict.second) == ("unclear", "low", "blocked")
    assert "The nearest are input (25%) and blocked (20%)" in verdict.because[0]


ROWS = {"rows": 100_000, "row_bytes": 64, "bytes": 6_400_000}
SLOW_ROWS = replace(CEILINGS, rows_memory=((64, 100.0), (1024, 200.0)), rows_cache=((64, 10.0), (1024, 40.0)))


@pytest.mark.parametrize(
    ("operator", "limit"),
    [
        (row(5.0, "aten::embedding", memory_rows=100_000, **ROWS), "latency"),  # prefetched
        (row(1.4, "aten::embedding", memory_rows=100_000, **ROWS), "cache"),
        (row(1.4, "recperf::bag_sum", memory_rows=100_000, **ROWS), "latency"),  # by C code, slower than a stream
        (row(0.3, "recperf::bag_sum", memory_rows=100_000, **ROWS), "cache"),
        # Counted as cached, of a table beyond the knee: lost by then, if it took nearer to memory than to the cache.
        (row(5.0, "aten::embedding", table_rows=1 << 20, **ROWS), "latency"),
        (row(2.0, "aten::embedding", table_rows=1 << 20, **ROWS), "cache"),
        (row(5.0, "aten::embedding", table_rows=1 << 17, **ROWS), "operator"),
        (row(5.0, "aten::embedding", table_rows=1 << 20, flops=5e8, **ROWS), "compute"),
        (row(10.0, "aten::sort", bytes=1e6), "operator"),
        (row(1.0, "_Attention"), "python"),
        (row(10.0, "nccl::all_reduce", communication=True), "communication"),
        # Two threads, each at its ceiling, do twice the work of one in the same time.
        (row(10.0, flops=2e9, parallel=2.0), "compute"),
    ],
)
def test_each_operator_goes_to_the_ceiling_that_explains_it(operator: Operator, limit: str) -> None:
    divided = classify(operator, SLOW_ROWS, 0.5).limits
    assert max(divided, key=lambda name: divided[name]) == limit
    assert sum(divided.values()) == pytest.approx(operator.ms)


def test_data_beyond_all_caches_shows_that_a_ceiling_is_too_low() -> None:
    divided = classify(row(1.0, "aten::_fused_adamw_", bytes=3e8, memory_bytes=3e8), CEILINGS, 0.5)
    assert divided.limits.keys() == {"dispatch", "bandwidth"}
    assert "the ceiling is too low: the fastest measured stream takes 15.0 times as long" in divided.note
    step = step_of(row(1.0, bytes=3e8, memory_bytes=3e8))
    sentence = decide(attribute(step, CEILINGS), step, CEILINGS).because[0]
    assert sentence.endswith("at 300 GB/s where this machine streams 20 GB/s; the ceiling is too low.")


def test_only_a_precision_that_was_measured_to_be_faster_is_named() -> None:
    slow = replace(CEILINGS, flops={"float32": 1.73e11, "bfloat16": 5e10, "float64": 2e11})
    assert (CEILINGS.faster("float32"), slow.faster("float32"), slow.faster("bfloat16")) == (["bfloat16"], [], [])
    for ceilings, clause in (
        (CEILINGS, "with 2 threads, 200 GFLOP/s in bfloat16."),
        (slow, "no more in a lower precision."),
    ):
        step = step_of(row(10.0, "aten::mm", flops=8e8), ms=10.0)
        assert decide(attribute(step, ceilings), step, ceilings).because[0].endswith(clause)


def test_random_rows_are_latency_or_bandwidth_by_the_measured_widths() -> None:
    """100 ns a row whatever its width and 0.1 ns a byte: half of the time of rows of 1,000 bytes follows the bytes."""
    widths = replace(CEILINGS, rows_memory=tuple((size, 100 + 0.1 * size) for size in (64, 256, 1000, 4000)))
    assert [widths.latency_share(size) for size in (64, 1000, 4000)] == pytest.approx([100 / 106.4, 0.5, 0.2])
    call = 0.5 * CEILINGS.calls["index"] / 1e6
    rows = row(20.0 + call, "aten::embedding", rows=100_000, memory_rows=100_000, row_bytes=1000, bytes=1e8)
    # 14 ms: prefetched; an implementation can hide latency, but it moves all bytes.
    for ms, latency, bandwidth in ((20.0, 10, 10), (30.0, 15, 15), (14.0, 4, 10)):
        divided = classify(changed(rows, ms=ms + call), widths, 0.5).limits
        assert (divided["latency"], divided["bandwidth"]) == (pytest.approx(latency), pytest.approx(bandwidth))
    step = step_of(changed(rows, row_bytes=4000, ms=50.0), ms=50.0)
    result = attribute(step, widths)
    assert result.random == pytest.approx(result.shares["latency"] + result.shares["bandwidth"])
    assert replace(CEILINGS, rows_memory=((64, 50.0),)).latency_share(1024) == 1.0
    verdict = decide(result, step, widths)
    assert verdict.limit == "bandwidth"
    assert "(memory: 500 ns, of which 100 ns whatever the width and 400 ns for the bytes)" in verdict.because[0]


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_a_limit_is_declared_completely(limit: Limit) -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    assert f"- `{limit.name}`: {limit.meaning}\n" in page
    assert svg_file(1, 1, "", "").count(f"--{limit.colour}: #") == 2, "in the light and in the dark style"
    assert [one.name for one in LIMITS.values() if one.colour == limit.colour] == [limit.name]
    for sentence in filter(None, (limit.sentence, limit.native)):
        text = sentence.format(share="50 %", detail=": 1 ms of 2 ms", modules="numpy")
        assert "50 %" in text
        assert ": 1 ms of 2 ms" in text
    low, high = limit.twice_batch
    assert 1 <= low <= high


def test_the_page_lists_the_limits_in_their_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    assert re.findall(r"^- `(\w+)`: ", page, re.MULTILINE) == list(LIMITS)
