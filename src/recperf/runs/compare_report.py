"""The report of a comparison: quality and speed first, and of the config only what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from ..tasks import named
from .compare import Comparison, MetricChange, TimeChange, compare, has_spread
from .evidence import Evidence
from .report import charts, page, run_report
from .report import formats as fmt
from .report.blocks import Block, Cell, Figure, Report, Section, Table, Text, cells, render, render_block
from .report.charts import in_order
from .report.formats import NONE, NOT_MEASURED, component, metric, percent
from .sides import Side, of_run

CHANGED = 4
"""Fields of the config that a terminal shows."""
ROWS = 6
"""Changes in time that it shows, beside that of the step; of runs half of them."""
TOP = 16
"""Rows that a page always shows."""
HEAD = ("per step", "before", "p20 – p80", "after", "p20 – p80", "difference", "change", "")


def report(comparison: Comparison) -> Report:
    head, every = ("", *comparison.names), (1, 2)
    quality = [
        cells(metric(name), _score(row.old), _score(row.new), Cell(row.remark, "muted"))
        for name, row in comparison.quality.items()
    ]
    fields = [
        tuple(Cell(text, "code") for text in (name, *map(fmt.setting, values)))
        for name, values in comparison.config.items()
    ]
    shares = [cells(limit, *map(percent, values)) for limit, values in comparison.shares.items()]
    missing: list[Block] = [Text(f"{group}: {why}.", "note") for group, why in comparison.missing.items()]
    sections = [
        Section("qualities", "Quality", [Table((*head, "remark"), quality, left=(3,))] if quality else []),
        Section("times", "Times", [times(comparison), *missing] if comparison.same_model else []),
        Section("limits", "What limits a step", [Table(head, shares)] if shares else []),
        Section("config", "Config", [Table(head, fields, "Only fields that differ.", left=every)] if fields else []),
    ]
    return Report(
        key="all",
        title=" → ".join(comparison.names),
        name="",
        subtitle=_differing(comparison),
        verdict="",
        measured=True,
        facts=[fact for fact in _facts(comparison, _columns(comparison)) if fact[1]],
        sections=[section for section in sections if section.blocks],
    )


class Compared(Comparison):
    """A comparison as users of the Python API see it: printed, as a page, and in a notebook."""

    @classmethod
    def of(cls, old: Side, new: Side) -> Compared:
        return cls(**asdict(compare(old, new)))

    def __str__(self) -> str:
        return "\n".join([render(report(self)), *render_block(times(self, ROWS))])

    def page(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the comparison as one HTML file. With `force` it replaces a file that is not a page of recperf."""
        return page.save(report(self), Path(path), force=force)

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        return page.framed(report(self))


