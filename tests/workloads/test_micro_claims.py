"""micro-dlrm's claim about its limit on machines that are made up: it must not depend on which machine it is."""

from __future__ import annotations

from types import SimpleNamespace

import example_runs as examples
import pytest
from msgspec import convert
from msgspec.structs import replace

from recperf.measure.limits import verdict_of
from recperf.measure.operators import kind_of_call
from recperf.measure.peaks.records import Peaks
from recperf.measure.profile_records import Profile
from recperf.measure.records import Observed, Operator, Percentiles
from recperf.runs.contract import Finding, judge
from recperf.workloads.micro_dlrm.config import claims, default

KIB, MIB = 1 << 10, 1 << 20
INSIDE = 0.65
OPERATORS = (
    ("aten::addmm", 5, 200_000, 1_200_000),
    ("aten::mm", 9, 400_000, 2_400_000),
    ("aten::index_select", 3, 160_000, 0),
    ("aten::index_add_", 1, 80_000, 0),
    ("aten::_fused_adamw_", 1, 680_000, 0),
    ("aten::binary_cross_entropy_with_logits", 1, 2_000, 0),
    ("aten::relu_", 8, 260_000, 0),
    ("aten::threshold_backward", 5, 150_000, 0),
    ("aten::sum", 5, 60_000, 0),
    ("aten::t", 14, 0, 0),
)
"""A step of the default config: name, calls, bytes and FLOPs."""


def figure(value: float) -> dict[str, float]:
    return {"p20": 0.95 * value, "p50": value, "p80": 1.05 * value, "n": 9}


def machine(*, l2: int, l3: int, knee: int, call_ns: float, gflops: float, cached: float, stream: float) -> Peaks:
    """Rates in GB/s."""
    kinds = ("elementwise", "view", "product", "reduction", "index")
    rows = {
        name: {"table_bytes": 1, "rows": [{"row_bytes": 64, "ns": figure(ns)}]}
        for name, ns in (("dram", 100.0), ("cache", 8.0))
    }
    content = {
        **examples.peaks(),
        "machine": {"caches": {"L2": l2, "L3": l3}, "fingerprint": "this"},
        "threads": 1,
        "other_threads": {},
        "other_work": 0.0,
        "gemm": {"float32": figure(1e9 * gflops)},
        **{name: figure(1e9 * rate) for name, rate in (("cached", cached), ("copy", 0.7 * stream), ("update", stream))},
        "read": figure(0.8e9 * stream),
        "gather": rows,
        "knee": {"bytes": knee, "points": [figure(1.0)]},
        "first_touch": figure(0.2e9 * stream),
        "calls": {kind: figure(call_ns) for kind in kinds},
    }
    return convert(content, Peaks)


MACHINES = {
    "small L2, large L3": machine(
        l2=256 * KIB, l3=300 * MIB, knee=8 * MIB, call_ns=2000, gflops=60, cached=60, stream=12
    ),
    "large L2, no L3": machine(l2=2 * MIB, l3=0, knee=1500 * KIB, call_ns=2800, gflops=35, cached=43, stream=20),
    "caches that hold less than a step": machine(
        l2=128 * KIB, l3=0, knee=100 * KIB, call_ns=4000, gflops=10, cached=20, stream=8
    ),
    "slow memory": machine(l2=MIB, l3=36 * MIB, knee=20 * MIB, call_ns=1800, gflops=80, cached=90, stream=3),
    "fast calls": machine(l2=2 * MIB, l3=64 * MIB, knee=30 * MIB, call_ns=400, gflops=150, cached=200, stream=60),
}


def operators(peaks: Peaks, slower: float) -> list[Operator]:
    """The operators of a step, each `slower` than its ceilings allow."""
    assert peaks.update is not None
    rates = {"cached": peaks.cached.p50, "update": peaks.update.p50}
    rows = []
    for name, calls, moved, flops in OPERATORS:
        beyond = moved if moved / calls > peaks.knee.bytes else 0
        work = max(flops / peaks.gemm["float32"].p50, moved / rates["update" if beyond else "cached"])
        call_ms = calls * peaks.calls["elementwise"].p50 / 1e6
        counts = {"flops": flops, "bytes": moved, "beyond": beyond, "precision": "float32"}
        ms = INSIDE * call_ms + slower * work * 1e3
        rows.append(Operator(name, None, kind_of_call(name), calls, calls, ms, **counts))
    return rows


def finding(peaks: Peaks, rows: list[Operator], vary: float = 0.02) -> Finding:
    """What the claim says about a step of these operators."""
    call_ms = peaks.calls["elementwise"].p50 / 1e6
    # Python's way to the operators, and as much again for the code of modules and the optimizer.
    python = 2 * (1 - INSIDE) * call_ms * sum(row.calls for row in rows)
    step = python + sum(row.ms for row in rows)
    spread = Percentiles((1 - vary) * step, step, (1 + vary) * step)
    profile = convert(examples.profile(threads=1, experiments=[], other_work=0.0), Profile)
    profile.observed = Observed("cpu", 1, spread, {"python": python}, rows, other_work=0.0, inside=INSIDE)
    profile.shares, profile.verdict = verdict_of(profile, peaks)
    return judge(claims(default())[1], SimpleNamespace(peaks=peaks, profile=profile))  # type: ignore[arg-type]


@pytest.mark.parametrize("slower", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("name", MACHINES)
def test_a_small_model_is_limited_by_the_processor_on_any_machine(name: str, slower: float) -> None:
    shown = finding(MACHINES[name], operators(MACHINES[name], slower))
    assert shown.holds is True, shown.detail


@pytest.mark.parametrize("name", MACHINES)
def test_it_is_not_claimed_of_a_table_in_memory(name: str) -> None:
    peaks = MACHINES[name]
    table = {"row_bytes": 64, "bytes": 12_800_000, "table_rows": 1 << 24}
    lookup = replace(operators(peaks, 1.0)[2], rows=200_000, missed=200_000, ms=20.0, **table)
    rows = [*operators(peaks, 1.0), lookup]
    assert finding(peaks, rows).holds is False
