"""Compares runs: config, quality, step time, step budget, limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...config import flatten
from ...measure.records import Percentiles
from ..result import Target
from ..resume import change_text
from .formats import sentence
from .plots import from_profile, in_order
from .reading import Reading

BEYOND_CHANCE = 2.0
"""A difference in quality counts if it exceeds this many standard deviations of the seeds."""


@dataclass(frozen=True)
class Row:
    """One value of every run; None if a run does not have it."""

    name: str
    values: tuple[Any, ...]
    remark: str = ""
    """How large a difference is, or why it may mean nothing."""

    @property
    def differs(self) -> bool:
        return any(value != self.values[0] for value in self.values[1:])


@dataclass(frozen=True)
class Comparison:
    runs: tuple[str, ...]
    folders: tuple[str, ...]
    workloads: tuple[str, ...]
    notes: list[str] = field(default_factory=list)
    """Reasons why the runs may not be comparable."""
    config: list[Row] = field(default_factory=list)
    """Only fields that differ."""
    quality: list[Row] = field(default_factory=list)
    speed: list[Row] = field(default_factory=list)
    budget: list[Row] = field(default_factory=list)
    """Shares of a step."""
    limit: Row = Row("limit", ())

    def as_json(self) -> dict[str, Any]:
        def by_name(rows: list[Row]) -> dict[str, Any]:
            return {row.name: {"values": list(row.values), "remark": row.remark} for row in rows}

        return {
            "runs": [
                {"name": name, "folder": folder, "workload": workload}
                for name, folder, workload in zip(self.runs, self.folders, self.workloads)
            ],
            "notes": self.notes,
            "config": {row.name: list(row.values) for row in self.config},
            "quality": by_name(self.quality),
            "speed": by_name(self.speed),
            "budget": by_name(self.budget),
            "limit": list(self.limit.values),
        }


def compare(runs: Sequence[Reading]) -> Comparison:
    """Compare every run with the first."""
    return Comparison(
        runs=labels(runs),
        folders=tuple(str(run.folder) for run in runs),
        workloads=tuple(run.workload for run in runs),
        notes=notes_on(runs),
        config=changed_fields([run.config for run in runs]),
        quality=quality(runs),
        speed=speed(runs),
        budget=budget(runs),
        limit=Row("limit", tuple(_limit(run) for run in runs)),
    )


def summary(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    fields, arrow = len(comparison.config), " → " if len(comparison.runs) == 2 else " / "
    facts = [
        f"{fields} config fields differ" if fields > 1 else "one config field differs" if fields else "same config"
    ]
    auc = next((row for row in comparison.quality if row.name == "auc" and None not in row.values), None)
    if auc:
        facts.append("AUC " + arrow.join(f"{value:.4f}" for value in auc.values))
    step = comparison.speed[0].values
    if None not in step:
        facts.append("step " + arrow.join(f"{value:.3g}" for value in step) + " ms")
    if any(comparison.limit.values):
        facts.append(arrow.join(value or "not measured" for value in comparison.limit.values))
    return sentence("; ".join(facts))


def labels(runs: Sequence[Reading]) -> tuple[str, ...]:
    """The name of each run; names that occur twice are numbered."""
    names = [run.short_name for run in runs]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})"
        for index, name in enumerate(names)
    )


def changed_fields(configs: Sequence[dict[str, Any]]) -> list[Row]:
    """The fields that differ; a field that a config lacks is None."""
    flats = [flatten(config) for config in configs]
    rows = [Row(name, tuple(one.get(name) for one in flats)) for name in _union(flats)]
    return [row for row in rows if row.differs]


def notes_on(runs: Sequence[Reading]) -> list[str]:
    notes = []
    if len({run.folder.resolve() for run in runs}) < len(runs):
        notes.append("A run is compared with itself.")
    workloads = sorted({run.workload for run in runs})
    if len(workloads) > 1:
        notes.append(f"Different workloads ({', '.join(workloads)}): fields that only one of them has are empty.")
    data = [run.result.data for run in runs]
    if len({(one.digest, one.split) for one in data}) > 1:
        notes.append("Different data or split: quality is not comparable.")
    if any(one.synthetic for one in data):
        notes.append("Synthetic data: quality shows how the model learns synthetic rules, not how good it is.")
    if len({run.result.provenance.machine for run in runs}) > 1:
        notes.append("Different machines or torch versions: times are not comparable as properties of the code.")
    if len({run.result.performance.device for run in runs}) > 1:
        notes.append("Different devices.")
    commits = {run.result.provenance.commit for run in runs}
    if len(commits) > 1:
        notes.append("Different commits: the code may have changed as well as the config.")
    elif any(run.result.provenance.dirty for run in runs):
        notes.append("Uncommitted changes: the code may have changed as well as the config.")
    for name, run in zip(labels(runs), runs):
        changes = [change_text(change) for change in run.result.provenance.changes]
        if changes:
            notes.append(f"{name} changed its config when it was resumed: {'; '.join(changes)}.")
    return notes


def quality(runs: Sequence[Reading]) -> list[Row]:
    parts = [run.result.quality for run in runs]
    rows = []
    for name in _union(part.metrics for part in parts):
        values = tuple(part.metrics.get(name) for part in parts)
        rows.append(Row(name, values, _chance(values, [part.spread.get(name) for part in parts])))
    # Without a bound there is no target to meet.
    targets = [part.target != Target(beat=None, accuracy=None, auc=None) for part in parts]
    rows.append(Row("target met", tuple(part.met if target else None for part, target in zip(parts, targets))))
    return rows


def _chance(values: Sequence[float | None], spreads: Sequence[float | None]) -> str:
    """Whether the differences from the first run exceed the spread of the seeds."""
    if None in values or all(value == values[0] for value in values):
        return ""
    if None in spreads:
        return "one seed: may be chance"
    known = [(float(value or 0), float(spread or 0)) for value, spread in zip(values, spreads)]
    first, noise = known[0]
    clear = [abs(value - first) > BEYOND_CHANCE * math.hypot(noise, spread) for value, spread in known[1:]]
    return "beyond the seeds' spread" if all(clear) else "" if any(clear) else "within the seeds' spread"


def speed(runs: Sequence[Reading]) -> list[Row]:
    parts = [run.result.performance for run in runs]
    steps = [part.step_ms for part in parts]
    rows = [Row("step ms, p50", tuple(step and step.p50 for step in steps), _overlap(steps))]
    rows += [Row(f"step ms, {name}", tuple(step and getattr(step, name) for step in steps)) for name in ("p20", "p80")]
    rows.append(Row("steady samples/s", tuple(part.steady and part.steady.samples_per_s for part in parts)))
    rows.append(Row("overall samples/s", tuple(part.overall and part.overall.samples_per_s for part in parts)))
    return rows


def _overlap(steps: Sequence[Percentiles | None]) -> str:
    known = [step for step in steps if step]
    if len(known) < len(steps) or all(step == known[0] for step in known):
        return ""
    first, *others = known
    if not all(step.p20 > first.p80 or step.p80 < first.p20 for step in others):
        return "p20 to p80 overlap"
    return f"{others[0].p50 / first.p50:.2f} x the first" if len(others) == 1 else "p20 to p80 apart from the first"


def budget(runs: Sequence[Reading]) -> list[Row]:
    steps = [from_profile(run.profile) if run.profile else [] for run in runs]
    shares = [{part.name: part.share for part in parts} for parts in steps]
    phases = {part.name: part for parts in steps for part in parts}
    names = [part.name for part in in_order(phases.values())]
    return [Row(name, tuple(one.get(name) for one in shares)) for name in names]


def _limit(run: Reading) -> str | None:
    return run.profile.verdict.limit if run.profile else None


def _union(groups: Iterable[dict[str, Any]]) -> list[str]:
    """Every key once, in order of first appearance."""
    return list(dict.fromkeys(key for group in groups for key in group))
