"""The record of a profile: the same for a step, a loop, a program, a trace and a workload. It is what --json prints.
Torch-free.
"""

from __future__ import annotations

from typing import Any

from ..jsonfile import Count, Number, as_json
from .attribution import attribute
from .ceilings import ceilings_of_profile
from .peaks.records import Peaks
from .profile_records import Profile, WorkloadFigures
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
from .rows import place_rows
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
    preempted: Number | None = None
    """Share of the time in which the thread of the steps waited for a core."""
    trace: TraceAnalysis | None = None
    """The tables of the trace, where one was analysed."""
    workload: WorkloadFigures | None = None
    """The other sections of the profile of a workload."""


def of_workload(profile: Profile, peaks: Peaks | None, machine: dict[str, Any] | None) -> StepProfile:
    """The profile of a workload as that of any step, with the machine and the ceilings that other files have."""
    observed, ceilings = profile.observed, ceilings_of_profile(profile, peaks)
    figures = {name: getattr(profile, name) for name in WorkloadFigures.__struct_fields__}
    advice = profile.advice if isinstance(profile.advice, list) else []
    # Advice that was given stands in the report itself, the reason why there is none in its section.
    figures["advice"] = [] if isinstance(profile.advice, list) else profile.advice
    return StepProfile(
        kind=KIND,
        schema=SCHEMA,
        verdict=profile.verdict,
        shares=profile.shares,
        operators=attribute(observed, ceilings).operators,
        places=place_rows([], profile.shares, observed),
        advice=advice,
        step_ms=observed.step_ms,
        notes=observed.notes,
        timeline=observed.timeline,
        parts=observed.parts,
        native=observed.native,
        sampling=observed.sampling,
        experiments=profile.experiments,
        waits=observed.waits,
        steps=observed.steps or ObservedSteps(0, 0, 0),
        device=profile.device,
        threads=profile.threads,
        other_work=profile.other_work,
        overhead=observed.overhead or TimingCost(0.0, 0.0),
        machine=machine or {},
        ceilings=as_json(ceilings),
        own_cpu_s=0.0,
        preempted=observed.preempted,
        workload=WorkloadFigures(**figures),
    )
