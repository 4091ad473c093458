"""One side of a comparison: a run, a profile or a trace, as far as a comparison reads it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ConfigValues
from ..errors import DataError
from ..measure.profile import StepProfile
from ..measure.profile_records import Kernels, Trust, WorkloadFigures
from ..measure.records import Percentiles
from .evidence import SEAL, Evidence, differences, kind_of, read_profile
from .record import read_config
from .report.formats import printable
from .report.step_sections import why_missing
from .resume import change_text

NO_SPREAD = 3
"""With fewer steps than this there is no spread."""


@dataclass(kw_only=True)
class TimedPart:
    ms: Percentiles
    """All three are equal where the spread is not known."""
    share: float
    count: float | None = None


@dataclass(kw_only=True)
class Side:
    """One of the two, as far as a comparison reads it."""

    path: Path
    steps: int
    step: Percentiles | None
    groups: dict[str, dict[str, TimedPart]]
    missing: dict[str, str] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    """What must be equal for a fair comparison."""
    circumstances: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What may explain a difference, by kind."""
    config: ConfigValues = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    limit: str | None = None
    shares: dict[str, float] = field(default_factory=dict)
    run: Evidence | None = None

    @property
    def name(self) -> str:
        return self.run.short_name if self.run else printable(self.path)


def load(path: Path) -> Side:
    """A run, a trace, a profile or the folder that holds one, validated as far as a comparison reads it."""
    kind = kind_of(path)
    if kind == "trace":
        return load_trace(path)
    if kind == "run" and any((path / name).exists() for name in ("config.json", "result.json")):
        return of_run(Evidence(path))
    file = path / "profile.json" if path.is_dir() else path
    if not file.exists():
        what, fix = "no profile there: profile.json is missing", "recperf profile WORKLOAD writes one"
        raise DataError(what, where={"file": file}, fix=f"{fix}, and so does recperf run")
    return of_profile(file, read_profile(file))


def of_run(run: Evidence) -> Side:
    """A finished run: its profile where it has one, and its result."""
    performance, origin = run.result.performance, run.result.provenance
    wrong = differences(run.folder)
    for name in (SEAL, "result.json", "config.json", "profile.json", "machine.json"):
        if name in wrong:
            raise DataError(
                f"this run is not as it was when it ended: {wrong[name]}",
                where={"run": run.folder},
                fix="recperf check RUN lists what differs; restore the file, or start a new run",
            )
    side = Side(path=run.folder, steps=0, step=None, groups={}, identity={"workloads": run.workload})
    if run.profile:
        side = of_profile(run.folder / "profile.json", run.profile)
    if performance.step_ms:
        side.groups["training"] = {"step in training": TimedPart(ms=performance.step_ms, share=1.0)}
    side.identity["devices"], side.identity["tasks"] = performance.device, run.result.task
    side.circumstances[""] = side.circumstances.get("", {}) | {"machine": origin.machine, "commit": origin.commit}
    side.run, side.config = run, run.config.config
    if run.result.data.synthetic:
        side.notes.append("synthetic data: quality shows how the model learns synthetic rules, not how good it is")
    if origin.dirty:
        side.notes.append(f"{run.short_name}: the code had uncommitted changes")
    if changes := [change_text(change) for change in origin.changes]:
        side.notes.append(f"{run.short_name} changed its config when it was resumed: {'; '.join(changes)}")
    return side


def of_profile(file: Path, profile: StepProfile) -> Side:
    """A profile of a program, whose operators have no spread; that of a workload has parts with one, and kernels."""
    named = [(row.name, row.ms, row.calls) for row in profile.operators]
    side = Side(
        path=file,
        steps=profile.steps.plain or profile.steps.traced,
        step=profile.step_ms,
        groups={"operators": _added_up(named, profile.step_ms)},
        identity={"devices": profile.device},
        circumstances={"": {"machine": profile.machine.get("fingerprint"), "threads": profile.threads or None},
                       "version of ": {"torch": profile.machine.get("torch")}},
        limit=printable(profile.verdict.limit),
        shares=profile.shares,
    )  # fmt: skip
    if profile.workload is not None:
        _add_workload(side, profile.workload, profile.kernels)
    return side


def _add_workload(side: Side, figures: WorkloadFigures, kernels: Kernels | None) -> None:
    """What is compared of a workload: its steps with timers, by part, and its kernels."""
    absent, trust = why_missing(kernels), figures.trust or Trust()
    workload: str | None = None
    # It only explains differences, so a damaged file counts as missing.
    with suppress(DataError):
        workload, side.config = read_config(side.path.parent)
    named = [(row.name, row.total_ms, row.count) for row in (kernels.rows if kernels else [])]
    side.steps, side.step = figures.steps, figures.step_ms
    side.groups = {
        "parts": {part.name: TimedPart(ms=part.ms, share=part.share) for part in figures.components},
        "kernels": _added_up(named, figures.step_ms),
    }
    side.missing = {"kernels": absent} if absent else {}
    side.identity = {
        "workloads": figures.name or workload, "presets": figures.preset, **side.identity,
        "batch sizes": figures.batch_size,
    }  # fmt: skip
    side.circumstances[""]["seed"] = trust.seed
    side.circumstances["version of "] |= trust.versions
    # Without the reason after the colon.
    side.circumstances["switch "] = {name: value.split(":")[0] for name, value in figures.switches.items()}


def load_trace(path: Path) -> Side:
    from ..measure.trace.analyse import timed_file

    trace = timed_file(path)
    step = _time_over(trace.steps)
    groups = {
        kind: {name: TimedPart(ms=_time_over(times), share=_time_over(times).p50 / (step.p50 or 1.0))
               for name, times in trace.times[kind].items()}
        for kind in ("regions", "operators", "kernels")
    }  # fmt: skip
    stepless = trace.steps_from == "whole trace"
    return Side(
        path=path,
        steps=len(trace.steps),
        step=step,
        groups=groups,
        identity={"devices": trace.device, "units": "the whole trace, which has no steps" if stepless else "steps"},
        circumstances={"version of ": {"torch": trace.facts.torch, "cuda": trace.facts.cuda}},
        notes=[trace.facts.part] if trace.facts.part else [],
    )


def _time_over(times: list[float]) -> Percentiles:
    """p20, p50 and p80 over the steps. Work that most steps do not have is compared by its mean."""
    mean = statistics.fmean(times)
    if len(times) < NO_SPREAD:
        return Percentiles(mean, mean, mean)
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return Percentiles(cuts[1], cuts[4] or mean, max(cuts[7], cuts[4]))


def _added_up(rows: Iterable[tuple[str, float, float | None]], step: Percentiles) -> dict[str, TimedPart]:
    """Times and counts by name; the same name may have several rows."""
    sums: dict[str, tuple[float, float]] = {}
    for name, ms, count in rows:
        before = sums.get(printable(name), (0.0, 0.0))
        sums[printable(name)] = before[0] + ms, before[1] + (count or 0.0)
    return {
        name: TimedPart(ms=Percentiles(ms, ms, ms), share=ms / (step.p50 or 1.0), count=count)
        for name, (ms, count) in sums.items()
    }
