"""The tables of a bench from the files of finished runs: what stands in one table, and which model to take."""

from __future__ import annotations

from pathlib import Path

import example_bench as examples
import numpy as np
import pytest
from msgspec.structs import replace

from recperf.measure.records import Percentiles
from recperf.runs.bench import Bench, BenchRow, answer, bench
from recperf.runs.bench_report import BenchReport, beside, report, text
from recperf.runs.evidence import Evidence
from recperf.runs.paired import differences
from recperf.runs.report.page import html_of


@pytest.fixture
def made(tmp_path: Path) -> Bench:
    return examples.bench_of(tmp_path)


def test_every_model_stands_in_the_table_of_ranked_items_on_the_users_of_all(made: Bench) -> None:
    items, labels = made.tables
    assert [row.name for row in items.rows] == ["items", "ease", "two", "one", "popularity", "positives"]
    assert (items.task, items.units, labels.task) == ("next items", 500, "labels")
    assert [row.name for row in labels.rows] == ["two", "one", "item_bias"]
    own = items.rows[0]
    ranks = np.array(examples.drawn(3, 600, 0.2)[:500])
    assert own.metrics["ndcg_10"] == pytest.approx(np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0.0).mean())
    assert own.to_best is None
    for row in items.rows[1:]:
        assert row.to_best is not None
        assert (row.to_best.baseline, row.to_best.standing, row.to_best.units) == ("items", "below", 500)
        assert row.to_best.difference == pytest.approx(row.metrics["ndcg_10"] - own.metrics["ndcg_10"])
    assert all(
        row.intervals["ndcg_10"].low < row.metrics["ndcg_10"] < row.intervals["ndcg_10"].high for row in items.rows
    )
    # Replicates of labels are of the same users: both miss alike in each of them.
    two, one = labels.rows[:2]
    assert one.to_best is not None
    assert one.to_best.difference == pytest.approx(-0.02)
    assert one.to_best.high - one.to_best.low == pytest.approx(0.0, abs=1e-9)
    assert two.model is not None
    assert two.model.one_ms == Percentiles(1.0, 2.0, 3.0)
    assert (two.model.seconds, two.model.waited) == (1.0, None)


def test_other_candidates_or_users_or_rows_are_another_table(tmp_path: Path) -> None:
    keys, ranks = list(range(100)), examples.drawn(1, 100, 0.1)
    made = [
        examples.make(tmp_path / "a", "a", keys=keys, rules={}, ranks=ranks, auc=(0.7, 0.6)),
        examples.make(tmp_path / "b", "b", keys=keys, rules={}, ranks=ranks, auc=(0.7, 0.6), repeats=True),
        examples.make(
            tmp_path / "c", "c", keys=[key + 90 for key in keys], rules={}, ranks=ranks, auc=(0.7, 0.6), digest="other"
        ),
        examples.make(tmp_path / "d", "d", keys=[key + 60 for key in keys], rules={}, ranks=ranks, auc=(0.7, 0.6)),
    ]
    tables = bench("shop", "clicks", made).tables
    names = [[row.name for row in table.rows if row.model] for table in tables]
    assert sorted(map(sorted, names)) == [["a", "b", "d"], ["a", "d"], ["b"], ["c"], ["c"]]
    assert [table.units for table in tables if [row.name for row in table.rows if row.model] == ["a", "d"]] == [40]


def test_the_terminal_has_at_most_30_lines_and_the_page_a_picture_and_links(made: Bench, tmp_path: Path) -> None:
    lines = text(made).splitlines()
    assert len(lines) <= 28, "two more name the page and the runs"
    assert max(map(len, lines)) <= 110
    assert lines[2].startswith("  Next items, split random: take items: NDCG@10 0.4")
    assert "lost: no memory" in lines[-1]
    (own,) = (line for line in lines if line.startswith("  items "))
    assert own.split()[-6:] == ["1.00", "s", "300", "MiB", "2.00", "ms"]
    page = html_of(report(made, beside(tmp_path)))
    assert page.count('role="img"') == 2 * len(made.tables)
    assert '<a href="items/report.html">items</a>' in page
    assert "no memory" in page
    frame = BenchReport(**{name: getattr(made, name) for name in made.__struct_fields__}).frame()
    assert set(frame["standing"]) == {"best", "below"}
    assert str(BenchReport(**{name: getattr(made, name) for name in made.__struct_fields__})) == text(made)


def level(row: BenchRow, needed: int | None) -> BenchRow:
    assert row.to_best is not None
    return replace(
        row, to_best=replace(row.to_best, standing="level", needed=needed, difference=-0.01, low=-0.02, high=0.01)
    )


def test_the_answer_names_the_model_and_says_how_sure_that_is(made: Bench) -> None:
    table = made.tables[0]
    items, ease, two, one, *others = table.rows
    assert answer(table).startswith(f"take items: NDCG@10 {items.metrics['ndcg_10']:.3f} ± ")
    assert " above EASE" in answer(table)
    assert items.model is not None
    slow = replace(items, model=replace(items.model, seconds=60.0))
    said = answer(replace(table, rows=[slow, ease, level(two, None), one, *others]))
    assert "no clear difference from two (0.010 ± 0.015), which trains in 1.00 s instead of 1.00 min" in said
    said = answer(replace(table, rows=[items, level(ease, 1800), two, one, *others]))
    assert "not enough users to tell from EASE (500; about 1,800 are needed)" in said
    # Where a simple rule is the best, no model is advertised beside it.
    best = replace(ease, to_best=None)
    worse = replace(two, to_best=replace(two.to_best, baseline="ease"))  # type: ignore[type-var]
    said = answer(replace(table, rows=[best, worse]))
    assert said.startswith("no model is as good as EASE: two, the best, has NDCG@10 0.")
    assert said.endswith(" below it")
    said = answer(replace(table, rows=[best, level(worse, 900)]))
    assert said.startswith("take two: ")
    assert said.endswith("not enough users to tell from EASE (500; about 900 are needed), a simple rule")
    assert answer(replace(table, rows=[best])) == "no model has a result"


def test_two_runs_are_compared_on_what_both_have(made: Bench, tmp_path: Path) -> None:
    one, two, items = (Evidence(tmp_path / name) for name in ("one", "two", "items"))
    labels = {row.metric: row for row in differences(one, two)}
    assert labels["auc"].difference == pytest.approx(0.02)
    assert labels["auc"].baseline == "one"
    assert labels["ndcg_10"].units == 500
    (ranked,) = differences(one, items)
    assert (ranked.metric, ranked.standing, ranked.units) == ("ndcg_10", "above", 500)
    row = next(row for row in made.tables[0].rows if row.name == "one").to_best
    assert row is not None
    assert (ranked.low, ranked.high) == (pytest.approx(-row.high), pytest.approx(-row.low))
    (tmp_path / "one" / "scores.json").unlink()
    assert differences(Evidence(tmp_path / "one"), items) == []
