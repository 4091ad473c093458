"""Compares two runs, profiles or traces: config, quality, and times by step, part, operator and kernel.

A difference in time counts only if the ranges from p20 to p80 over the steps do not overlap. A time without such a
range, as that of a kernel in a profile, explains a difference but never exceeds a gate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from msgspec import field

from ..config import ConfigValues, flatten
from ..errors import UsageError
from ..jsonfile import Struct
from ..measure.limit_kinds import LIMITS
from ..measure.records import Percentiles
from .evidence import Evidence
from .paired import differences
from .report.formats import percent, place, plus_minus, printable
from .result import Difference, Result, Target
from .sides import NO_SPREAD, Side, TimedPart

GATED = ("parts", "regions")
"""The groups that are held to the gate, beside the step itself."""
GATED_SHARE = 0.05
"""A part smaller than this on both sides is not held to the gate."""
NOTICED_SHARE = 0.01
"""A limit whose share is smaller on both sides is not shown."""
FEW_STEPS = 8
"""With fewer steps than this, the spread says little."""
HELD_OUT = ("data.holdout", "data.split_seed")
"""Fields of configs that decide which rows of a dataset are scored."""
BEYOND_CHANCE = 2.0
"""A difference in quality counts if it exceeds this many standard deviations of the seeds."""


class TimeChange(Struct):
    """The milliseconds of one part of a step on both sides; None if a side does not have it."""

    name: str
    old_ms: Percentiles | None
    new_ms: Percentiles | None
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

    def exceeds(self, gate: float) -> bool:
        """Whether it is slower by more than the gate and than noise."""
        if self.share < GATED_SHARE or self.says != "slower":
            return False
        # A part that took no time before exceeds every gate.
        return self.change is None or self.change > gate

    @property
    def text(self) -> str:
        if self.change is None:
            return self.says
        return f"{'+' if self.change >= 0 else '-'}{percent(abs(self.change), 1)}"


class MetricChange(Struct):
    old: float | bool | None
    new: float | bool | None
    remark: str = ""
    """Whether the difference may be chance."""


class Comparison(Struct):
    """The changes from the first of two runs, profiles or traces to the second."""

    names: tuple[str, str]
    warnings: list[str]
    """Differences that make the two incomparable: device, workload, batch size."""
    notes: list[str]
    """Other differences, each of which may cause a change or hide it."""
    config: dict[str, tuple[Any, Any]]
    """Fields that differ; None where a side lacks one."""
    comparable: bool
    """Whether both are runs whose quality was measured on the same rows."""
    quality: dict[str, MetricChange]
    """Empty unless both are runs."""
    samples_per_s: tuple[float | None, float | None]
    """Steady throughput of runs."""
    step: TimeChange
    groups: dict[str, list[TimeChange]]
    """Parts or regions, operators, kernels; in each the largest change in time first."""
    missing: dict[str, str]
    """Groups that are not compared, and why."""
    limits: tuple[str | None, str | None]
    """What limits the step on each side."""
    shares: dict[str, tuple[float, float]]
    """Share of the step by limit on both sides, the largest first."""
    task: str = ""
    """What both runs predict, or the second; empty unless both are runs."""
    paired: list[Difference] = field(default_factory=list)
    """The second less the first, on the rows and users of both; their intervals are of bootstrap samples."""
    training_s: tuple[float | None, float | None] = (None, None)
    """The whole training of runs."""
    same_model: bool = True
    """Whether times are those of one model: others are not compared."""

    def regressions(self, gate: float) -> list[TimeChange]:
        gated = (change for name in GATED for change in self.groups.get(name, ()))
        return [change for change in (self.step, *gated) if change.exceeds(gate)]


def compare(old: Side, new: Side) -> Comparison:
    """The changes from the first to the second."""
    missing = {
        group: f"not measured in {printable(side.path)}: {why}"
        for side in (new, old)
        for group, why in side.missing.items()
    }
    groups = {}
    same_model = old.identity.get("workloads") == new.identity.get("workloads") or not (old.run and new.run)
    for group in (name for name in old.groups if name in new.groups and name not in missing and same_model):
        before, after = old.groups[group], new.groups[group]
        rows = [changed(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])]
        groups[group] = sorted(rows, key=lambda row: -abs(row.difference_ms))
    results = [side.run.result for side in (old, new) if side.run]
    paired = differences(old.run, new.run) if old.run and new.run and _dataset(old.run) == _dataset(new.run) else []
    if not groups and len(results) < 2:
        what, fix = "these two have nothing in common to compare", "name two runs, two profiles or two traces"
        raise UsageError(what, where={"one": old.path, "other": new.path}, fix=fix)
    comparable = len(results) == 2 and (_scored_rows(old) == _scored_rows(new) or bool(paired))
    both = {limit: (old.shares.get(limit, 0.0), new.shares.get(limit, 0.0)) for limit in LIMITS}
    noticed = [limit for limit, values in both.items() if max(values) >= NOTICED_SHARE and old.shares and new.shares]
    warnings = [
        f"different {what}: {_named(one)} and {_named(new.identity[what])}; the two measure different things"
        for what, one in old.identity.items()
        if what in new.identity
        and one != new.identity[what]
        and None not in (one, new.identity[what])
        and (same_model or what == "devices")
    ]
    if len(results) == 2 and not comparable:
        warnings.append("different task, data or split: quality is not comparable")
    rates = [steady.samples_per_s if (steady := one.performance.steady) else None for one in results]
    steps = (TimedPart(ms=side.step, share=1.0) if side.step else None for side in (old, new))
    return Comparison(
        names=(old.name, new.name),
        warnings=warnings,
        notes=_notes(old, new),
        config=changed_fields(old.config, new.config) if old.config and new.config else {},
        comparable=comparable,
        quality=_quality(old.run, new.run, paired) if old.run and new.run else {},
        samples_per_s=(rates[0], rates[1]) if len(rates) == 2 else (None, None),
        step=changed("step", *steps) if same_model else _uncompared(*steps),
        groups=groups,
        missing=missing,
        limits=(old.limit, new.limit),
        shares={limit: both[limit] for limit in sorted(noticed, key=lambda limit: -max(both[limit]))},
        task=results[1].task if len(results) == 2 else "",
        paired=paired,
        training_s=_training_s(results) if len(results) == 2 else (None, None),
        same_model=same_model,
    )


def _training_s(results: list[Result]) -> tuple[float | None, float | None]:
    old, new = (one.performance.overall.seconds if one.performance.overall else None for one in results)
    return old, new


def _dataset(run: Evidence) -> str:
    """The digest of the data that a run was trained on; of rows that were made of events, that of the events."""
    data = run.result.data
    return data.held_out.data if data.held_out else data.digest


def _scored_rows(side: Side) -> tuple[Any, ...]:
    """What decides on which rows a run was scored."""
    assert side.run
    data, fields = side.run.result.data, flatten(side.run.config.config)
    if data.held_out is not None:
        return side.run.result.task, data.digest, data.held_out.digest, data.valid_rows
    return side.run.result.task, data.digest, data.split, data.valid_rows, *(fields.get(name) for name in HELD_OUT)


def _quality(old: Evidence, new: Evidence, paired: Sequence[Difference] = ()) -> dict[str, MetricChange]:
    """The metrics of both. Where both were scored on the same rows or users, the difference has an interval; elsewhere
    it is held against the spread of the seeds."""
    one, other = old.result.quality, new.result.quality
    rows: dict[str, MetricChange] = {}
    for name in dict.fromkeys([*one.metrics, *other.metrics]):
        before, after = one.metrics.get(name), other.metrics.get(name)
        rows[name], spreads = MetricChange(before, after), (one.spread.get(name), other.spread.get(name))
        if before is None or after is None or before == after:
            continue
        if spreads[0] is None or spreads[1] is None:
            rows[name].remark = "one seed: may be chance"
        else:
            clear = abs(after - before) > BEYOND_CHANCE * math.hypot(spreads[0], spreads[1])
            rows[name].remark = f"{'beyond' if clear else 'within'} the seeds' spread"
    for row in paired:
        known = rows.get(row.metric)
        if known is None or None in (known.old, known.new):
            # Of a ranking beside labels, over the users of both.
            known = rows[row.metric] = MetricChange(row.values[1], row.values[0])
        known.remark = f"{plus_minus(row.difference, row)}, {place(row)}"
    # Without a bound there is no target to meet.
    none = Target(beat=None, accuracy=None, auc=None)
    met = [part.met if part.target != none else None for part in (one, other)]
    return {**rows, "target met": MetricChange(met[0], met[1])}


def changed(name: str, old: TimedPart | None, new: TimedPart | None) -> TimeChange:
    before, after = (side.ms if side else None for side in (old, new))
    more = (after.p50 if after else 0.0) - (before.p50 if before else 0.0)
    ratio = more / before.p50 if before and after and before.p50 else 0.0 if before and after and not more else None
    return TimeChange(
        name=printable(name),
        old_ms=before,
        new_ms=after,
        share=max((side.share for side in (old, new) if side), default=0.0),
        difference_ms=more,
        change=ratio if ratio is not None and math.isfinite(ratio) else None,
        says=_says(before, after),
        old_count=old.count if old else None,
        new_count=new.count if new else None,
    )


def _uncompared(old: TimedPart | None, new: TimedPart | None) -> TimeChange:
    """The steps of different models, of which neither is the slower one."""
    before, after = (side.ms if side else None for side in (old, new))
    more = (after.p50 if after else 0.0) - (before.p50 if before else 0.0)
    return TimeChange("step", before, after, share=1.0, difference_ms=more, change=None, says="another model")


def has_spread(ms: Percentiles) -> bool:
    """Whether the spread is known; work that takes no time has none."""
    return ms.p20 < ms.p80 or not ms.p50


def _says(old: Percentiles | None, new: Percentiles | None) -> str:
    if old is None or new is None:
        return "new" if new else "gone" if old else "not measured"
    if old == new:
        return "same"
    if not has_spread(old) or not has_spread(new):
        return "no spread"
    if new.p20 <= old.p80 and new.p80 >= old.p20:
        return "within noise"
    return "slower" if new.p50 > old.p50 else "faster"


def changed_fields(old: ConfigValues, new: ConfigValues) -> dict[str, tuple[Any, Any]]:
    """The fields that differ; a field that one lacks is None."""
    one, other = flatten(old), flatten(new)
    pairs = {name: (one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other])}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _notes(old: Side, new: Side) -> list[str]:
    notes = []
    for kind, before in old.circumstances.items():
        after = new.circumstances.get(kind)
        if not before or not after:
            continue
        for name, (one, other) in changed_fields(before, after).items():
            # What only one side records is no difference, except for a switch or a package that only one has.
            if kind or None not in (one, other):
                notes.append(f"{kind}{printable(name)}: {_named(one)}, then {_named(other)}")
    if old.steps != new.steps and "regions" in old.groups:
        notes.append(f"different numbers of steps: {old.steps:,} and {new.steps:,}; all times are per step")
    for side in (old, new):
        if side.step and not has_spread(side.step):
            few = f"fewer than {NO_SPREAD} steps have no spread, so every difference may be noise"
            notes.append(f"{printable(side.path)}: {few}")
        elif side.step and side.steps < FEW_STEPS:
            notes.append(f"{printable(side.path)} has only {side.steps} steps, so its spread says little")
        notes += side.notes
    if old.path.resolve() == new.path.resolve():
        notes.append("it is compared with itself")
    return list(dict.fromkeys(notes))


def parse_gate(text: str) -> float:
    """`5%` as 0.05."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", text, re.ASCII)
    if not match:
        raise UsageError(f"--gate takes a percentage such as 5%, not {printable(text)[:40]!r}", fix="--gate 5%")
    return float(match[1]) / 100


def _named(value: Any) -> str:
    return "none" if value is None else printable(value)[:60]
