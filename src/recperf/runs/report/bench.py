"""Models and baselines on one dataset: bench.json, and the same as tables of a page and of a terminal.

A table holds only what was scored on the same rows in the same way, so that one column never mixes splits or tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...jsonfile import Number, Struct
from ...tasks import RANKED, named, signed
from ..derive import best_of, combined, interval
from ..evidence import Evidence
from ..result import Difference, Interval, Metrics, Result
from ..schemas import SampledScores, SavedScores
from . import formats as fmt
from .blocks import Block, Cell, Report, Section, Table, Text, cells, render
from .formats import NONE, NOT_MEASURED, baseline, count, metric
from .quality_sections import tone

SCHEMA = 1


class BenchModel(Struct):
    """One model: what its run cost, or why there is no result."""

    workload: str
    run: str
    """Folder of the run."""
    seconds: Number | None = None
    """Of training, evaluations included, over all seeds; None: nothing was trained."""
    peak_bytes: int | None = None
    """Peak host memory of the process; None: not measured."""
    error: str | None = None


class BenchRow(Struct):
    name: str
    metrics: Metrics
    intervals: dict[str, Interval]
    """Of the columns that have one."""
    model: BenchModel | None = None
    """None for a baseline."""
    standing: Difference | None = None
    """To the best baseline that it was scored with."""


class BenchTable(Struct):
    task: str
    split: str
    scored: str
    columns: tuple[str, ...]
    rows: list[BenchRow]
    """The best first."""


class Bench(Struct):
    schema: int
    data: str
    kind: str
    """How the dataset is stored: events, clicks or movielens."""
    models: list[BenchModel]
    tables: list[BenchTable]


class BenchReport(Bench):
    """A bench as users of the Python API see it: printed, as a frame, as a page, and in a notebook."""

    def __str__(self) -> str:
        return render(self._report(), verbose=True)

    def frame(self) -> Any:
        """One row for each model and baseline of each table, as a frame of pandas."""
        from pandas import DataFrame

        return DataFrame(
            {
                "task": table.task,
                "split": table.split,
                "name": row.name,
                "model": row.model is not None,
                **{name: row.metrics.get(name) for name in table.columns},
                "standing": row.standing.standing if row.standing else None,
                "seconds": row.model.seconds if row.model else None,
                "peak_bytes": row.model.peak_bytes if row.model else None,
                "run": row.model.run if row.model else None,
            }
            for table in self.tables
            for row in table.rows
        )

    def page(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the tables as one HTML file. With `force` it replaces a file that is not a page of recperf."""
        from . import page

        return page.save(self._report(), Path(path), force=force)

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        from . import page

        return page.framed(self._report())

    def _report(self) -> Report:
        return report(self, Path(self.models[0].run).parent if self.models else Path())


def bench(data: str, kind: str, models: list[BenchModel]) -> Bench:
    """Read the finished runs of the models and put those that are comparable into one table."""
    tables: dict[tuple[Any, ...], BenchTable] = {}
    for model in models:
        if model.error is not None:
            continue
        evidence = Evidence(Path(model.run))
        overall = evidence.result.performance.overall
        model.seconds = overall.seconds if overall else None
        for key, part in _parts(model, evidence.result, evidence.file("scores.json", SavedScores)):
            table = tables.setdefault(key, part)
            if table is not part:
                _merge(table, part, model.workload)
    for table in tables.values():
        first = table.columns[0]
        table.rows.sort(key=lambda row: -signed(first, row.metrics[first]) if first in row.metrics else 0.0)
    return Bench(schema=SCHEMA, data=data, kind=kind, models=models, tables=list(tables.values()))


def _parts(model: BenchModel, result: Result, scores: SavedScores) -> Iterator[tuple[tuple[Any, ...], BenchTable]]:
    """The rows of one run: those scored by label, and those of held-out items ranked among others; each table with what
    must be equal for another run's rows to join it."""
    quality, split = result.quality, result.data.split
    task = named(result.task)
    if not task.ranks_items:
        place, seeds = best_of(quality.differences), list(scores.seeds.values())
        own = BenchRow(model.workload, quality.metrics, _intervals(task.columns, seeds), model, place)
        sampled = {name: [scores.baselines[name]] if name in scores.baselines else [] for name in quality.baselines}
        rules = [
            BenchRow(name, quality.baselines[name], _intervals(task.columns, rows)) for name, rows in sampled.items()
        ]
        scored = f"{count(result.data.valid_rows)} held-out rows"
        table = BenchTable(task.table, split, scored, task.columns, [own, *rules])
        yield (task.table, split, scored, scores.rows_digest), table
    ranking = quality.ranking
    if ranking is None:
        return
    facts = scores.ranking.baselines if scores.ranking else {}
    place, first = best_of(ranking.differences), RANKED[0]
    own = BenchRow(model.workload, ranking.metrics, {first: ranking.interval}, model, place)
    rules = [
        BenchRow(name, values, {first: interval(facts[name].ndcg_replicates)} if name in facts else {})
        for name, values in ranking.baselines.items()
    ]
    among = f"{count(ranking.negatives)} drawn items of " if ranking.negatives else "all "
    scored = f"one held-out item of each of {count(ranking.users)} users among {among}{count(ranking.catalogue)} items"
    if ranking.repeats is not None:
        scored += f", those that the user already had {'included' if ranking.repeats else 'left out'}"
    # A model that ranks by predicted labels ranks positive rows; one that predicts the next item ranks any.
    title = task.table if task.ranks_items else "positive items"
    yield (title, split, scored, scores.rows_digest), BenchTable(title, split, scored, RANKED, [own, *rules])


