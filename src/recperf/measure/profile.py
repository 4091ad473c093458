"""The record of a profile: the same for a step, a loop, a program and a trace, printed by --json and kept in files.
Torch-free."""

from __future__ import annotations

from typing import Any

from ..jsonfile import Count, Number
from .records import (
    Experiment,
    Explanation,
    NativeCode,
    ObservedSteps,
    PartTime,
    ProgramFacts,
    Sampling,
    TimingCost,
)
from .trace.records import TraceAnalysis

KIND = "step profile"
SCHEMA = 1


class StepProfile(Explanation, kw_only=True):
    """What limits any training step, and the figures behind that."""

    kind: str
    schema: int
    parts: list[PartTime]
    """Modules, spans and named regions with their time, largest first."""
    native: NativeCode | None = None
    sampling: Sampling | None = None
    program_facts: ProgramFacts | None = None
    experiments: list[Experiment]
    """What each experiment should have done and did."""
    waits: dict[str, Number]
    steps: ObservedSteps
    steps_trained: int | None = None
    """How many of the steps are left in weights, buffers, optimizers and random state: those on batches as they were
    drawn, in order. All that repeated a batch were undone. None: not known."""
    device: str
    threads: Count
    other_work: Number | None
    """Share of the cores that other work took."""
    overhead: TimingCost
    machine: dict[str, Any]
    ceilings: dict[str, Any] | None
    own_cpu_s: Number
    program: dict[str, Any] | None = None
    """The script and its arguments, where a program was profiled."""
    trace: TraceAnalysis | None = None
    """The tables of the trace, where one was analysed."""
