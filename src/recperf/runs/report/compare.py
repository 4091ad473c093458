"""Compares runs: config, quality, step time, step budget, limit; as a record, and as sections of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...config import ConfigValues, flatten
from ...jsonfile import Struct
from ...measure.records import Percentiles
from ...train.config import leading
from ...units import digits
from ..evidence import Evidence
from ..result import Target
from ..resume import change_text
from . import charts
from . import formats as fmt
from .blocks import Block, Cell, Figure, Report, Section, Table, Text
from .charts import in_order
from .formats import NONE, NOT_MEASURED, count, metric, percent, sentence
from .step_sections import keyed

HELD_OUT = ("data.holdout", "data.split_seed")
"""Fields of configs that decide which rows of a dataset are scored."""
CHANGED = 5
"""Fields of the config that a terminal shows of a comparison."""
QUALITY = ("auc", "log_loss", "ndcg_10")
"""Metrics that it shows."""
BEYOND_CHANCE = 2.0
"""A difference in quality counts if it exceeds this many standard deviations of the seeds."""


Values = tuple[Any, ...]
"""One value of every run; None if a run does not have it."""


class Row(Struct):
    values: Values
    remark: str = ""
    """How large a difference is, or why it may mean nothing."""


Rows = dict[str, Row]


class ComparedRun(Struct):
    name: str
    folder: str
    workload: str


class Comparison(Struct):
    runs: list[ComparedRun]
    notes: list[str]
    """Reasons why the runs may not be comparable."""
    comparable: bool
    """Whether their quality can be compared: it was measured on the same rows."""
    config: dict[str, Values]
    """Only fields that differ."""
    quality: Rows
    speed: Rows
    budget: Rows
    """Shares of a step."""
    limit: Values


def compare(runs: Sequence[Evidence]) -> Comparison:
    """Compare every run with the first."""
    return Comparison(
        runs=[ComparedRun(name, str(run.folder), run.workload) for name, run in zip(labels(runs), runs)],
        notes=notes_on(runs),
        comparable=_same_rows(runs),
        config=changed_fields([run.config.config for run in runs]),
        quality=quality(runs),
        speed=speed(runs),
        budget=budget(runs),
        limit=tuple(run.profile.verdict.limit if run.profile else None for run in runs),
    )


def summary(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    rows = comparison.quality if comparison.comparable else {}
    score = _changes(rows, _score, metric, (leading(comparison.quality),))
    step = _changes(comparison.speed, _number, str, ("step ms, p50",))
    limit = " → ".join(value or NOT_MEASURED for value in comparison.limit) if any(comparison.limit) else ""
    return sentence("; ".join(filter(None, [_differing(comparison), score, step, limit])))


def _same_rows(runs: Sequence[Evidence]) -> bool:
    """Whether all runs were scored on the same rows."""
    data = [(run.result.data, flatten(run.config.config)) for run in runs]
    rows = {(one.digest, one.split, one.valid_rows, *(fields.get(name) for name in HELD_OUT)) for one, fields in data}
    return len(rows) == 1


def labels(runs: Sequence[Evidence]) -> tuple[str, ...]:
    """The name of each run; names that occur twice are numbered."""
    names = [run.short_name for run in runs]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})"
        for index, name in enumerate(names)
    )


def changed_fields(configs: Sequence[ConfigValues]) -> dict[str, Values]:
    """The fields that differ; a field that a config lacks is None."""
    flats = [flatten(config) for config in configs]
    rows = {name: tuple(one.get(name) for one in flats) for name in _union(flats)}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values[1:])}


def notes_on(runs: Sequence[Evidence]) -> list[str]:
    results, origins = [run.result for run in runs], [run.result.provenance for run in runs]
    workloads, commits = sorted({run.workload for run in runs}), {origin.commit for origin in origins}
    machines, devices = {origin.machine for origin in origins}, {result.performance.device for result in results}
    code = "the code may have changed as well as the config."
    doubts = [
        (len({run.folder.resolve() for run in runs}) < len(runs), "A run is compared with itself."),
        (len(workloads) > 1, f"Different workloads ({', '.join(workloads)}): a field that one lacks is empty."),
        (not _same_rows(runs), "Different data or split: quality is not comparable."),
        (any(result.data.synthetic for result in results), "Synthetic data: quality shows how the model learns "
         "synthetic rules, not how good it is."),
        (len(machines) > 1, "Different machines or torch versions: times tell little about the code."),
        (len(devices) > 1, "Different devices."),
        (len(commits) > 1, f"Different commits: {code}"),
        (len(commits) == 1 and any(origin.dirty for origin in origins), f"Uncommitted changes: {code}"),
    ]  # fmt: skip
    notes = [text for holds, text in doubts if holds]
    for name, origin in zip(labels(runs), origins):
        if changes := [change_text(change) for change in origin.changes]:
            notes.append(f"{name} changed its config when it was resumed: {'; '.join(changes)}.")
    return notes


def quality(runs: Sequence[Evidence]) -> Rows:
    parts, rows = [run.result.quality for run in runs], {}
    for name in _union(part.metrics for part in parts):
        values = tuple(part.metrics.get(name) for part in parts)
        rows[name] = Row(values, _chance(values, [part.spread.get(name) for part in parts]))
    # Without a bound there is no target to meet.
    targets = [part.target != Target(beat=None, accuracy=None, auc=None) for part in parts]
    rows["target met"] = Row(tuple(part.met if target else None for part, target in zip(parts, targets)))
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


def speed(runs: Sequence[Evidence]) -> Rows:
    parts = [run.result.performance for run in runs]
    steps = [part.step_ms for part in parts]
    return {
        "step ms, p50": Row(tuple(step and step.p50 for step in steps), _overlap(steps)),
        "step ms, p20": Row(tuple(step and step.p20 for step in steps)),
        "step ms, p80": Row(tuple(step and step.p80 for step in steps)),
        "steady samples/s": Row(tuple(part.steady and part.steady.samples_per_s for part in parts)),
        "overall samples/s": Row(tuple(part.overall and part.overall.samples_per_s for part in parts)),
    }


def _overlap(steps: Sequence[Percentiles | None]) -> str:
    known = [step for step in steps if step]
    if len(known) < len(steps) or all(step == known[0] for step in known):
        return ""
    first, *others = known
    if not all(step.p20 > first.p80 or step.p80 < first.p20 for step in others):
        return "p20 to p80 overlap"
    return f"{others[0].p50 / first.p50:.2f} x the first" if len(others) == 1 else "p20 to p80 apart from the first"


def budget(runs: Sequence[Evidence]) -> Rows:
    steps = [in_order(run.profile.components) if run.profile else [] for run in runs]
    shares = [{part.name: part.share for part in parts} for parts in steps]
    phases = {part.name: part for parts in steps for part in parts}
    names = [part.name for part in in_order(phases.values())]
    return {name: Row(tuple(one.get(name) for one in shares)) for name in names}


def _union(groups: Iterable[Mapping[str, object]]) -> list[str]:
    """Every key once, in order of first appearance."""
    return list(dict.fromkeys(key for group in groups for key in group))


def comparison_report(comparison: Comparison) -> Report:
    """The comparison as a report: quality and speed first, and of the config only what differs."""
    return Report(
        key="all",
        title=" → ".join(run.name for run in comparison.runs),
        name="",
        subtitle=_differing(comparison),
        verdict="",
        measured=True,
        facts=[fact for fact in _facts(comparison) if fact[1]],
        sections=comparison_sections(comparison),
    )


def _differing(comparison: Comparison) -> str:
    fields = len(comparison.config)
    return (
        "same config" if not fields else "one config field differs" if fields == 1 else f"{fields} config fields differ"
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    fields = [f"{name}: {' → '.join(map(fmt.setting, values))}" for name, values in comparison.config.items()]
    more = [f"and {len(fields) - CHANGED} more fields"] if len(fields) > CHANGED else []
    scores = _changes(comparison.quality, _score, metric)
    return [
        ("quality", scores if comparison.comparable else "not comparable: different data or split"),
        ("speed", _changes(comparison.speed, _number, str, ("step ms, p50", "steady samples/s"))),
        ("limit", " → ".join(value or NOT_MEASURED for value in comparison.limit)),
        *(("" if index else "config", text) for index, text in enumerate([*fields[:CHANGED], *more])),
        ("note", " ".join(comparison.notes)),
    ]


def _changes(
    rows: Rows, show: Callable[[Any], str], title: Callable[[str], str], names: tuple[str, ...] = QUALITY
) -> str:
    """`AUC 0.8212 → 0.8300 (one seed: may be chance)`, for the rows of these names."""
    shown = {name: rows[name] for name in names if name in rows and None not in rows[name].values}
    return "; ".join(
        f"{title(name)} {' → '.join(map(show, row.values))}{f' ({row.remark})' if row.remark else ''}"
        for name, row in shown.items()
    )


def comparison_sections(comparison: Comparison, parts: list[list[Any]] | None = None) -> list[Section]:
    """The comparison as sections; `parts` are the parts of each run's step, for the figure of a page."""
    head = ("", *(run.name for run in comparison.runs))
    every = tuple(range(1, len(head)))
    changed: list[Block] = [Text(note, "warning") for note in comparison.notes]
    if comparison.config:
        rows = [_row(name, values, fmt.setting, "code") for name, values in comparison.config.items()]
        changed.append(Table(head, rows, "Only fields that differ.", left=every))
    else:
        changed.append(Text("The configs are the same.", "lead"))
    values = (Cell(value or NOT_MEASURED, "strong" if value else "muted") for value in comparison.limit)
    return [
        Section("qualities", "Quality", [_measured(comparison.quality, head, _score, metric)]),
        Section("speeds", "Speed", [_measured(comparison.speed, head, _number, str)]),
        Section("limits", "What limits a step", [Table(head, [(Cell("limit"), *values)], left=every)]),
        Section("changed", "What changed", changed),
        *_budgets(comparison, parts, head),
    ]


