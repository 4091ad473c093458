"""Goodput of clusters that fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recperf.errors import ConfigError
from recperf.plan.failures import Goodput, of_devices

USUAL = Goodput(mtbf_s=4 * 3600, checkpoint_s=60, restart_s=300)


@pytest.mark.parametrize("cluster", [USUAL, Goodput(mtbf_s=3600, checkpoint_s=540, restart_s=600)])
def test_the_formula_is_what_a_cluster_does(cluster: Goodput) -> None:
    """Failure by failure: each piece is repeated until it ends before the next failure."""
    draw, piece, pieces = np.random.default_rng(3), cluster.interval_s + cluster.checkpoint_s, 20_000
    elapsed = 0.0
    for _ in range(pieces):
        starting = 0.0
        while (failure := draw.exponential(cluster.mtbf_s)) < starting + piece:
            elapsed, starting = elapsed + failure, cluster.restart_s
        elapsed += starting + piece
    assert cluster.share() == pytest.approx(pieces * cluster.interval_s / elapsed, rel=0.02)


def test_young_s_interval_is_nearly_the_best() -> None:
    assert Goodput(mtbf_s=20_000, checkpoint_s=100, restart_s=0).interval_s == pytest.approx(2000)
    intervals = USUAL.interval_s * np.geomspace(0.25, 4, 101)
    assert max(USUAL.share(float(interval)) for interval in intervals) < 1.001 * USUAL.share()
    assert USUAL.share(4 * USUAL.interval_s) < 0.95 * USUAL.share()


def test_edges() -> None:
    assert of_devices(20.0, 8, 10.0, 300.0).mtbf_s == 9000
    assert replace(USUAL, mtbf_s=1e11).share(3600) == pytest.approx(3600 / 3660)
    assert Goodput(mtbf_s=60, checkpoint_s=3600, restart_s=50_000).share() == 0.0
    for bad in ({"mtbf_s": 0.0}, {"checkpoint_s": -1.0}, {"restart_s": -1.0}):
        with pytest.raises(ConfigError):
            replace(USUAL, **bad)
