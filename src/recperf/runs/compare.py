"""Compares two profiles or two traces by step, part, operator and kernel, and tells whether a gate is exceeded.

A difference counts only if the ranges from p20 to p80 over the steps do not overlap. A time without such a range, as
that of a kernel in a profile, explains a difference but never exceeds a gate.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ConfigValues
from ..errors import DataError, UsageError
from ..jsonfile import Struct
from ..measure.limits import TEXTS
from ..measure.profile_records import Profile, Trust
from ..measure.records import StepProfile
from . import step_report
from .evidence import kind_of
from .record import read_config
from .report.compare import changed_fields
from .report.formats import percent, printable
from .report.step_sections import why_missing
from .schemas import Machine, read_file

GATED = ("parts", "regions")
"""The groups that are held to the gate, beside the step itself."""
GATED_SHARE = 0.05
"""A part smaller than this on both sides is not held to the gate."""
NOTICED_SHARE = 0.01
"""A limit whose share is smaller on both sides is not shown."""
FEW_STEPS = 8
"""With fewer steps than this, the spread says little."""
NO_SPREAD = 3
"""With fewer steps than this there is no spread."""


class Time(Struct):
    """Milliseconds per step; p20 and p80 over the steps are None if they are not known."""

    p50: float
    p20: float | None = None
    p80: float | None = None


class TimeChange(Struct):
    """The time of one part of a step on both sides; None if a side does not have it."""

    name: str
    old_ms: Time | None
    new_ms: Time | None
    share: float
    """Share of its step, the larger of the two."""
    difference_ms: float
    change: float | None
    """How much more time it takes: 0.1 is a tenth more. None if a side does not have it or took no time."""
    says: str
    """slower, faster, same, within noise, no spread, new or gone."""
    old_count: float | None = None
    new_count: float | None = None
    """Calls per step, where they are counted."""

    def beyond(self, gate: float) -> bool:
        """Whether it is slower by more than the gate, beyond noise."""
        if self.share < GATED_SHARE or self.says != "slower":
            return False
        # A part that took no time before exceeds every gate.
        return self.change is None or self.change > gate

    @property
    def text(self) -> str:
        if self.change is None:
            return self.says
        return f"{'+' if self.change >= 0 else '-'}{percent(abs(self.change), 1)}"


class Comparison(Struct):
    """The changes from the first of two profiles or traces to the second."""

    files: tuple[str, str]
    warnings: list[str]
    """Differences that make the two incomparable: device, workload, batch size."""
    notes: list[str]
    """Other differences, each of which may cause a change or hide it."""
    step: TimeChange
    groups: dict[str, list[TimeChange]]
    """Parts or regions, operators, kernels; in each the largest change in time first."""
    missing: dict[str, str]
    """Groups that are not compared, and why."""
    limits: tuple[str | None, str | None]
    """What limits the step on each side."""
    shares: dict[str, tuple[float, float]]
    """Share of the step by limit on both sides, the largest first."""

    def regressions(self, gate: float) -> list[TimeChange]:
        gated = (change for name in GATED for change in self.groups.get(name, ()))
        return [change for change in (self.step, *gated) if change.beyond(gate)]


@dataclass(kw_only=True)
class TimedPart:
    time: Time
    share: float
    count: float | None = None


@dataclass(kw_only=True)
class Side:
    """One of the two, as far as a comparison reads it."""

    path: Path
    steps: int
    step: Time
    groups: dict[str, dict[str, TimedPart]]
    missing: dict[str, str] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    """What must be equal for a fair comparison."""
    circumstances: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What may explain a difference, by kind."""
    notes: list[str] = field(default_factory=list)
    limit: str | None = None
    shares: dict[str, float] = field(default_factory=dict)


def load(path: Path) -> Side:
    """A trace, a profile or the folder that holds one, validated as far as a comparison reads it."""
    if kind_of(path) == "trace":
        return load_trace(path)
    file = path / "profile.json" if path.is_dir() else path
    if not file.exists():
        what, fix = "no profile there: profile.json is missing", "recperf profile WORKLOAD writes one"
        raise DataError(what, where={"file": file}, fix=f"{fix}, and so does recperf run")
    profile = step_report.load_any(file)
    return of_workload(file, profile) if isinstance(profile, Profile) else of_program(file, profile)


