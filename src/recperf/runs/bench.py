"""Models and baselines on one dataset: the content of bench.json, from the finished runs of the models.

All rows of a table were scored on the same users or rows, in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from ..jsonfile import Number, Struct
from ..measure.records import Percentiles
from ..tasks import ORACLES, RANKED, named, signed
from .derive import combined, interval
from .evidence import Evidence
from .paired import FEWEST, Longs, RankedUsers, Row, candidates, common, difference, labels, ranked_users, scored_seeds
from .report import formats as fmt
from .report.formats import baseline, count, metric
from .result import Difference, Interval, Metrics
from .schemas import SavedScores

SCHEMA = 2
ITEMS = "next items"
"""The task of the table of ranked items, whatever a model predicts."""
SOONER = 0.5
"""Of models that are level, one that trains in less than this share of the time of the best is named."""


class BenchModel(Struct):
    """One model: what its run cost, or why there is no result."""

    workload: str
    run: str
    """Folder of the run."""
    seconds: Number | None = None
    """Of training, evaluations included, over all seeds; None: nothing was trained."""
    waited: Number | None = None
    """Of the whole run."""
    peak_bytes: int | None = None
    """Peak host memory of the process; None: not measured."""
    device_bytes: int | None = None
    """Peak memory of the GPU; None: there is none."""
    one_ms: Percentiles | None = None
    """The time to score all items for one user; None: not measured."""
    error: str | None = None


class BenchRow(Struct):
    name: str
    metrics: Metrics
    intervals: dict[str, Interval]
    """Of the columns that have one."""
    model: BenchModel | None = None
    """None for a baseline."""
    to_best: Difference | None = None
    """The first metric less that of the best row; None for the best one."""


class BenchTable(Struct):
    task: str
    split: str
    scored: str
    units: int
    """How many users, or rows, all rows of the table were scored on."""
    columns: tuple[str, ...]
    rows: list[BenchRow]
    """The best first."""
    answer: str
    """Which model to take."""


class Bench(Struct):
    schema: int
    data: str
    kind: str
    """How the dataset is stored: events, clicks or movielens."""
    models: list[BenchModel]
    tables: list[BenchTable]
    """Of ranked items before that of labels."""


@dataclass
class Group:
    """What can stand in one table: rows of labels, or users with a ranked item."""

    task: str
    split: str
    columns: tuple[str, ...]
    by: str = "users"
    units: int = 0
    catalogue: int = 0
    negatives: int = 0
    repeats: bool | None = None
    rows: dict[str, tuple[BenchModel | None, Metrics, Row | RankedUsers | None]] = field(default_factory=dict)

    def add(self, name: str, model: BenchModel | None, metrics: Metrics, measured: Row | RankedUsers | None) -> None:
        """Another row. A baseline that is there already is the same, unless it was fitted on other features."""
        same = self.rows.get(name)
        differs = same is not None and any(
            abs(same[1].get(one, 0.0) - metrics.get(one, 0.0)) > 1e-9 for one in self.columns
        )
        if same is None or (differs and self.task != ITEMS):
            self.rows[name if same is None else f"{name} again"] = model, metrics, measured


def bench(data: str, kind: str, models: list[BenchModel]) -> Bench:
    """Read the finished runs of the models and put those that are comparable into one table."""
    groups: dict[tuple[Any, ...], Group] = {}
    runs = [(model, Evidence(Path(model.run))) for model in models if model.error is None]
    # Baselines of a model that predicts the next item know more than those of one that predicts labels.
    runs.sort(key=lambda pair: not named(pair[1].result.task).ranks_items)
    for model, run in runs:
        performance, scores = run.result.performance, run.file("scores.json", SavedScores)
        model.seconds = performance.overall.seconds if performance.overall else None
        model.waited = performance.waited.seconds if performance.waited else None
        model.device_bytes = performance.device_bytes
        model.one_ms = run.result.quality.ranking.one_ms if run.result.quality.ranking else None
        if not named(run.result.task).ranks_items:
            _add_labels(groups, model, run, scores)
        _add_ranked(groups, model, run, scores)
    tables = [_table(group) for group in groups.values()]
    return Bench(
        schema=SCHEMA, data=data, kind=kind, models=models, tables=sorted(tables, key=lambda one: one.task != ITEMS)
    )


def _split(run: Evidence) -> tuple[str, str]:
    """What identifies a split, and how it is called."""
    data = run.result.data
    return (data.held_out.digest, data.held_out.kind) if data.held_out else (data.split, data.split)


def _add_labels(groups: dict[tuple[Any, ...], Group], model: BenchModel, run: Evidence, scores: SavedScores) -> None:
    task, quality, seeds = named(run.result.task), run.result.quality, scored_seeds(scores)
    new = Group(task.table, _split(run)[1], task.columns, by=scores.by, units=scores.units)
    group = groups.setdefault((task.table, scores.rows_digest), new)
    group.add(model.workload, model, quality.metrics, labels(quality.metrics, seeds))
    for name, metrics in quality.baselines.items():
        sampled = [scores.baselines[name]] if name in scores.baselines else []
        group.add(name, None, metrics, labels(metrics, sampled))


def _add_ranked(groups: dict[tuple[Any, ...], Group], model: BenchModel, run: Evidence, scores: SavedScores) -> None:
    """Add the ranks of a run to the first table in which enough users are ranked by all, or to a new one."""
    own, facts, ranking = ranked_users(scores), scores.ranking, run.result.quality.ranking
    if own is None or facts is None or ranking is None:
        return
    key, number = (ITEMS, _split(run)[0], candidates(scores)), 0
    while (group := groups.get((*key, number))) and len(_users(group, own)) < FEWEST:
        number += 1
    if group is None:
        group = groups[*key, number] = Group(
            ITEMS, _split(run)[1], RANKED, negatives=facts.negatives, repeats=facts.repeats
        )
    group.catalogue = max(group.catalogue, facts.catalogue)
    group.add(model.workload, model, ranking.metrics, own)
    for name, sampled in facts.baselines.items():
        group.add(name, None, sampled.metrics, RankedUsers.of(facts.keys, [sampled]))


def _users(group: Group, *more: RankedUsers) -> Longs:
    return common([*(side for _, _, side in group.rows.values() if isinstance(side, RankedUsers)), *more])


def _table(group: Group) -> BenchTable:
    rows: list[tuple[str, BenchModel | None, Metrics, Row]] = []
    keys = _users(group) if group.task == ITEMS else np.zeros(0, np.int64)
    for name, (model, metrics, measured) in group.rows.items():
        row = measured.row(keys) if isinstance(measured, RankedUsers) else measured or {}
        rows.append(
            (name, model, {one: value.value for one, value in row.items()} if group.task == ITEMS else metrics, row)
        )
    first, units = group.columns[0], len(keys) if group.task == ITEMS else group.units
    rows = [row for row in rows if first in row[2]]
    rows.sort(key=lambda row: -signed(first, row[2][first]))
    best = next((row for row in rows if row[0] not in ORACLES), rows[0])
    table = BenchTable(
        task=group.task,
        split=group.split,
        scored=_scored(group, units),
        units=units,
        columns=group.columns,
        rows=[
            BenchRow(
                name=name,
                metrics=metrics,
                intervals={one: interval(combined(row[one].seeds)) for one in group.columns if one in row},
                model=model,
                to_best=difference(first, best[0], row, best[3], units=units, by=group.by)
                if name != best[0] and first in row and first in best[3]
                else None,
            )
            for name, model, metrics, row in rows
        ],
        answer="",
    )
    return replace(table, answer=answer(table))


def _scored(group: Group, units: int) -> str:
    if group.task != ITEMS:
        return f"rows of {count(units)} held-out users" if group.by == "users" else f"{count(units)} held-out rows"
    among = f"{count(group.negatives)} drawn items of" if group.negatives else "all"
    own = (
        ""
        if group.repeats is None
        else f", those that the user already had {'included' if group.repeats else 'left out'}"
    )
    return f"one held-out item of each of {count(units)} users among {among} {count(group.catalogue)} items{own}"


def answer(table: BenchTable) -> str:
    """Which model to take, in a sentence."""
    first = table.columns[0]
    models = [row for row in table.rows if row.model]
    rule = next((row for row in table.rows if not row.model and row.name not in ORACLES), None)
    if not models:
        return "no model has a result"
    lead = models[0]
    value = f"{metric(first)} {value_of(lead, first)}"
    if rule is not None and lead.to_best is not None and lead.to_best.baseline == rule.name:
        place = lead.to_best
        if place.standing != "level":
            where = fmt.plus_minus(abs(place.difference), place)
            best = f"no model is as good as {baseline(rule.name)}: {lead.name}, the best, has {value}"
            return f"{best}, {where} {place.standing} it"
        return f"take {lead.name}: {value}, {fmt.stands(place)}, a simple rule"
    parts = [f"take {lead.name}: {value}"]
    parts += [_before(row) for row in ([rule] if rule else []) if row.to_best]
    for row in models[1:]:
        if row.to_best is None:
            continue
        parts.append(_before(row))
        mine, other = lead.model and lead.model.seconds, row.model and row.model.seconds
        if row.to_best.standing == "level" and mine and other and other < SOONER * mine:
            parts[-1] += f", which trains in {fmt.time(1e3 * other)} instead of {fmt.time(1e3 * mine)}"
    return ", ".join(parts[:3])


def _before(row: BenchRow) -> str:
    """How the best row stands beside another one."""
    place = row.to_best
    assert place is not None
    turned = {"above": "below", "below": "above"}.get(place.standing, place.standing)
    return fmt.stands(
        replace(
            place, baseline=row.name, difference=-place.difference, low=-place.high, high=-place.low, standing=turned
        )
    )


def value_of(row: BenchRow, name: str) -> str:
    ends = row.intervals.get(name)
    return fmt.plus_minus(row.metrics[name], ends) if ends else f"{row.metrics[name]:.4f}"
