"""Steps in round numbers for the rules of advice: what machines reach, and rows of operators that add up to a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recperf.measure.advice import AdviceFacts
from recperf.measure.ceilings import Ceilings
from recperf.measure.program_records import ProgramFacts
from recperf.measure.records import Advice, DividedOperator, Observed, Percentiles

CPU = Ceilings(
    device="cpu", threads=2, flops={"float32": 1e11}, stream=20e9, cached=50e9, first_touch=2e9, cache_bytes=1000,
    stream_cache_bytes=1_000_000, largest_cache=1_000_000, rows_memory=((64, 100.0),), rows_cache=((64, 10.0),),
    calls={"elementwise": 1000.0, "index": 2000.0, "view": 3000.0},
)  # fmt: skip
GPU = replace(CPU, device="H200", kernel_ns=4000.0, link=50e9)
HOST = replace(GPU, queue_ns=500_000.0, calls={"elementwise": 1000.0, "view": 100_000.0})
"""Queueing a kernel costs the host 0.5 ms, a call without a kernel 0.1 ms."""


def row(name: str, ms: float, limits: dict[str, float] | None = None, **more: Any) -> DividedOperator:
    known = {"kind": "elementwise", "calls": 1, "python_calls": 1, "random_ms": 0.0, "note": "", "part": None}
    return DividedOperator(name=f"aten::{name}", ms=ms, limits=limits or {"operator": ms}, **{**known, **more})


def facts_of(
    *rows: DividedOperator, ceilings: Ceilings | None = CPU, facts: ProgramFacts | None = None, step: float = 100.0,
    seen: dict[str, Any] | None = None, **waits: float,
) -> AdviceFacts:  # fmt: skip
    """What rows and waits do not explain is communication, about which no rule knows anything."""
    waits["communication"] = step - sum(one.ms for one in rows) - sum(waits.values())
    device = ceilings.device if ceilings else "cpu"
    observed = Observed(device, 2, Percentiles(step, step, step), waits, list(rows), **(seen or {}))
    return AdviceFacts(observed, list(rows), ceilings, facts or ProgramFacts(threads=2, cores=2))


def after(advice: Advice | None) -> float | None:
    """The time in ms of a step of 100 ms with the change."""
    return advice and advice.predicted_gain and 100 / advice.predicted_gain