def of_workload(file: Path, profile: Profile) -> Side:
    """A profile of recperf profile WORKLOAD or of recperf run."""
    workload, config, machine = _about(file.parent)
    absent, trust = why_missing(profile, "kernels"), profile.trust or Trust()
    step = _time(profile.step_ms)
    parts = {part.name: TimedPart(time=_time(part.ms), share=part.share) for part in profile.components}
    named = [(row.name, row.total_ms, row.count) for row in (profile.kernels.rows if profile.kernels else [])]
    return Side(
        path=file,
        steps=profile.steps,
        step=step,
        groups={"parts": parts, "kernels": _added_up(named, step)},
        missing={"kernels": absent} if absent else {},
        identity={
            "workloads": profile.workload or workload,
            "presets": profile.preset,
            "devices": profile.device,
            "batch sizes": profile.batch_size,
        },
        circumstances={
            "": {"machine": machine, "threads": profile.threads, "seed": trust.seed},
            "version of ": trust.versions,
            # Without the reason after the colon.
            "switch ": {name: value.split(":")[0] for name, value in profile.switches.items()},
            "config ": config,
        },
        limit=printable(profile.verdict.limit),
        shares=profile.shares,
    )  # fmt: skip


def of_program(file: Path, profile: StepProfile) -> Side:
    """A profile of recperf profile --script or of the Python API, whose operators have no spread."""
    step = _time(profile.step_ms)
    named = [(row.name, row.ms, row.calls) for row in profile.operators]
    return Side(
        path=file,
        steps=profile.steps.plain,
        step=step,
        groups={"operators": _added_up(named, step)},
        identity={"devices": profile.device},
        circumstances={"": {"machine": profile.machine.get("fingerprint"), "threads": profile.threads},
                       "version of ": {"torch": profile.machine.get("torch")}},
        limit=printable(profile.verdict.limit),
        shares=profile.shares,
    )  # fmt: skip


