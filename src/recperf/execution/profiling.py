"""Profiles a workload: a window of measured steps with tables from their trace, and fixes. A sweep measures such a
window at every combination of several config values."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..config import to_json
from ..distributed.ranks import current
from ..distributed.shares import own_part
from ..machine import machine_facts
from ..measure import limits
from ..measure.experiments import SECONDS
from ..measure.observing import Observer
from ..measure.peaks.records import Peaks
from ..measure.profile import StepProfile, swept_ms
from ..measure.profile_records import (
    Communication,
    Idle,
    Kernels,
    MeasuringCost,
    Missing,
    SavedTrace,
    Trust,
    WorkloadFigures,
)
from ..measure.trace.records import StepTables
from ..runs.record import packages
from ..train.device import applied
from .clocked_steps import endless
from .fixes import try_fixes
from .measuring import STEPS, advise, measure_window, require_threads, tables_of
from .workload import Trial, Workload

TABLES_LATER = 3000
"""Epochs after training whose batches nothing else in a profile uses."""
NOT_TRACED = "no step was traced"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What to measure beside the step budget."""

    try_fixes: bool = False
    trace: Path | None = None
    """Where to save the trace of this rank."""
    steps: int = STEPS
    confirm: float = SECONDS
    """Time limit in seconds of the experiments that confirm the verdict; 0: none."""
    run: str = ""
    """Identifies the traces of the ranks of this profile."""


def profile(
    workload: Workload, config: Any, peaks: Peaks | None, options: ProfileOptions, say: Callable[[str], None]
) -> StepProfile:
    """Measure everything.

    All ranks measure and record the same steps. Figures about a single rank are those of the slowest one.
    """
    world = current()
    prepared = workload.prepare(config)
    with applied(prepared.settings):
        trial = prepared.trial(config.seed)
        if peaks is not None:
            require_threads(peaks, say)
        measured = measure_window(prepared, trial, peaks, steps=options.steps, confirm=options.confirm, run=options.run)
        profile, figures = measured.profile, measured.figures
        slowest = figures.communication.slowest if figures.communication else 0
        traced: StepTables | None = world.broadcast(tables_of(measured.observer), slowest)
        trace = world.broadcast(_save_trace(measured.observer, options.trace), slowest)
        touched = world.broadcast(_touched(trial), slowest)
        tables = trial.tables()
    figures.name, figures.switches = workload.name, dict(prepared.settings.reasons)
    profile.kernels = traced.kernels if traced else Kernels(missing=NOT_TRACED)
    profile.idle = traced.idle if traced else Idle(missing=NOT_TRACED)
    profile.transfers = traced.transfers if traced else Missing(NOT_TRACED)
    figures.roofline = limits.roofline(figures, peaks)
    figures.embeddings = limits.embeddings(figures.ids.row_bytes, tables, touched)
    figures.communication = figures.communication or Communication(missing="one rank")
    figures.trace, figures.trust = trace, _trust(figures, config, traced)
    del trial
    ranked = advise(prepared, measured, peaks)
    if options.try_fixes and ranked and peaks is not None:
        profile.advice = try_fixes(workload, config, measured, ranked, peaks, say)
    return profile


def _save_trace(observer: Observer | None, path: Path | None) -> SavedTrace | None:
    if path is None or observer is None or observer.recording is None:
        return None
    return SavedTrace(path.name, observer.recording.save(path), len(observer.traced))


def _touched(trial: Trial) -> list[torch.Tensor]:
    """The rows that four batches look up."""
    batches = endless(trial.recipe.order, trial.recipe.epochs + TABLES_LATER)
    return [trial.rows_of(own_part(batch)).cpu() for batch in islice(batches, 4)]


def _trust(figures: WorkloadFigures, config: Any, traced: StepTables | None) -> Trust:
    plain, traced_ms = figures.overhead.plain_ms, traced.window.wall_ms if traced else 0.0
    return Trust(
        tracing=MeasuringCost(plain, traced_ms, traced_ms / plain - 1) if traced else None,
        seed=config.seed,
        versions={**packages(), "cuda": torch.version.cuda},
        clocks=_clocks() if figures.device != "cpu" else None,
    )


def _clocks() -> dict[str, float] | None:
    """Current clocks and power of the GPU from nvidia-smi; None if it does not report them."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        sm, memory, power = (float(field) for field in output.splitlines()[0].split(","))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None
    return {"sm_mhz": sm, "mem_mhz": memory, "power_w": power}


SWEPT_STEPS = 24


def sweep(
    workload: Workload,
    points: list[tuple[dict[str, str], Any]],
    peaks: Peaks | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure a window of steps at each point, without training: settings, step time and its parts."""
    rows = []
    for settings, config in points:
        say("  ".join(f"{name} {value}" for name, value in settings.items()))
        prepared = workload.prepare(config)
        with applied(prepared.settings):
            trial = prepared.trial(config.seed)
            profile = measure_window(prepared, trial, peaks, steps=SWEPT_STEPS).profile
        del trial
        rows.append({"settings": settings, "config": to_json(config), "profile": profile})
    parts = shown_parts([row["profile"] for row in rows])
    facts = {"schema": 3, "workload": workload.name, "machine": machine_facts(), "parts": parts}
    return {**facts, "rows": rows, "fits": fits(rows, parts)}


def shown_parts(profiles: list[StepProfile]) -> list[str]:
    """The step, and its lookups or, in a workload that names no part so, the largest part of all profiles."""
    figures = [profile.workload for profile in profiles if profile.workload is not None]
    names = set.intersection(*({part.name for part in one.components} for one in figures))
    if "embedding" in names or not names:
        return ["step", *(names & {"embedding"})]
    return ["step", max(names, key=lambda name: sum(swept_ms(profile, name).p50 for profile in profiles))]


def fits(rows: list[dict[str, Any]], parts: list[str]) -> list[dict[str, Any]]:
    """The least-squares line through each part's median where one numeric field was swept, and its r2."""
    names, lines = list(rows[0]["settings"]), []
    try:
        x = [float(row["settings"][names[0]]) for row in rows]
    except ValueError:
        return []
    if len(names) != 1 or len(set(x)) < 3:
        return []
    for part in parts:
        y = [swept_ms(row["profile"], part).p50 for row in rows]
        slope, intercept = statistics.linear_regression(x, y)
        r2 = statistics.correlation(x, y) ** 2 if len(set(y)) > 1 else 1.0
        lines.append({"field": names[0], "part": part, "slope_ms": slope, "intercept_ms": intercept, "r2": r2})
    return lines
