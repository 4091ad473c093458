"""The figures that a plan's report shows: of three numbers of ranks with round values."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from recperf.planning.memory import Memory
from recperf.planning.predict import PARTS, Band, PredictedStep
from recperf.planning.report import report_of, side_by_side, summary
from recperf.planning.summary import Faster, Plan, PlanAdvice, Point, TablePlace
from recperf.planning.target import Failures, PlannedTraining, TargetSamples
from recperf.planning.tiers import PlannedTiers, StoredTables
from recperf.runs.report.blocks import Cell, Figure, Report, Table, Text

MIB = 1 << 20
NONE = "–"


def step(ms: float, rate: float, **parts: float) -> PredictedStep:
    seconds = ms / 1e3
    left = dict.fromkeys(PARTS, 0.0) | {"dense forward": 0.75 * seconds, "lookup": 0.25 * seconds}
    return PredictedStep(
        seconds, 0.8 * seconds, 1.25 * seconds, samples_per_s=rate, parts={n: 2 * s for n, s in left.items()},
        exposed=left, limit="compute", shares={"compute": 0.625, "bandwidth": 0.375},
    )  # fmt: skip


def memory(**fields: Any) -> Memory:
    values: dict[str, Any] = {
        "verdict": "fits", "fullest_rank": 1, "phase": "layers", "largest_tables": ["b", "a"], "bytes": 5.0 * MIB,
        "without_reuse_bytes": 6.0 * MIB, "limit_bytes": 8.0 * MIB, "device_bytes": 10 * MIB,
        "parts": {"tables": [1.0 * MIB, 4.0 * MIB], "dense": [1.0 * MIB, 1.0 * MIB]},
    }  # fmt: skip
    return Memory(**values | fields)


def training(hours: float, *, extrapolated: bool = False, cost: float | None = None) -> PlannedTraining:
    seconds = Band(3600 * hours, 3000 * hours, 4500 * hours)
    return PlannedTraining(
        samples=TargetSamples(2e6, 1.5e6, 2.5e6, origin="published", extrapolated=extrapolated), seconds=seconds,
        steps_seconds=7200.0, evaluations=3.4, evaluations_seconds=600.0, startup_seconds=25.0,
        cost=None if cost is None else Band(cost, 0.75 * cost, 1.25 * cost),
    )  # fmt: skip


def point(ranks: int, **fields: Any) -> Point:
    values: dict[str, Any] = {
        "ranks": ranks, "nodes": 1, "node_ranks": (ranks, ranks), "rank_batch": 2000 // ranks, "global_batch": 2000,
        "fits": True, "options": "", "memory": memory(), "origins": {"work": "counted"},
        "tables": [TablePlace(name="a", kind="row", ranks=ranks, bytes=3 * MIB, most_bytes_a_rank=2 * MIB, why="so")],
        "step": step(100.0, 20_000.0), "scaling": 0.5, **fields,
    }  # fmt: skip
    return Point(**values)


TOO_FEW = point(
    1, step=None, fits=False, scaling=None,
    memory=memory(verdict="does not fit", without_reuse_bytes=9.5 * MIB, largest_global_batch=500),
)  # fmt: skip
TWO = point(2, target=training(2.0, cost=40.0))
FOUR = point(4, nodes=2, node_ranks=(2, 2), step=step(80.0, 20_400.0), target=training(1.0, extrapolated=True))


def planned(*points: Point, advised: Point | None = TWO, **fields: Any) -> Plan:
    of_advice = {
        name: fields.pop(name) for name in ("changes", "worse_ranks", "tiers", "tried_ranks") if name in fields
    }
    advice: dict[str, Any] = {"tried_ranks": 1024, "changes": [], "worse_ranks": None, "tiers": None, **of_advice}
    values: dict[str, Any] = {
        "workload": "toy", "preset": "large", "command": "run toy --train.lr 1", "device": "card", "network": "wires",
        "currency": "USD", "points": list(points or (TOO_FEW, TWO, FOUR)),
        "advice": PlanAdvice(configuration=advised, **advice), **fields,
    }  # fmt: skip
    return Plan(**values)


def facts(plan: Plan) -> dict[str, str]:
    return {name: fact.text if isinstance(fact, Cell) else fact for name, fact in report_of(plan).facts}


def blocks(report: Report, key: str) -> list[Any]:
    (section,) = (one for one in report.sections if one.key == key)
    return section.blocks


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def test_every_number_of_ranks_has_a_row() -> None:
    report = report_of(planned())
    table, figure = blocks(report, "ranks")
    assert isinstance(table, Table)
    assert table.head == (
        "ranks", "global batch", "fullest rank", "step", "samples/s", "scaling", "limit", "to target", "cost",
        "fits with",
    )  # fmt: skip
    step_ = ["100 ms (80.0 to 125)", "20,000", "50%", "compute 62%"]
    assert texts(table) == [
        ["1", "2,000", "needs 1.5 MiB more on rank 1", *6 * [NONE], "--train.batch-size 500"],
        ["2", "2,000", "6 MiB", *step_, "2.00 h (1.67 to 2.50)", "40.0 USD (30.0 to 50.0)", ""],
        ["4", "2,000", "6 MiB", "80.0 ms (64.0 to 100)", "20,400", *step_[2:], "~1.00 h (0.833 to 1.25)", NONE, ""],
    ]
    assert [table.head[at] for at in table.left] == ["limit", "fits with"]
    assert table.caption.startswith("~")
    assert isinstance(figure, Figure)
    assert [one.key for one in report.sections] == ["ranks", "step", "memory", "tables", "sources"]
    assert [one.fold for one in report.sections] == [False, True, True, True, True]
    plain = planned(replace(TOO_FEW, memory=memory(verdict="tight")), point(2))
    table, _ = blocks(report_of(plain), "ranks")
    # Nothing stands under time, cost and options of these.
    assert table.head[-2:] == ("limit", "fits with")
    assert texts(table)[0][-1] == "no batch size"
    assert table.caption == ""
    (alone,) = blocks(report_of(planned(TOO_FEW, advised=None)), "ranks")
    assert texts(alone) == [["1", "2,000", "needs 1.5 MiB more on rank 1", "--train.batch-size 500"]]


def test_bars_are_the_exposed_parts_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("recperf.planning.report.stacked", lambda bars, unit: drawn.append((bars, unit)))
    _, figure = blocks(report_of(planned()), "ranks")
    figure.draw()
    ((bars, unit),) = drawn
    assert unit == "ms"
    assert [label for label, _ in bars] == ["2 ranks", "4 ranks"]
    values = [(part.name, part.value, part.tone) for part in bars[0][1]]
    # Colours by the place of a part among all, so that they are the same in every bar.
    assert values == [("lookup", pytest.approx(25.0), "embedding"), ("dense forward", pytest.approx(75.0), "top")]


def test_the_details_are_those_of_the_advised_number() -> None:
    report = report_of(planned())
    (table,) = blocks(report, "step")
    rows = {row[0]: row[1:4] for row in texts(table)}
    assert rows["dense forward"] == ["150 ms", "75.0 ms", "75.0%"]
    assert rows["lookup"] == ["50.0 ms", "25.0 ms", "25.0%"]
    assert rows["calls"] == ["0", "0", "0.0%"]
    text, table = blocks(report, "memory")
    assert isinstance(text, Text)
    for figure in ("rank 1 peaks at 5 MiB", "6 MiB if no", "8 MiB of 10 MiB", "largest table is b"):
        assert figure in text.text
    assert texts(table) == [
        ["tables", "4 MiB", "2.5 MiB", "1 MiB"],
        ["dense", "1 MiB", "1 MiB", "1 MiB"],
        ["total", "5 MiB", "3.5 MiB", "2 MiB"],
    ]
    (table,) = blocks(report, "tables")
    assert texts(table) == [["a", "row", "2", "3 MiB", "2 MiB", "so"]]
    (table,) = blocks(report, "sources")
    sources = dict(texts(table))
    assert sources["target"] == "2.00 h of steps, 10.0 min of 3 evaluations, 25.0 s of start-up"
    assert (sources["work"], sources["samples"]) == ("counted", "to the target: published")
    (section,) = (one for one in report.sections if one.key == "step")
    assert section.title == "one step: 2 ranks, 1,000 samples on each"
    single = point(1, rank_batch=1)
    (section,) = (one for one in report_of(planned(single, advised=single)).sections if one.key == "step")
    assert section.title == "one step: 1 rank, 1 sample on each"
    assert "target" not in dict(texts(blocks(report_of(planned(single, advised=single)), "sources")[0]))


def test_the_facts_have_the_figures_of_the_advised_number() -> None:
    found = facts(planned(worse_ranks=4))
    assert found["devices"] == "2 card are enough if ids repeat as published, 4 if they do not; 1 is too few."
    assert found["run"] == "recperf run toy --train.lr 1 --ranks 2 --train.batch-size 2000"
    assert found["step"] == "100 ms (80.0 to 125), 20,000 (16,000 to 25,000) samples/s"
    assert found["memory"] == "5 MiB to 6 MiB of 8 MiB on the fullest rank"
    assert found["target"] == ("2.00 h (1.67 to 2.50) and 40.0 USD (30.0 to 50.0) for 2 M (1.5 M to 2.5 M) samples")
    assert "62%" in found["limit"]
    assert "dense forward, 75.0 ms" in found["limit"]
    # 20,400 of 20,000 samples/s are 2 % more: just enough to be faster.
    assert found["change"] == "4 card take ~1.00 h (0.833 to 1.25) to the target"
    assert "failures" not in found
    slower = replace(FOUR, step=step(80.0, 20_399.0))
    assert facts(planned(TOO_FEW, TWO, slower))["change"] == "4 card are no faster"
    untimed = facts(planned(TOO_FEW, point(2), replace(FOUR, target=None), advised=point(2)))
    assert untimed["change"] == "4 card train 20,400 samples/s"
    assert "--samples-to-target" in untimed["target"]
    assert "change" not in facts(planned(TOO_FEW, TWO))
    assert "change" not in facts(planned(TOO_FEW, TWO, replace(FOUR, fits=False)))
    priceless = replace(TWO, target=training(2.0), memory=memory(bytes=6.0 * MIB))
    assert facts(planned(advised=priceless))["target"].endswith("samples; --price 4USD adds the cost")
    assert facts(planned(advised=priceless))["memory"].startswith("6 MiB of 8 MiB")
    same = facts(planned(worse_ranks=2))["devices"]
    assert same == "2 card are enough; 1 is too few."
    never = facts(planned(worse_ranks=0))["devices"]
    assert never == "2 card are enough if ids repeat as published; 1 is too few."


def test_failures_lengthen_the_training_by_their_goodput() -> None:
    failing = Failures(mtbf_s=7200.0, interval_s=120.0, goodput=0.8)
    found = facts(planned(advised=replace(TWO, failures=failing)))["failures"]
    assert found == "one every 2.00 h: with a checkpoint every 2.00 min the goodput is 80.0%, 2.50 h to the target"
    for one in (replace(TWO, failures=replace(failing, goodput=0.0)), point(2, failures=failing)):
        assert "to the target" not in facts(planned(advised=one))["failures"]


def test_changes_are_offered_with_what_they_gain() -> None:
    faster = Faster(options="--fast", step=step(50.0, 30_000.0))
    found = facts(planned(changes=[faster]))["change"]
    assert found.startswith("--fast: 1.50 times the samples/s, 50.0 ms (40.0 to 62.5) a step; 4 card take")


def test_commands_start_every_node() -> None:
    options = "--distributed.sharding row --distributed.all-to-all fp16"
    command = "run toy --distributed.sharding=table --distributed.overlap off"
    two = facts(planned(advised=replace(TWO, options=options), command=command))
    assert two["run"] == f"recperf run toy --distributed.overlap off --ranks 2 --train.batch-size 2000 {options}"
    assert two["devices"].startswith(f"2 card are enough with {options}; ")
    single = point(1)
    found = facts(planned(single, advised=single))
    assert found["run"] == "recperf run toy --train.lr 1 --train.batch-size 2000"
    assert found["devices"] == "1 card is enough."
    found = facts(planned(advised=FOUR))
    torchrun = "torchrun --nnodes 2 --nproc-per-node"
    assert found["run"] == f"on each node: {torchrun} 2 -m recperf run toy --train.lr 1 --train.batch-size 2000"
    assert found["devices"] == "4 card on 2 nodes are enough; 2 are too few."
    uneven = facts(planned(advised=replace(FOUR, node_ranks=(3, 1))))["run"]
    assert uneven.startswith(f"on each node, on the last one with --nproc-per-node 1: {torchrun} 3 -m")
    cells = {name: fact.tone for name, fact in report_of(planned()).facts if isinstance(fact, Cell)}
    assert cells == {"run": "code"}


def test_where_no_number_is_enough_a_smaller_batch_may_be() -> None:
    none = planned(TOO_FEW, advised=None, tried_ranks=2048)
    assert facts(none)["devices"] == (
        "No number of card up to 2,048 is enough for 2,000 samples on each; 1 are with --train.batch-size 500."
    )
    bare = replace(TOO_FEW, memory=memory(largest_global_batch=0))
    assert "choose a device with more memory" in facts(planned(bare, advised=None))["devices"]
    (section,) = side_by_side([planned(), none])
    (table,) = section.blocks
    assert isinstance(table, Table)
    rows = texts(table)
    assert (rows[0][:3], rows[1][:3]) == (["card", "2", "2,000"], ["card", "none up to 2,048", NONE])
    assert set(rows[1][2:]) == {NONE}
    assert len(rows[1]) == len(table.head)
    assert summary([planned(), none]).count("card: ") == 2


def tiers(ranks: int, **fields: Any) -> PlannedTiers:
    stored = StoredTables(
        rows=100.0, bytes_each_way=3.0 * MIB, parts={"the device": 0.3, "the link": 0.1, "host memory": 0.2},
        step=Band(0.3, 0.25, 0.375), samples_per_s=6666.6, limit="the device", target=training(6.0),
    )  # fmt: skip
    values: dict[str, Any] = {
        "ranks": ranks, "rank_batch": 2000, "table_bytes": 64.0 * MIB, "cache_bytes": 4.0 * MIB,
        "rows_per_step": 1234.0, "served": 0.875, "origin": "stated", "stores": {"host": stored}, **fields,
    }  # fmt: skip
    return PlannedTiers(**values)


def test_tables_elsewhere_are_an_alternative() -> None:
    found = facts(planned(tiers=tiers(1)))
    assert found["or"] == (
        "1 card with its tables in 64 MiB of host memory: 300 ms a step, 6.00 h (5.00 to 7.50) to the target"
    )
    placed = "--tables.placement host"
    assert found["run it"] == f"recperf run toy --train.lr 1 --train.batch-size 2000 {placed}"
    several = facts(planned(tiers=tiers(2), advised=None, command=f"run toy {placed}"))
    assert several["or"].startswith("2 card with their tables in 64 MiB of host memory each: 300 ms a step")
    assert several["run it"] == f"recperf run toy {placed} --train.batch-size 4000 --ranks 2"
    assert "or" not in facts(planned(tiers=tiers(1, stores={})))
    *_, text, table = blocks(report_of(planned(tiers=tiers(1))), "memory")
    for figure in ("one device", "64 MiB of rows", "4 MiB, which serves 87.5% of 1,234 rows"):
        assert figure in text.text
    # The slower of link and store takes 200 ms.
    assert texts(table) == [["host", "3 MiB", "200 ms", "300 ms (250 to 375)", "6,667", "the device"]]
    *_, text = blocks(report_of(planned(tiers=tiers(3, stores={}))), "memory")
    assert "3 devices, each" in text.text