def load_trace(path: Path) -> Side:
    from ..measure.trace.analyse import timed_file

    trace = timed_file(path)
    step = _time_over(trace.steps)
    groups = {
        kind: {name: TimedPart(time=_time_over(times), share=_time_over(times).p50 / (step.p50 or 1.0))
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


def compare(old: Side, new: Side) -> Comparison:
    """The changes from the first to the second."""
    missing = {
        group: f"not measured in {printable(side.path)}: {why}"
        for side in (new, old)
        for group, why in side.missing.items()
    }
    groups = {}
    for group in (name for name in old.groups if name in new.groups and name not in missing):
        before, after = old.groups[group], new.groups[group]
        rows = [changed(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])]
        groups[group] = sorted(rows, key=lambda row: -abs(row.difference_ms))
    if not groups:
        what, fix = "these two have nothing in common to compare", "name two runs, two profiles or two traces"
        raise UsageError(what, where={"one": old.path, "other": new.path}, fix=fix)
    both = {limit: (old.shares.get(limit, 0.0), new.shares.get(limit, 0.0)) for limit in TEXTS}
    noticed = [limit for limit, values in both.items() if max(values) >= NOTICED_SHARE and old.shares and new.shares]
    return Comparison(
        files=(printable(old.path), printable(new.path)),
        warnings=[
            f"different {what}: {_named(one)} and {_named(new.identity[what])}; the two measure different things"
            for what, one in old.identity.items()
            if what in new.identity and one != new.identity[what] and None not in (one, new.identity[what])
        ],
        notes=_notes(old, new),
        step=changed("step", TimedPart(time=old.step, share=1.0), TimedPart(time=new.step, share=1.0)),
        groups=groups,
        missing=missing,
        limits=(old.limit, new.limit),
        shares={limit: both[limit] for limit in sorted(noticed, key=lambda limit: -max(both[limit]))},
    )


def changed(name: str, old: TimedPart | None, new: TimedPart | None) -> TimeChange:
    before, after = (side.time if side else None for side in (old, new))
    more = (after.p50 if after else 0.0) - (before.p50 if before else 0.0)
    ratio = more / before.p50 if before and after and before.p50 else 0.0 if before and after and not more else None
    return TimeChange(
        name=printable(name),
        old_ms=before,
        new_ms=after,
        share=max(side.share for side in (old, new) if side),
        difference_ms=more,
        change=ratio if ratio is not None and math.isfinite(ratio) else None,
        says=_says(before, after),
        old_count=old.count if old else None,
        new_count=new.count if new else None,
    )


def _says(old: Time | None, new: Time | None) -> str:
    if old is None or new is None:
        return "new" if new else "gone"
    if old == new:
        return "same"
    if old.p20 is None or old.p80 is None or new.p20 is None or new.p80 is None:
        return "no spread"
    if new.p20 <= old.p80 and new.p80 >= old.p20:
        return "within noise"
    return "slower" if new.p50 > old.p50 else "faster"


def _notes(old: Side, new: Side) -> list[str]:
    notes = []
    for kind, before in old.circumstances.items():
        after = new.circumstances.get(kind)
        if not before or not after:
            continue
        for name, (one, other) in changed_fields([before, after]).items():
            # What only one side records is no difference, except for a switch or a package that only one has.
            if kind or None not in (one, other):
                notes.append(f"{kind}{printable(name)}: {_named(one)}, then {_named(other)}")
    if old.steps != new.steps and "regions" in old.groups:
        notes.append(f"different numbers of steps: {old.steps:,} and {new.steps:,}; all times are per step")
    for side in (old, new):
        if side.step.p20 is None:
            few = f"fewer than {NO_SPREAD} steps have no spread, so every difference may be noise"
            notes.append(f"{printable(side.path)}: {few}")
        elif side.steps < FEW_STEPS:
            notes.append(f"{printable(side.path)} has only {side.steps} steps, so its spread says little")
        notes += side.notes
    if old.path.resolve() == new.path.resolve():
        notes.append("it is compared with itself")
    return notes


def parse_gate(text: str) -> float:
    """`5%` as 0.05."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", text, re.ASCII)
    if not match:
        raise UsageError(f"--gate takes a percentage such as 5%, not {printable(text)[:40]!r}", fix="--gate 5%")
    return float(match[1]) / 100


def _about(folder: Path) -> tuple[str | None, ConfigValues, str | None]:
    """Workload, config and machine of a profile. They only explain differences, so a damaged file counts as missing."""
    workload: str | None = None
    config: ConfigValues = {}
    machine: str | None = None
    with suppress(DataError):
        workload, config = read_config(folder)
    with suppress(DataError):
        machine = read_file(folder / "machine.json", Machine).fingerprint
    return workload, config, machine


def _time(ms: Any) -> Time:
    return Time(p20=float(ms.p20), p50=float(ms.p50), p80=float(ms.p80))


def _time_over(times: list[float]) -> Time:
    """p20, p50 and p80 over the steps. Work that most steps do not have is compared by its mean."""
    if len(times) < NO_SPREAD:
        return Time(p50=statistics.fmean(times))
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return Time(p20=cuts[1], p50=cuts[4] or statistics.fmean(times), p80=max(cuts[7], cuts[4]))


def _added_up(rows: Iterable[tuple[str, float, float | None]], step: Time) -> dict[str, TimedPart]:
    """Times and counts by name; the same name may have several rows."""
    sums: dict[str, TimedPart] = {}
    for name, ms, count in rows:
        before = sums.setdefault(printable(name), TimedPart(time=Time(p50=0.0), share=0.0, count=0.0))
        total = before.time.p50 + float(ms)
        sums[printable(name)] = TimedPart(
            time=Time(p50=total), share=total / (step.p50 or 1.0), count=(before.count or 0.0) + float(count or 0.0)
        )
    return sums


def _named(value: Any) -> str:
    return "none" if value is None else printable(value)[:60]