def summary(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    facts = dict(_facts(comparison, _columns(comparison)[:1]))
    score = facts["quality"] if comparison.comparable else ""
    return fmt.sentence("; ".join(filter(None, [_differing(comparison), score, facts["limit"].partition(":")[0]])))


def _columns(comparison: Comparison) -> tuple[str, ...]:
    """The metrics that are shown first: those that were compared on the same rows or users."""
    return tuple(row.metric for row in comparison.paired) or (named(comparison.task).columns if comparison.task else ())


def _differing(comparison: Comparison) -> str:
    fields, step = len(comparison.config), comparison.step
    configs = f"{fields or 'no'} config field{'s differ' if fields != 1 else ' differs'}" if comparison.quality else ""
    if not comparison.same_model:
        return "different models"
    time = f"step {step.text}{f' ({step.says})' if step.text != step.says else ''}"
    return ", ".join(filter(None, [configs, time]))


def _facts(comparison: Comparison, metrics: tuple[str, ...]) -> list[tuple[str, str]]:
    fields = [f"{name}: {' → '.join(map(fmt.setting, values))}" for name, values in comparison.config.items()]
    more = [f"and {len(fields) - CHANGED} more fields"] if len(fields) > CHANGED else []
    scores = "; ".join(_change(name, comparison.quality[name]) for name in metrics if name in comparison.quality)
    rates = [f"{fmt.count(rate)} samples/s" for rate in comparison.samples_per_s if rate]
    if not comparison.same_model:
        rates = [f"{fmt.time(1e3 * seconds)} of training" for seconds in comparison.training_s if seconds]
    old, new = (one or NOT_MEASURED for one in comparison.limits)
    limit = (f"{old} → {new}" if old != new else f"{old} in both") if any(comparison.limits) else ""
    if shares := [f"{name} {percent(old)} → {percent(new)}" for name, (old, new) in comparison.shares.items()]:
        limit += f": {', '.join(shares[:3])}"
    incomparable = comparison.quality and not comparison.comparable
    fields = fields if comparison.same_model else []
    more = more if comparison.same_model else []
    return [
        ("quality", "not comparable: different task, data or split" if incomparable else scores),
        ("speed", " → ".join(rates) if len(rates) == 2 else ""),
        ("limit", limit),
        *(("" if index else "config", text) for index, text in enumerate([*fields[:CHANGED], *more])),
        ("warning", "; ".join(comparison.warnings)),
        ("note", "; ".join(comparison.notes)),
    ]


def _change(name: str, row: MetricChange) -> str:
    return f"{metric(name)} {_score(row.old)} → {_score(row.new)}{f' ({row.remark})' if row.remark else ''}"


def _score(value: float | bool | None) -> str:
    return fmt.yes_or_no(value) if isinstance(value, bool) else NONE if value is None else f"{value:.4f}"


def times(comparison: Comparison, most: int | None = None) -> Table:
    """The step and its parts, operators and kernels; with `most` only that many rows of those that differ."""
    groups = comparison.groups
    if most is not None:
        groups = {
            name: [change for change in changes if change.says not in ("within noise", "same")]
            for name, changes in groups.items()
        }
    shown = sum(map(len, groups.values()))
    each = None if most is None else max(1, most // max(1, sum(map(bool, groups.values()))))
    rows = [_row(comparison.step, "step")]
    for group, changes in groups.items():
        rows += [_row(one, component(one.name) if group == "parts" else one.name) for one in changes[:each]]
    alike, hidden = sum(map(len, comparison.groups.values())) - shown, 1 + shown - len(rows)
    note = f"{alike} the same or within noise" if alike else ""
    note += f"{'; ' * bool(alike)}{hidden} more differ: --verbose" if hidden else ""
    return Table(HEAD, rows, note, left=(7,), top=TOP)


def _row(change: TimeChange, name: str) -> tuple[Cell, ...]:
    figures = []
    for ms in (change.old_ms, change.new_ms):
        figures += [fmt.time(ms.p50 if ms else None), fmt.spread(ms) if ms and has_spread(ms) else NONE]
    more = f"{'+' if change.difference_ms >= 0 else '-'}{fmt.time(abs(change.difference_ms))}"
    says = change.says
    if change.old_count != change.new_count and None not in (change.old_count, change.new_count):
        says += f", {fmt.count(change.old_count)} then {fmt.count(change.new_count)} calls"
    tone = {"slower": "bad", "faster": "good"}.get(change.says, "")
    figures += [more, change.text if change.change is not None else NONE]
    return cells(Cell(name, width=60), *figures, Cell(says, tone))


def html_of_runs(*runs: Evidence) -> str:
    """The page of two runs with their comparison on top."""
    comparison = compare(*map(of_run, runs))
    reports = [run_report.report(run, f"r{index}", short=True) for index, run in enumerate(runs, 1)]
    steps: list[Block] = []
    bars: list[tuple[str, Any]] = []
    for name, run, one in zip(comparison.names, runs, reports):
        # One step of each run moves up, so that they stand below each other.
        for section in [section for section in one.sections if section.key == "timeline"]:
            one.sections.remove(section)
            steps += [Text(name, "label"), *section.blocks]
        if run.figures:
            bars.append((name, [charts.BarPart(part.name, part.share) for part in in_order(run.figures.components)]))
    sections = report(comparison).sections
    if bars:
        label = "Share of each part in a training step, one bar per run"
        figure = Figure(label, "Shares of a step, not times.", lambda: charts.stacked(bars, "share"))
        sections.append(Section("budgets", "Where a step spends its time", [figure]))
    notes: list[Block] = [Text(fmt.sentence(text), "warning") for text in (*comparison.warnings, *comparison.notes)]
    return page.render(
        f"{' and '.join(comparison.names)} compared",
        reports,
        comparison=[
            *([Section("notes", "What else differs", notes)] if notes else []),
            *sections,
            *([Section("steps", "One step of each", steps)] if steps else []),
        ],
        summary=summary(comparison),
    )
