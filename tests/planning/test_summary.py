"""Which numbers of ranks a plan tries and advises, what it offers, and tables in tiers: a small case by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed
from toy_plan import PLAIN, WIRES, table, work, workload

from recperf.measure.cost import Cost
from recperf.planning import advice, skew, tiers
from recperf.planning.devices import STORES, Store
from recperf.planning.predict import Prediction, predict
from recperf.planning.sharding import Parallelism
from recperf.planning.summary import Question, Setting, plan
from recperf.planning.work import Spread

LARGE = table("large", rows=800_000, ids=1.0, distinct=lambda samples: 1.0)
"""12.8 MB of rows and 3.2 MB of state."""
NOTHING_ELSE: dict[str, Any] = {
    "tables": (LARGE,), "dense_parameters": 0, "activations": lambda samples: 0, "input_bytes": lambda samples: 0
}  # fmt: skip
SMALL = replace(PLAIN, memory_bytes=5 << 20)
"""4.98 MB of it can be used: four ranks are enough."""


def setting(counted: dict[str, Any] | None = None, **fields: Any) -> Setting:
    one = workload(fields.pop("batch_size", 64), work(**(NOTHING_ELSE | (counted or {}))))
    of_workload = {name: fields.pop(name) for name in ("published_samples",) if name in fields}
    values: dict[str, Any] = {
        "workload": replace(one, **of_workload), "device": SMALL, "network": WIRES, "parallelism": Parallelism(),
        "question": Question(), "skew": lambda batch, ranks: None, **fields,
    }  # fmt: skip
    return Setting(**values)


def test_the_search_doubles_until_some_fit_and_twice_more() -> None:
    advised, points = plan(setting(question=Question(samples_to_target=6400.0, startup_seconds=7.0), price=3.0))
    assert [(point.ranks, point.nodes, point.node_ranks, point.fits) for point in points] == [
        (1, 1, (1, 1), False), (2, 1, (2, 2), False), (4, 1, (4, 4), True), (8, 2, (4, 4), True), (16, 4, (4, 4), True)
    ]  # fmt: skip
    assert (advised.tried_ranks, advised.worse_ranks) == (16, None)
    assert advised.configuration is not None
    assert (advised.configuration.ranks, advised.configuration.scaling) == (4, 1.0)
    for point in points:
        assert (point.rank_batch, point.global_batch) == (64 // point.ranks, 64)
        (one,) = point.tables
        assert (one.ranks, one.bytes, one.most_bytes_a_rank) == (point.ranks, 12_800_000, 12_800_000 // point.ranks)
        if point.step is None:
            assert (point.target, point.scaling, point.memory.largest_global_batch) == (None, None, 0)
            continue
        four = points[2].step
        assert four is not None
        assert point.scaling == pytest.approx(point.step.samples_per_s / point.ranks / (four.samples_per_s / 4))
        assert point.target is not None
        assert point.target.cost is not None
        # 100 steps and the start, for 3 an hour on each device.
        assert point.target.seconds.value == pytest.approx(100 * point.step.value + 7)
        assert point.target.cost.value == pytest.approx(3 * point.ranks * point.target.seconds.value / 3600)


def test_the_search_ends_at_a_sample_a_rank_or_at_1024() -> None:
    """Activations that no number of ranks makes smaller."""
    full = {"activations": lambda samples: 1 << 30}
    advised, points = plan(setting(full, batch_size=8))
    assert [point.ranks for point in points] == [1, 2, 4, 8]
    assert (advised.configuration, advised.tried_ranks, advised.changes) == (None, 8, [])
    by_rank, _ = plan(setting(full, parallelism=Parallelism(rank_batch=2)))
    assert by_rank.tried_ranks == 1024
    # Asked for 2: the points are these, the advice is what more would do.
    asked, points = plan(setting(), [2])
    assert [point.ranks for point in points] == [2]
    assert asked.configuration is not None
    assert (asked.configuration.ranks, asked.tried_ranks) == (4, 4)
    assert plan(setting(), [4, 8])[0].tried_ranks == 8
    # 160 bytes of each sample beside 4 MB of rows on each of 4 ranks.
    some = setting({"activations": lambda samples: 100_000 * samples}, batch_size=64)
    memory = plan(some, [4])[1][0].memory
    assert memory.largest_global_batch == 4 * 9


def test_failures_come_more_often_on_more_devices() -> None:
    question = Question(mtbf_hours=100.0, checkpoint_seconds=2.0, restart_seconds=30.0)
    points = plan(setting(question=question))[1]
    for point in points[2:]:
        assert point.failures is not None
        assert point.failures.mtbf_s == pytest.approx(360_000 / point.ranks)
        assert point.failures.interval_s == pytest.approx((2 * 2.0 * 360_000 / point.ranks) ** 0.5)
    assert points[0].failures is None
    defaults = Question()
    assert (defaults.checkpoint_seconds, defaults.restart_seconds) == (60.0, 300.0)


def test_smaller_published_batches_are_tried_where_the_usual_one_does_not_fit() -> None:
    one = setting(parallelism=Parallelism(rank_batch=100), global_batches=(40, 400, 399, 3))
    assert [each.rank_batch for each in one.parallelisms(4)] == [100, 99, 10]
    assert [each.rank_batch for each in one.parallelisms(40)] == [100, 10, 9, 1]
    some = replace(one, workload=workload(64, work(**NOTHING_ELSE | {"activations": lambda samples: 50_000 * samples})))
    (point,) = plan(some, [4])[1]
    assert (point.rank_batch, point.global_batch, point.fits) == (10, 40, True)


@pytest.mark.parametrize(
    ("calls", "published", "offered"), [(15, {}, False), (17, {}, True), (17, {64: Spread(1.0, 1.0, 1.0)}, False)]
)
def test_a_batch_four_times_as_large_is_offered_where_it_trains_half_as_many_again(
    calls: int, published: dict[int, Spread], offered: bool
) -> None:
    """A sample of a rank takes 1 ms; calls hide 10 samples and more, of 40 they hide some."""
    parts = {"parts": lambda samples: {"forward": Cost(samples * 10**9, 0)}, "calls": calls}
    one = setting(parts, batch_size=10, device=replace(PLAIN, call_s=1e-3), published_samples=published)
    changes = plan(one, [1])[0].changes
    assert [change.options for change in changes] == ["--train.batch-size 40"] * offered
    if offered:
        # 4 x 17 ms over 40 ms.
        assert changes[0].step.samples_per_s == pytest.approx(40 / 40e-3, rel=1e-6)
    most = replace(one, workload=replace(one.workload, batch_size=1 << 24, published_samples={}))
    assert plan(most, [1])[0].changes == []


def test_less_favourable_ids_may_need_more_ranks() -> None:
    def ids(count: float) -> Any:
        each = np.full(1, count)
        return lambda batch, ranks: skew.Skew(
            {"large": skew.PlannedTraffic(*(np.full(ranks, float(each[0]) / ranks) for _ in range(3)))}, "stated"
        )

    for count, enough in ((1.0, 4), (10**5, 8), (10**7, 0)):
        advised, _ = plan(setting(worse_skew=ids(count), batch_size=16))
        assert advised.worse_ranks == enough, count


def of_many(parallelism: Parallelism, dim: int = 1000, **fields: Any) -> Prediction:
    named = tuple(table(f"T{number}", rows=1000 - 4 * number, dim=8) for number in (1, 2, 3, 4))
    few = table("few", rows=5, dim=dim)
    return predict(workload(8, work(tables=(*named, few), **fields)), 4, PLAIN, WIRES, parallelism)


def test_remedies_are_tried_from_the_smallest_change_on() -> None:
    for dim, largest in ((1000, ["few", "T1", "T2", "T3", "T4"]), (10, ["T1", "T2", "T3", "T4", "few"])):
        plan_ = of_many(Parallelism(sharding="row"), dim)
        assert plan_.memory.largest_tables == largest
        expected = ["--distributed.all-to-all fp16", "--distributed.sharding auto"]
        for count in (1, 2, 3, 4):
            for kind in ("row", "table", "column"):
                # Five rows are too few for blocks on four ranks.
                if kind != "row" or "few" not in largest[:count]:
                    named = ",".join(f"{name}={kind}" for name in largest[:count])
                    expected.append(f"--distributed.sharding row,{named}")
        expected.append("--distributed.sharding auto --distributed.all-to-all fp16")
        assert [options for options, _ in advice.remedies(plan_, PLAIN)] == expected
    encoded = [one for one, _ in advice.remedies(of_many(Parallelism(sharding="auto", all_to_all="bf16")), PLAIN)]
    assert encoded[0] == "--distributed.sharding row"
    assert not any("all-to-all" in one for one in encoded)
    assert list(advice.remedies(plan_, replace(PLAIN, memory_bytes=1 << 20))) == []
    copied = predict(workload(8, work(tables=(table(copied="it must"),))), 4, PLAIN, WIRES)
    assert list(advice.remedies(copied, PLAIN)) == []


def test_improvements_are_those_of_two_per_cent_and_the_best_three() -> None:
    slow = Parallelism(sharding="row", pipeline=False, overlap="off", balance=False)
    plan_ = of_many(slow, sample_work=lambda tokens_B: tokens_B)
    shares = iter((0.981, 0.98, 0.5, 0.7, 0.6, 0.9))
    tried: list[Parallelism] = []

    def predicted(parallelism: Parallelism) -> Prediction:
        tried.append(parallelism)
        seconds = next(shares) * plan_.step.value
        memory = changed(plan_.memory, verdict="tight" if len(tried) == 3 else "fits")
        return replace(plan_, step=changed(plan_.step, value=seconds), memory=memory)

    better = advice.improvements(plan_, predicted)
    assert [one.all_to_all for one in tried] == ["fp16", *5 * ["fp32"]]
    assert [one.pipeline for one in tried].index(True) == 1
    assert [one.overlap for one in tried].index("on") == 2
    assert [one.balance for one in tried].index(True) == 3
    assert [one.sharding for one in tried] == [*4 * ["row"], "auto", "table"]
    # The third does not fit, the first is too little.
    assert [options for options, _ in better] == [
        "--distributed.sharding auto", "--distributed.balance", "--distributed.sharding table"
    ]  # fmt: skip
    shares = iter((0.981, 0.98, 0.99, 1.0, 1.5, 0.9799))
    tried.clear()
    assert [options for options, _ in advice.improvements(plan_, predicted)] == [
        "--distributed.sharding table", "--distributed.pipeline"
    ]  # fmt: skip
    best = of_many(Parallelism(sharding="row,T1=table", all_to_all="fp16", overlap="on"))
    shares, options = iter(3 * [0.5]), []
    tried.clear()
    plan_ = best
    options = [options for options, _ in advice.improvements(best, predicted)]
    assert options == ["--distributed.sharding auto", "--distributed.sharding row"], "the third of them does not fit"
    alone = replace(best, ranks=1)
    assert advice.improvements(alone, predicted) == []


A = table("a", rows=800, dim=4, distinct=lambda samples: 2 + samples / 2)
B = table("b", rows=100, dim=4, ids=1.0, vectors=1.0, distinct=lambda samples: 1 + samples / 2)
DISK = Store(name="disk", limit="the disk", reads_per_s=10.0, read_bytes_per_s=200.0, write_bytes_per_s=50.0, origin="")


def tiered(**fields: Any) -> tiers.PlannedTiers:
    plan_ = predict(workload(8, work(tables=(A, B))), 2, PLAIN, WIRES, Parallelism(sharding="row,b=table"))
    return tiers.price(plan_, replace(PLAIN, host_bytes_per_s=1e6), **fields)


def test_tiers_move_the_rows_that_a_cache_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has half of a and all of b; a step uses 3 and 5 rows of 20 bytes there."""
    monkeypatch.setitem(STORES, "disk", DISK)
    priced = tiered(served=0.75, cache_bytes=160, node_ranks=2)
    assert (priced.ranks, priced.rank_batch, priced.table_bytes, priced.cache_bytes) == (2, 4, 10_000.0, 160.0)
    assert (priced.rows_per_step, priced.served) == (pytest.approx(8.0), 0.75)
    disk = priced.stores["disk"]
    assert (disk.rows, disk.bytes_each_way) == (pytest.approx(2.0), pytest.approx(40.0))
    # For both ranks of the node 2 reads at 10 a second, 40 bytes at 200 and 40 at 50.
    assert disk.parts["the disk"] == pytest.approx(2 * (0.2 + 0.2 + 0.8))
    assert disk.parts["the link"] == pytest.approx(40e-6)
    assert (disk.limit, disk.samples_per_s) == ("the disk", pytest.approx(8 / 2.4))
    assert (disk.step.value, disk.step.low, disk.step.high) == pytest.approx((2.4, 2.4, 2.4))
    assert tiered(served=0.75, cache_bytes=160).stores["disk"].parts["the disk"] == pytest.approx(1.2)
    small = tiered(served=0.75, cache_bytes=159)
    assert (small.served, small.stores, small.cache_bytes) == (0.0, {}, 159.0)
    assert tiered(cache_bytes=10**6).cache_bytes == 10_000.0
    whole = tiered()
    assert (whole.served, whole.cache_bytes) == (1.0, 10_000.0), "there is room for all of it"
    # Estimated: one per cent more or fewer rows of 8.
    estimated = tiered(cache_bytes=6000)
    rows, band = estimated.stores["disk"], estimated.stores["disk"].step
    assert rows.rows == pytest.approx(8 * (1 - estimated.served))
    each = band.value / rows.rows
    assert (band.low, band.high) == pytest.approx((each * (rows.rows - 0.08), each * (rows.rows + 0.08)))
    assert whole.stores["disk"].step.high == pytest.approx(0.08 * (0.1 + 20 / 200 + 20 / 50))


