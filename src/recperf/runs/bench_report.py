"""Models and baselines on one dataset, in a terminal and as a page: which to take, a picture, a table for each task."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .bench import SCHEMA, Bench, BenchModel, BenchRow, BenchTable, value_of
from .record import BENCH
from .report import charts
from .report import formats as fmt
from .report.blocks import Block, Cell, Report, Section, Table, Text, cells, columns, wrapped
from .report.formats import NONE, NOT_MEASURED, baseline, count, metric
from .report.quality_sections import tone
from .schemas import read_file

MOST_RULES = 3
"""Baselines of a table in a terminal, the best."""


def read(folder: Path) -> Bench:
    """The bench in a folder."""
    return read_file(folder / BENCH, Bench, SCHEMA)


class BenchReport(Bench):
    """A bench as users of the Python API see it: printed, as a frame, as a page, and in a notebook."""

    def __str__(self) -> str:
        return text(self)

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
                "to_best": row.to_best.difference if row.to_best else 0.0,
                "standing": row.to_best.standing if row.to_best else "best",
                "seconds": row.model.seconds if row.model else None,
                "peak_bytes": row.model.peak_bytes if row.model else None,
                "one_ms": row.model.one_ms.p50 if row.model and row.model.one_ms else None,
                "run": row.model.run if row.model else None,
            }
            for table in self.tables
            for row in table.rows
        )

    def page(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the tables as one HTML file, or in .svg the picture of the models. With `force` it replaces a file
        that is not a page of recperf."""
        from .report import page

        return page.save(report(self, beside(Path(path).parent)), Path(path), force=force)

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        from .report import page

        return page.framed(report(self))


def _title(name: str) -> str:
    """A row's name; a baseline that another model has with other features is there again."""
    rule, _, again = name.partition(" again")
    return baseline(rule) + (" on other features" if name.endswith("again") else again)


def text(bench: Bench) -> str:
    """The bench for a terminal, in at most 30 lines."""
    lines = [f"Models on {bench.data} · {_trained(bench)}"]
    for table in bench.tables[:2]:
        lines += ["", *wrapped(f"{_heading(table)}: {table.answer}."), *columns(_lines(table), left=(2,))]
    lines += [line for model in bench.models if model.error for line in wrapped(f"{model.workload}: {model.error}")[:2]]
    return "\n".join(lines)


def _trained(bench: Bench) -> str:
    done = [model for model in bench.models if not model.error]
    waited = sum(model.waited or 0.0 for model in done)
    return f"{len(done)} of {len(bench.models)} models trained" + (f" in {fmt.time(1e3 * waited)}" if waited else "")


def _heading(table: BenchTable) -> str:
    return f"{fmt.sentence(table.task)[:-1]}, split {table.split}"


def _lines(table: BenchTable) -> list[list[str]]:
    """The models and the best baselines."""
    rules = [row for row in table.rows if not row.model][:MOST_RULES]
    shown = [row for row in table.rows if row.model or row in rules]
    first, *others = table.columns
    best = next((row.to_best.baseline for row in table.rows if row.to_best), "the best")
    head = ["", metric(first), f"beside {fmt.short(baseline(best), 18)}", *map(metric, others), *COSTS]
    lines = [head]
    for row in shown:
        values = [f"{row.metrics[name]:.4f}" if name in row.metrics else NONE for name in others]
        lines.append([fmt.short(_title(row.name), 26), value_of(row, first), _beside(row), *values, *_costs(row)])
    return lines


COSTS = ("training", "memory", "one user")


def _beside(row: BenchRow) -> str:
    place = row.to_best
    if place is None:
        return NONE
    if place.standing != "level":
        return f"{fmt.plus_minus(abs(place.difference), place)} {place.standing}"
    return "no clear difference" if place.needed is None else f"not enough {place.by} (~{count(place.needed)})"