def _intervals(columns: Sequence[str], sampled: list[SampledScores]) -> dict[str, Interval]:
    """Of the columns with replicates, of one rule or of the mean of seeds."""
    names = [name for name in columns if sampled and name in sampled[0].replicates]
    return {name: interval(combined([one.replicates[name] for one in sampled])) for name in names}


def _merge(table: BenchTable, part: BenchTable, workload: str) -> None:
    """Add the rows of another run. A baseline that both have is one row, unless it was fitted on other features."""
    present = {row.name: row for row in table.rows}
    for row in part.rows:
        same = present.get(row.name)
        if same is None:
            table.rows.append(row)
        elif any(abs(same.metrics.get(name, 0.0) - row.metrics.get(name, 0.0)) > 1e-9 for name in table.columns):
            row.name = f"{row.name} of {workload}"
            table.rows.append(row)


def report(bench: Bench, folder: Path) -> Report:
    """The page of a bench."""
    failed = [model for model in bench.models if model.error]
    sections = [Section(f"table-{number}", _title(table), _blocks(table)) for number, table in enumerate(bench.tables)]
    if failed:
        rows = [cells(model.workload, Cell(model.error or "", "bad"), model.run) for model in failed]
        sections.append(Section("failed", "Models without a result", [Table(("", "why", "run"), rows, left=(1, 2))]))
    trained = len(bench.models) - len(failed)
    return Report(
        key="bench",
        title=f"Models on {bench.data}",
        name=folder.name,
        subtitle=f"{bench.kind} · {trained} of {len(bench.models)} models trained",
        verdict=" ".join(_verdict(table) for table in bench.tables) or "No model has a result.",
        measured=bool(bench.tables),
        facts=[("best" if index == 0 else "", _verdict(table)) for index, table in enumerate(bench.tables)],
        sections=sections,
    )


def _title(table: BenchTable) -> str:
    return f"{fmt.sentence(table.task)[:-1]}, split {table.split}"


def _verdict(table: BenchTable) -> str:
    """The best model of a table, and how it stands."""
    first = table.columns[0]
    best = next(row for row in table.rows if row.model)
    text = f"{_title(table)}: {best.name} is the best model, {metric(first)} {best.metrics[first]:.4f}"
    return f"{text}, {fmt.stands(best.standing)}." if best.standing else f"{text}."


def _blocks(table: BenchTable) -> list[Block]:
    head = ("", *map(metric, table.columns), "against the best baseline", "training", "peak host memory", "run")
    note = (
        "Below a value is its 95 % interval over bootstrap samples, where a run has one. A model is above or below a "
        "baseline only where the interval of the difference excludes 0. Training is the time from the first step to "
        "the end, over all seeds; memory is that of the whole process."
    )
    return [Text(f"Scored: {table.scored}."), Table(head, [_row(row, table) for row in table.rows], note, left=(3, 6))]


def _row(row: BenchRow, table: BenchTable) -> tuple[Cell, ...]:
    model, values = row.model, []
    for name in table.columns:
        ends, text = row.intervals.get(name), f"{row.metrics[name]:.4f}" if name in row.metrics else NONE
        beside = f"{ends.low:.4f} to {ends.high:.4f}" if ends else ""
        values.append(Cell(text, "strong" if model else "", second_line=beside))
    if model is None:
        rule, _, of = row.name.partition(" of ")
        return cells(
            Cell(baseline(rule) + (f" of {of}" if of else ""), swatch="other"), *values, NONE, NONE, NONE, NONE
        )
    place = Cell(fmt.stands(row.standing), tone(row.standing)) if row.standing else Cell(NONE)
    seconds = NOT_MEASURED if model.seconds is None else fmt.time(1e3 * model.seconds)
    memory = NOT_MEASURED if model.peak_bytes is None else fmt.size(model.peak_bytes)
    return cells(Cell(row.name, "strong", "accent"), *values, place, seconds, memory, Path(model.run).name)