def test_the_memory_that_the_rest_leaves_is_the_cache() -> None:
    plan_ = predict(workload(8, work(tables=(A, B))), 1, PLAIN, WIRES)
    beside = plan_.memory.without_reuse_bytes - 900 * 20
    for left in (10_000.0, -5.0):
        memory = changed(plan_.memory, limit_bytes=beside + left)
        assert tiers.price(replace(plan_, memory=memory), PLAIN).cache_bytes == pytest.approx(max(0.0, left))


def test_a_cache_holds_the_rows_of_the_last_steps() -> None:
    """Equally popular rows: the share of them that it has room for. Two kinds: step by step."""
    for slots in (1.0, 37.0, 99.5):
        assert tiers.served_by(np.array([100.0]), np.array([0.03]), slots) == pytest.approx(slots / 100)
    assert tiers.served_by(np.array([100.0]), np.array([0.03]), 100.0) == 1.0
    count, use = np.array([10.0, 100.0]), np.array([0.5, 0.1])

    def held(steps: int) -> float:
        return float((count * (1 - (1 - use) ** steps)).sum())

    def served(steps: int) -> float:
        return float((count * use * (1 - (1 - use) ** steps)).sum() / (count * use).sum())

    for slots in (5.0, held(2), 60.0):
        low = next(steps for steps in range(100) if held(steps + 1) > slots)
        part = (slots - held(low)) / (held(low + 1) - held(low))
        expected = (1 - part) * served(low) + part * served(low + 1)
        assert tiers.served_by(count, use, slots) == pytest.approx(expected, rel=1e-9)
    law = skew.zipf(work(tables=(A,)), 4, 2, 1.1)
    plan_ = predict(workload(8, work(tables=(A,))), 2, PLAIN, WIRES, Parallelism(sharding="row"), skew=law)
    share = np.arange(1.0, 801) ** -1.1
    used = 0.5 * (1 - (1 - share / share.sum()) ** 16).sum()
    assert tiers.price(plan_, PLAIN, served=0.5).rows_per_step == pytest.approx(used, rel=1e-6)


def test_a_plan_prices_tiers_where_one_device_is_too_small() -> None:
    rows = {"tables": (replace(LARGE, distinct=lambda samples: samples / 4),)}
    advised, _ = plan(setting(rows, question=Question(served=0.5, samples_to_target=640.0, startup_seconds=0.0)))
    assert advised.tiers is not None
    assert (advised.tiers.ranks, advised.tiers.rank_batch, advised.tiers.served) == (1, 64, 0.5)
    host = advised.tiers.stores["host"]
    assert host.target is not None
    assert host.target.seconds.value == pytest.approx(10 * host.step.value)
    assert plan(setting(rows, device=PLAIN))[0].tiers is None, "one device is enough"
    asked = plan(setting(rows, device=PLAIN, tiered=True), [2, 4])[0].tiers
    assert asked is not None
    assert asked.ranks == 2
    either = plan(setting(rows, tiered=True))[0].tiers
    assert either is not None
    assert either.ranks == 1
    copies = {"tables": (table(copied="it must"),)}
    assert plan(setting(copies, device=PLAIN, tiered=True))[0].tiers is None
