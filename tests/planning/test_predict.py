"""Seconds of a step: arithmetic one can do by hand, and directions that must hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from toy_plan import PLAIN, WIRES

from recperf.planning import devices as collectives
from recperf.planning import skew, target
from recperf.planning.devices import KNOWN, NETWORKS
from recperf.planning.predict import EXCHANGE_CALLS, Band, predict
from recperf.planning.sharding import Parallelism
from recperf.planning.summary import Question, Setting, plan
from recperf.planning.work import Spread
from recperf.workloads.dlrm.config import DLRM, experiment_plain
from recperf.workloads.dlrm_v4.config import DLRM_V4, laptop, mlperf
from recperf.workloads.dlrm_v4.plan import planned
from recperf.workloads.micro_dlrm.config import MICRO_DLRM
from recperf.workloads.micro_dlrm_dram.config import MICRO_DLRM_DRAM


def test_an_all_to_all_by_hand() -> None:
    """8 ranks, 4 a node: of 8 GB 3/8 go to neighbours at 10 GB/s and 4/8 to the other node at 1 GB/s."""
    full_R, nothing_R = np.full(8, 8e9), np.zeros(8)
    assert collectives.all_to_all(full_R, nothing_R, PLAIN, WIRES) == pytest.approx(4.0 + 1e-4 + 1e-3)
    one_R = nothing_R.copy()
    one_R[3] = 8e9
    assert collectives.all_to_all(nothing_R, one_R, PLAIN, WIRES) == pytest.approx(4.0 + 1e-4 + 1e-3), (
        "all wait for one"
    )
    assert collectives.all_to_all(np.full(4, 8e9), np.zeros(4), PLAIN, WIRES) == pytest.approx(0.6 + 1e-4)
    assert collectives.all_to_all(np.full(1, 8e9), np.zeros(1), PLAIN, WIRES) == 0


def test_an_all_reduce_by_hand() -> None:
    assert collectives.all_reduce(4e9, 1, PLAIN, WIRES) == 0
    assert collectives.all_reduce(4e9, 4, PLAIN, WIRES) == pytest.approx(2 * 0.75 * 0.4 + 4e-4)
    assert collectives.all_reduce(4e9, 8, PLAIN, WIRES) == pytest.approx(2 * 0.75 * 0.4 + 4e-4 + 2 * 0.5 * 1.0 + 2e-3)
    # Two ranks on the second node have half of the bytes each.
    assert collectives.all_reduce(4e9, 6, PLAIN, WIRES) == pytest.approx(2 * 0.75 * 0.4 + 4e-4 + 2 * 0.5 * 2.0 + 2e-3)


def test_a_hot_rank_slows_everyone_and_dedup_helps() -> None:
    config = mlperf()
    config = replace(config, model=replace(config.model, row_scale=0.01))
    ids = skew.zipf(planned(config).work(), 256, 16, 1.2)

    def seconds(*, even: bool, dedup: bool) -> float:
        parallelism = Parallelism(rank_batch=256, sharding="row", dedup=dedup)
        return predict(
            planned(config), 16, KNOWN["h200"], parallelism=parallelism, skew=None if even else ids
        ).step.value

    assert seconds(even=False, dedup=False) > 1.5 * seconds(even=True, dedup=False)
    assert seconds(even=False, dedup=True) < 0.5 * seconds(even=False, dedup=False)


@pytest.mark.parametrize("workload", [DLRM_V4, DLRM, MICRO_DLRM, MICRO_DLRM_DRAM], ids=lambda one: one.name)
def test_every_preset_has_a_plan(workload) -> None:  # type: ignore[no-untyped-def]
    for preset in workload.presets.values():
        plan = predict(workload.planned(preset()), 4, KNOWN["h200"])
        assert 0 < plan.step.value < 10
        assert plan.memory.bytes > 0
        assert sum(plan.step.exposed.values()) == pytest.approx(plan.step.value)
        if all(one.kind == "data-parallel" for one in plan.placed):
            assert plan.step.parts["rows all-to-all"] == 0, "ranks that have all rows ask for none"
        assert {"work", "device", "efficiency", "network", "ids", "calls"} <= plan.origins.keys()


def test_a_step_is_never_shorter_than_its_calls() -> None:
    """A GPU computes while the host calls operators. One process replays a small step as a graph."""
    work = planned(laptop()).work()
    calls = work.calls * 1e-3
    gpu = predict(planned(laptop()), 2, replace(PLAIN, call_s=1e-3))
    assert gpu.step.value == pytest.approx(calls + EXCHANGE_CALLS * 1e-3, rel=0.01)
    graph = predict(planned(laptop()), 1, replace(PLAIN, call_s=1e-3, kernel_s=1e-4))
    assert graph.step.value == pytest.approx(work.kernels(graph.global_batch, PLAIN.threads) * 1e-4, rel=0.01)
    assert "CUDA graph" in graph.origins["calls"]
    fused = predict(DLRM.planned(DLRM.presets["experiment"]()), 1, replace(PLAIN, kernel_s=1e-4)).step
    assert fused.value == pytest.approx(19 * 1e-4 + sum(fused.exposed.values()) - fused.exposed["launches"])
    large = predict(planned(laptop()), 1, PLAIN, parallelism=Parallelism(rank_batch=1 << 14))
    assert "one by one" in large.origins["calls"], "a graph is for the planned batch"
    assert "one by one" in predict(planned(laptop()), 1, replace(PLAIN, threads=1000)).origins["calls"]
    assert gpu.step.shares["dispatch"] > 0.5


@pytest.mark.parametrize("name", ["micro-dlrm", "dlrm"])
def test_planned_calls_are_those_of_an_eager_step(name: str) -> None:
    """Every operator of a step is counted; with every switch off the host also draws the batch before it."""
    pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    from recperf.execution.clocked_steps import endless
    from recperf.train.loop import take_step

    class Operators(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += 1
            return operator(*args, **(kwargs or {}))

    if name == "dlrm":
        config = experiment_plain()
        layers = replace(config.model, bottom=(512, 64, 64), top=(64, 1), rows=(500,) * 8)
        data = replace(config.data, ids_per_bag=40, distinct=False)
        config = replace(config, model=layers, data=data, train=replace(config.train, device="cpu"))
        workload = DLRM
    else:
        workload, config = MICRO_DLRM, MICRO_DLRM.presets["default"]()
        config = replace(config, train=replace(config.train, device="cpu", graph="off"))
    recipe = workload.prepare(config).trial(1).recipe
    batches = endless(recipe.order, 0)
    take_step(recipe, batches, 1)
    with Operators() as operators:
        take_step(recipe, batches, 1)
    plan = predict(workload.planned(config), 1, PLAIN)
    # A CPU also checks the ids, which takes 28 operators where bags are plain.
    checks = 28 if name == "dlrm" else 0
    assert operators.count - checks == pytest.approx(plan.work.calls, rel=0.05)
    if name == "dlrm":
        slow = predict(workload.planned(config), 1, replace(PLAIN, call_s=1e-3)).step
        assert slow.value == pytest.approx(plan.work.calls * 1e-3 + slow.exposed["input"] + slow.exposed["transfer"])


def test_samples_to_the_target() -> None:
    published = planned(mlperf()).published_samples
    samples = {batch: target.samples_to_target(published, batch) for batch in (8192, 16384, 32768, 12000, 65536)}
    counts = {batch: one.value / 1e6 for batch, one in samples.items() if one}
    assert (counts[8192], counts[16384], counts[32768]) == (69.3, 87.7, 113.0)
    assert counts[12000] == pytest.approx(69.3 * (87.7 / 69.3) ** np.log2(12000 / 8192))
    assert counts[65536] == pytest.approx(113.0**2 / 87.7)
    origin = {batch: one.origin for batch, one in samples.items() if one}
    exact, beyond = samples[8192], samples[65536]
    assert exact is not None
    assert (exact.value, exact.low, exact.high) == (69.3e6, 61.9e6, 80.3e6), "the spread of the published runs"
    assert beyond is not None
    assert (beyond.extrapolated, beyond.low, beyond.high) == (True, 98.6e6, 2 * 128.5e6)
    assert "interpolated" in origin[12000]
    assert "polated" not in origin[8192]
    assert target.samples_to_target(planned(laptop()).published_samples, 8192) is None
    requested = target.samples_to_target({}, 64, 5e6)
    assert requested is not None
    assert (requested.value, requested.low, requested.high) == (5e6, 5e6, 5e6)


def test_the_published_hours_follow_from_published_steps() -> None:
    """Samples, steps, evaluations after every block and start-up of the published runs give their hours."""
    evaluations = planned(mlperf()).evaluations
    assert evaluations is not None
    evaluations = replace(evaluations, first=lambda batch: 0, fixed_s=0.0)
    startup = Spread(825, 825, 825)
    for batch, rate, evaluation, hours in (
        (8192, 11.1e3, 83, 2.66),
        (16384, 21.5e3, 44, 1.87),
        (32768, 40.4e3, 24, 1.39),
    ):
        samples = target.samples_to_target(planned(mlperf()).published_samples, batch)
        assert samples is not None
        step = Band(batch / rate, batch / rate, batch / rate)
        forward = evaluation / np.ceil(evaluations.samples / batch)
        training = target.training(samples, step, forward, batch, evaluations=evaluations, startup=startup)
        assert training.seconds.value / 3600 == pytest.approx(hours, rel=0.04)
        assert training.seconds.low < 3600 * hours < training.seconds.high
        slower = Band(step.value, 0.8 * step.value, 1.25 * step.value)
        wide = target.training(samples, slower, forward, batch, evaluations=evaluations, startup=startup)
        assert wide.seconds.low < training.seconds.low
        assert wide.seconds.high > training.seconds.high
        stalls, late = Spread(1.0, 1.1, 1.2), Spread(0, 25, 825)
        own = target.training(samples, step, forward, batch, evaluations=evaluations, startup=late, stalls=stalls)
        assert own.seconds.value == pytest.approx(1.1 * (training.seconds.value - 825) + 25)
        assert own.seconds.high > own.seconds.value + 800, "a longer start is in the range"
        assert own.seconds.low < training.seconds.value - 825


@pytest.mark.parametrize(("mtbf_s", "checkpoint_s", "restart_s"), [(4 * 3600, 60, 300), (3600, 540, 600)])
def test_the_goodput_is_that_of_a_cluster_that_fails(mtbf_s: float, checkpoint_s: float, restart_s: float) -> None:
    """Failure by failure: each piece is repeated until it ends before the next failure."""
    failures = target.failures(mtbf_s, checkpoint_s, restart_s)
    draw, piece, pieces = np.random.default_rng(3), failures.interval_s + checkpoint_s, 20_000
    elapsed = 0.0
    for _ in range(pieces):
        starting = 0.0
        while (failure := draw.exponential(mtbf_s)) < starting + piece:
            elapsed, starting = elapsed + failure, restart_s
        elapsed += starting + piece
    assert failures.goodput == pytest.approx(pieces * failures.interval_s / elapsed, rel=0.02)


@settings(max_examples=3, deadline=None)
@given(data=strategies.data())
def test_a_plan_agrees_with_itself(data: strategies.DataObject) -> None:
    """More devices are never too few where fewer are enough, more nodes that are full are faster, a faster
    network never slows a step, a larger device holds what a smaller one does, more samples take longer and more
    memory, and cost is time by devices by price."""
    draw = data.draw
    workload, device = planned(mlperf()), KNOWN[draw(strategies.sampled_from(sorted(KNOWN)))]
    exponent = draw(strategies.none() | strategies.floats(0.0, 1.5))
    batch = draw(strategies.sampled_from([workload.rank_batch]) | strategies.integers(1, 2048))
    counts = sorted({draw(strategies.integers(1, 64)) for _ in range(3)} | {8 * draw(strategies.integers(1, 8))})
    setting = Setting(
        workload=workload, device=device, network=NETWORKS["ib400"], question=Question(),
        parallelism=Parallelism(rank_batch=batch), global_batches=tuple(workload.published_samples),
        skew=lambda batch, ranks: None if exponent is None else skew.zipf(workload.work(), batch, ranks, exponent),
        price=2.0,
    )  # fmt: skip
    _, points = plan(setting, counts)
    enough = [point.fits for point in points]
    assert enough == sorted(enough)
    rates = [point.step.samples_per_s for point in points if point.step and point.ranks % 8 == 0 and point.nodes > 1]
    assert rates == sorted(rates)
    _, faster = plan(replace(setting, network=NETWORKS["ib800"]), counts)
    _, larger = plan(replace(setting, device=replace(device, memory_bytes=2 * device.memory_bytes)), counts)
    for point, quick, roomy in zip(points, faster, larger, strict=True):
        assert roomy.fits >= point.fits
        assert roomy.global_batch >= point.global_batch or not point.fits
        assert point.step is None or point.step.low < point.step.value < point.step.high
        if point.step and point.target and quick.step and point.target.cost:
            assert quick.step.value <= point.step.value
            hours = point.target.seconds.value / 3600
            assert point.target.cost.value == pytest.approx(2.0 * point.ranks * hours)
    ranks = counts[0]
    one, two = (setting.predictor(ranks, size)(Parallelism(rank_batch=size)) for size in (batch, 2 * batch))
    assert two.step.value >= one.step.value
    assert two.step.samples_per_s > one.step.samples_per_s or two.step.limit != "dispatch"
    assert two.memory.bytes >= one.memory.bytes