def _budgets(comparison: Comparison, parts: list[list[Any]] | None, head: tuple[str, ...]) -> list[Section]:
    if not comparison.budget:
        return []
    sections: list[Section] = []
    bars = [
        (name, [charts.BarPart(part.name, part.share) for part in shares])
        for name, shares in zip(head[1:], parts or [])
        if shares
    ]
    if bars:
        label = "Share of each part in a training step, one bar per run; the table below has the numbers"
        draw = lambda: charts.stacked(bars, "share")  # noqa: E731
        figure = Figure("all-budgets", label, "Shares of a step, not times.", draw)
        sections.append(Section("budgets", "Where a step spends its time", [figure]))
    rows = [
        (keyed(name), *(Cell(NONE if value is None else percent(value)) for value in row.values))
        for name, row in comparison.budget.items()
    ]
    table = Table(head, rows, "Steps measured after training.")
    return [*sections, Section("parts", "Parts of a step", [table], fold=True)]


def _measured(rows: Rows, head: tuple[str, ...], show: Callable[[Any], str], title: Callable[[str], str]) -> Table:
    cells = [_row(title(name), row.values, show) for name, row in rows.items()]
    if not any(row.remark for row in rows.values()):
        return Table(head, cells)
    remarked = [(*line, Cell(row.remark, "muted")) for line, row in zip(cells, rows.values())]
    return Table((*head, "remark"), remarked, left=(len(head),))


def _row(name: str, values: Values, show: Callable[[Any], str], tone: str = "") -> tuple[Cell, ...]:
    return (Cell(name, tone), *(Cell(NONE if value is None else show(value), tone) for value in values))


def _score(value: Any) -> str:
    return fmt.yes_or_no(value) if isinstance(value, bool) else f"{value:.4f}"


def _number(value: float) -> str:
    return count(value) if value >= 100 else digits(value)