def _costs(row: BenchRow) -> list[str]:
    """Training time, peak memory, and the time of one recommendation."""
    model = row.model
    if model is None:
        return [NONE] * len(COSTS)
    memory = model.device_bytes or model.peak_bytes
    return [
        NOT_MEASURED if model.seconds is None else fmt.time(1e3 * model.seconds),
        NOT_MEASURED if memory is None else fmt.size(memory),
        NOT_MEASURED if model.one_ms is None else fmt.time(model.one_ms.p50),
    ]


Link = Callable[[BenchModel], str]


def beside(folder: Path) -> Link:
    """Links from a page in a folder to the pages of the runs."""
    return lambda model: os.path.relpath(Path(model.run) / "report.html", folder)


def report(bench: Bench, link: Link = lambda model: "") -> Report:
    """The page of a bench."""
    failed = [model for model in bench.models if model.error]
    sections = [
        Section(f"table-{number}", _heading(table), _blocks(table, link, drawn=number > 0))
        for number, table in enumerate(bench.tables)
    ]
    if failed:
        rows = [cells(model.workload, Cell(model.error or "", "bad"), model.run) for model in failed]
        sections.append(Section("failed", "Models without a result", [Table(("", "why", "run"), rows, left=(1, 2))]))
    tables = bench.tables
    return Report(
        key="bench",
        title=f"Models on {bench.data}",
        name="",
        subtitle=f"{bench.kind} · {_trained(bench)}",
        verdict=f"{_heading(tables[0])}: {tables[0].answer}." if tables else "No model has a result.",
        measured=bool(tables),
        picture=_picture(tables[0]) if tables else None,
        facts=[(table.task, fmt.sentence(table.answer)) for table in tables[1:]],
        sections=sections,
    )


def _picture(table: BenchTable) -> Any:
    first = table.columns[0]
    rows = [row for row in table.rows if row.name != "majority"]
    dots = []
    for row in rows:
        ends = row.intervals.get(first)
        low, high = (ends.low, ends.high) if ends else (None, None)
        dots.append(charts.Dot(_title(row.name), row.metrics[first], low, high, is_model=row.model is not None))
    caption = f"{metric(first)} with 95 % intervals; models in colour, baselines in grey. Scored: {table.scored}."
    return charts.dots_figure(metric(first), dots, caption)


def _blocks(table: BenchTable, link: Link, *, drawn: bool) -> list[Block]:
    head = ("", *map(metric, table.columns), "beside the best", *COSTS)
    note = (
        "Values with half of their 95 % interval over bootstrap samples. Differences to the best are paired: both "
        "sides have the same users, or rows, in each sample. Where the interval includes 0, there is no clear "
        "difference if it is narrower than what matters (10 % of NDCG@10, 5 % of the AUC above 0.5); else so many "
        "would be needed to tell. Training is the time from the first step to the end, over all seeds; memory is the "
        "peak of the GPU, or else of the process; one user is the median time to score all items for a user and list "
        "the ten highest."
    )
    scored = f"Scored: {table.scored}."
    lead: list[Block] = [Text(f"{fmt.sentence(table.answer)} {scored}"), _picture(table)] if drawn else [Text(scored)]
    return [*lead, Table(head, list(_rows(table, link)), note)]


def _rows(table: BenchTable, link: Link) -> Iterator[tuple[Cell, ...]]:
    first = table.columns[0]
    for row in table.rows:
        place, model = row.to_best, row.model
        tone_of = "strong" if model else ""
        values = [
            Cell(f"{row.metrics[name]:.4f}" if name in row.metrics else NONE, tone_of) for name in table.columns[1:]
        ]
        beside = Cell(NONE)
        if place is not None:
            unclear = fmt.place(place) if place.standing == "level" else ""
            beside = Cell(fmt.plus_minus(place.difference, place), tone(place), second_line=unclear)
        name = Cell(_title(row.name), tone_of, "accent" if model else "other", link=link(model) if model else "")
        yield cells(name, Cell(value_of(row, first), tone_of), *values, beside, *_costs(row))
