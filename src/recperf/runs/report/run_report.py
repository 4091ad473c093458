"""The report of one run, and the comparison of several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...units import digits
from ..result import Result
from ..resume import change_text
from . import formats as fmt
from . import page, plots, sections, timeline
from .advice import advice_facts
from .blocks import Badge, Block, Cell, Figure, Report, Section, Table, Text, Tile, arranged
from .formats import NONE, NOT_MEASURED, component, count, metric, percent
from .plots import from_profile
from .quality_sections import outcome, quality_fact
from .reading import Reading, read
from .step_sections import headline, keyed

if TYPE_CHECKING:
    from .compare import Comparison, Rows, Values


CHANGED = 5
"""Fields of the config that a terminal shows of a comparison."""
QUALITY = ("auc", "log_loss", "ndcg_10")
"""Metrics that it shows."""


def write(folders: list[Path], out: Path) -> Path:
    """Write the page of one run, or of several with their comparison on top; a name in .svg asks for the picture of a
    step of the first."""
    if out.suffix == ".svg":
        return page.write(timeline.picture_of(report(read(folders[0]), "r1")), out)
    return page.write(html([read(folder) for folder in folders]), out)


def html(runs: list[Reading]) -> str:
    if len(runs) == 1:
        return page.render(f"{runs[0].workload}: {runs[0].name}", [report(runs[0], "r1")])
    from .compare import compare, summary

    comparison = compare(runs)
    reports = [report(run, f"r{index}", short=True) for index, run in enumerate(runs, 1)]
    parts = [from_profile(run.profile) if run.profile else [] for run in runs]
    return page.render(
        f"{_names(runs)} compared",
        reports,
        comparison=[*comparison_sections(comparison, parts), *_steps(comparison, reports)],
        summary=summary(comparison),
    )


def _steps(comparison: Comparison, reports: list[Report]) -> list[Section]:
    """One step of each run, moved here from the reports."""
    blocks: list[Block] = []
    for run, one in zip(comparison.runs, reports):
        shown = [section for section in one.sections if section.key == "timeline"]
        for section in shown:
            one.sections.remove(section)
            blocks += [Text(run.name, "label"), *section.blocks]
    return [Section("steps", "One step of each", blocks)] if blocks else []


def _names(runs: list[Reading]) -> str:
    names = list(dict.fromkeys(run.short_name for run in runs))
    if len(names) > 3:
        return f"{len(names)} runs"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def report(run: Reading, key: str, *, short: bool = False) -> Report:
    """The report of a run; `short` leaves out the sections that do not belong below a comparison."""
    verdict = run.profile.verdict if run.profile else None
    listed = [*sections.quality(run, key), *sections.step_sections(run, key)]
    if short:
        listed = [section for section in listed if section.key in ("timeline", "quality", "budget")]
    else:
        listed += [*sections.pair(run), sections.training(run, key), sections.provenance(run), sections.config(run)]
    return Report(
        key=key,
        title=run.workload,
        name=run.name,
        subtitle=" · ".join(_subtitle(run.result)),
        verdict=headline(verdict) if verdict else "What limits this run was not measured.",
        measured=bool(verdict),
        command="" if verdict else run.profile_command,
        badges=_badges(run),
        facts=_facts(run),
        tiles=_tiles(run),
        sections=arranged([*listed, sections.reproduce(run)]),
    )


def _subtitle(result: Result) -> list[str]:
    """What was trained on, for how long, and whether the target was met."""
    data, overall, trials = result.data, result.performance.overall, len(result.quality.seeds)
    parts = [f"{data.name} (synthetic)" if data.synthetic else data.name]
    if overall:
        epochs = overall.samples / max(1, data.train_rows) / trials
        whole = epochs > 0.995 and abs(epochs - round(epochs)) < 0.005 * epochs
        amount = f"{epochs:,.0f} epoch{'s' * (epochs > 1.5)}" if whole else f"{overall.steps // trials:,} steps"
        parts.append(f"{amount}{f', {trials} seeds' if trials > 1 else ''} in {fmt.time(1e3 * overall.seconds)}")
    return [*parts, *([outcome(result)] if sections.target_text(result) else [])]


def _facts(run: Reading) -> list[tuple[str, str | Cell]]:
    result, performance = run.result, run.result.performance
    step = f"{fmt.time(performance.step_ms.p50)} a step" if performance.step_ms else "too few steps to time one"
    device = performance.device + (f", {len(performance.ranks.each)} ranks" if performance.ranks else "")
    changes = (f"changed {change_text(change)}" for change in result.provenance.changes)
    notes = "; ".join([*result.quality.warnings, *changes])
    facts: list[tuple[str, str | Cell]] = [
        ("quality", quality_fact(result)),
        *([("note", notes)] if notes else []),
        ("speed", f"{fmt.throughput(performance.steady)}, {step}, {device}"),
    ]
    if run.profile is None:
        return [*facts, ("limit", NOT_MEASURED)]
    return [*facts, ("limit", headline(run.profile.verdict)), *advice_facts(run.profile.advice)]


def _badges(run: Reading) -> list[Badge]:
    badges = []
    if run.result.data.synthetic:
        badges.append(Badge("synthetic data", "warning"))
    if sections.target_text(run.result):
        met = run.result.quality.met
        badges.append(Badge("target met", "good") if met else Badge("target missed", "bad"))
    if run.profile:
        badges.append(Badge(run.profile.verdict.limit, "plain"))
    if run.result.provenance.dirty:
        badges.append(Badge("uncommitted changes", "warning"))
    return badges


def _tiles(run: Reading) -> list[Tile]:
    quality, performance = run.result.quality, run.result.performance
    tiles = []
    name = next((name for name in ("auc", "accuracy", "ndcg_10") if name in quality.metrics), None)
    if name:
        spread = quality.spread.get(name)
        note = f"± {spread:.4f} over {len(quality.seeds)} seeds" if spread is not None else "one seed"
        ends = quality.ranking.interval if name == "ndcg_10" and quality.ranking else quality.interval
        if ends and name != "accuracy":
            note = f"{ends.low:.3f} to {ends.high:.3f}, 95 %; {note}"
        tiles.append(
            Tile(
                f"{'test' if name == 'ndcg_10' else 'validation'} {metric(name)}", f"{quality.metrics[name]:.4f}", note
            )
        )
    step, steady, overall = performance.step_ms, performance.steady, performance.overall
    parts = [part for part in (from_profile(run.profile) if run.profile else []) if part.name != "other"]
    short = (NOT_MEASURED, "too few steps")
    timed = f"p20 – p80: {fmt.spread(step)}, {count(performance.steps_timed)} steps" if step else ""
    largest = max(parts, key=lambda part: part.share, default=None)
    return [
        *tiles,
        Tile(
            "steady samples/s",
            count(steady.samples_per_s if steady else None),
            "without warm-up, evaluations and saves",
        ),
        Tile("training step, p50", *((fmt.time(step.p50), timed) if step else short)),
        Tile("overall samples/s", count(overall.samples_per_s if overall else None), "everything included"),
        Tile("largest part of a step", *((percent(largest.share), component(largest.name)) if largest else short)),
    ]


def comparison_report(comparison: Comparison) -> Report:
    """The comparison as a report: quality and speed first, and of the config only what differs."""
    names = " → ".join(run.name for run in comparison.runs)
    fields = [(name, " → ".join(map(fmt.setting, values))) for name, values in comparison.config.items()]
    more = f"and {len(fields) - CHANGED} more fields" if len(fields) > CHANGED else ""
    facts: list[tuple[str, str | Cell]] = [
        ("quality", _changes(comparison.quality, _score, metric)) if comparison.comparable
        else ("quality", "not comparable: different data or split"),
        ("speed", _changes(comparison.speed, _number, str, ("step ms, p50", "steady samples/s"))),
        ("limit", " → ".join(value or NOT_MEASURED for value in comparison.limit)),
        *(("" if index else "config", f"{name}: {text}") for index, (name, text) in enumerate(fields[:CHANGED])),
        *([("", more)] if more else []),
        ("note", " ".join(comparison.notes)),
    ]  # fmt: skip
    return Report(
        key="all", title=names, name="", subtitle=_differing(len(fields)),
        verdict="", measured=True, facts=[fact for fact in facts if fact[1]], sections=comparison_sections(comparison),
    )  # fmt: skip


def _differing(fields: int) -> str:
    return "same config" if not fields else f"{fields} config field{'s differ' if fields > 1 else ' differs'}"


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
        (name, [plots.BarPart(part.name, part.share, part.phase) for part in shares])
        for name, shares in zip(head[1:], parts or [])
        if shares
    ]
    if bars:
        label = "Share of each part in a training step, one bar per run; the table below has the numbers"
        draw = lambda: plots.stacked(bars, "share")  # noqa: E731
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
