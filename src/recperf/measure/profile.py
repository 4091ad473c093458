"""The record of a profile, as it is passed around, written to profile.json and printed by --json: the same for a step,
a loop, a program, a trace and a workload. Torch-free.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from ..jsonfile import Count, Number, as_json
from .ceilings import Ceilings
from .learning_records import LearningReport
from .limits import part_ms
from .profile_records import Communication, Idle, Kernels, Missing, Transfer, WorkloadFigures
from .program_records import ProgramFacts
from .records import (
    Experiment,
    Explanation,
    NativeCode,
    Observed,
    ObservedSteps,
    PartTime,
    Percentiles,
    Sampling,
    TimingCost,
)
from .trace.records import TraceAnalysis

KIND = "step profile"
SCHEMA = 3


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
    own_cpu_s: Number = 0.0
    program: dict[str, Any] | None = None
    """The script and its arguments, where a program was profiled."""
    preempted: Number | None = None
    """Share of the time in which the thread of the steps waited for a core."""
    kernels: Kernels | None = None
    idle: Idle | None = None
    transfers: list[Transfer] | Missing | None = None
    """The device in traced steps, in the profile of a trace and of `recperf profile WORKLOAD`."""
    ranks: Communication | None = None
    """What the ranks of a program wait for, where several were profiled: other figures are those of the slowest."""
    learning: LearningReport | None = None
    """What keeps the program's models from learning, where --learning asked for it."""
    trace: TraceAnalysis | None = None
    """What only the profile of a trace has."""
    workload: WorkloadFigures | None = None
    """What only the profile of a workload has."""


def build_profile(
    seen: Observed,
    ceilings: Ceilings | None,
    facts: ProgramFacts | None,
    experiments: list[Experiment] | None,
    machine: dict[str, Any],
) -> StepProfile:
    """The profile of observed steps. What only its source knows, the source sets afterwards.

    `facts` are those behind advice: without them none is given. `experiments` is None where none could be run.
    """
    # Reading a profile needs no rules.
    from .advice_rules import explain

    return StepProfile(
        kind=KIND,
        schema=SCHEMA,
        **asdict(explain(seen, ceilings, facts, experiments)),
        parts=seen.parts,
        native=seen.native,
        sampling=seen.sampling,
        program_facts=facts,
        experiments=experiments or [],
        waits=seen.waits,
        steps=seen.steps or ObservedSteps(0, 0, 0),
        device=seen.device,
        threads=seen.threads,
        other_work=seen.other_work,
        overhead=seen.overhead or TimingCost(0.0, 0.0),
        machine=machine,
        ceilings=as_json(ceilings),
        preempted=seen.preempted,
    )


def swept_ms(profile: StepProfile, name: str) -> Percentiles:
    """What a sweep shows of the profile of a workload: its "step" without timers, its parts with them."""
    if name == "step" or profile.workload is None:
        return profile.step_ms
    return part_ms(profile.workload, name)
