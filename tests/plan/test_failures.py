"""Goodput of clusters that fail: the simulation beside closed formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from recperf.errors import ConfigError
from recperf.plan.failures import Cluster, best, expected, simulate, young

USUAL = Cluster(mtbf_s=4 * 3600, checkpoint_s=60, restart_s=300)


def test_young_s_interval() -> None:
    assert young(Cluster(mtbf_s=20_000, checkpoint_s=100)) == pytest.approx(2000)


@pytest.mark.parametrize(
    "cluster",
    [USUAL, Cluster(mtbf_s=3600, checkpoint_s=540, restart_s=600), replace(USUAL, interval_s=8000)],
    ids=["usual", "often", "rarely saved"],
)
def test_the_simulation_meets_daly_s_formula(cluster: Cluster) -> None:
    goodput = simulate(cluster, seed=3, seeds=200)
    assert goodput.mean == pytest.approx(expected(cluster), rel=0.01)
    assert goodput.low < goodput.mean < goodput.high


def test_the_best_interval_is_near_the_formula_s() -> None:
    goodput = best(USUAL, seed=1)
    assert young(USUAL) / 1.6 < goodput.interval_s < young(USUAL) * 1.6
    assert goodput.mean >= simulate(USUAL, seed=1).mean
    for other in (0.25, 4):
        assert goodput.mean > simulate(replace(USUAL, interval_s=other * young(USUAL)), seed=1).mean


def test_the_formula_s_interval_is_taken_where_nothing_fails() -> None:
    calm = Cluster(mtbf_s=1e9, checkpoint_s=60, work_s=100)
    assert best(calm).interval_s == pytest.approx(young(calm))


def test_without_failures_only_checkpoints_cost() -> None:
    """Ten hours in hourly pieces: nine checkpoints, none behind the last piece."""
    calm = Cluster(mtbf_s=1e11, checkpoint_s=60, interval_s=3600, work_s=36_000)
    goodput = simulate(calm)
    assert goodput.failures == 0
    assert goodput.mean == pytest.approx(36_000 / (36_000 + 9 * 60))


def test_a_hopeless_cluster_ends() -> None:
    goodput = simulate(Cluster(mtbf_s=60, checkpoint_s=3600, restart_s=600, interval_s=3600))
    assert goodput.mean < 0.01
    assert math.isfinite(goodput.failures)


@pytest.mark.parametrize("bad", [{"mtbf_s": 0.0}, {"checkpoint_s": -1.0}, {"interval_s": 0.0}, {"restart_s": 1e9}])
def test_bad_values_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(USUAL, **bad)
