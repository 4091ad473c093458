"""Goodput of clusters that fail."""

from __future__ import annotations

import numpy as np
import pytest

from recperf.plan.failures import Goodput

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
