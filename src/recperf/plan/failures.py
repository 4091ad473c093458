"""A cluster whose devices fail: its goodput, and how often it should write a checkpoint.

Shapes: S seeds, simulated at once.

Training runs for `interval_s`, then a checkpoint blocks it for `checkpoint_s`. Failures are a Poisson process. Each
loses everything since the last complete checkpoint; training resumes `restart_s` later unless another failure comes
first. The simulation jumps from failure to failure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..config import require, within

SEEDS = 64
SEARCHED = 25
"""Intervals tried, from a quarter to four times the one of the formula."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    mtbf_s: float
    """Mean seconds between two failures of the whole cluster."""
    checkpoint_s: float
    """Seconds for which a checkpoint blocks the training."""
    restart_s: float = 300.0
    """Seconds from a failure to the first step after it."""
    work_s: float = 0.0
    """Seconds of the training without failures; 0: a hundred times the mean time between failures."""
    interval_s: float | None = None
    """Seconds of training between two checkpoints; None: sqrt(2 C M)."""

    def __post_init__(self) -> None:
        within(1e-3, self.mtbf_s, 1e12, "mtbf")
        within(0.0, self.checkpoint_s, 1e9, "checkpoint seconds")
        within(0.0, self.restart_s, 1e9, "restart seconds")
        within(0.0, self.work_s, 1e12, "work seconds")
        if self.interval_s is not None:
            within(1e-3, self.interval_s, 1e12, "interval seconds")
        # A restart that hardly ever succeeds would be simulated forever.
        require(self.restart_s <= 20 * self.mtbf_s, "restart seconds", self.restart_s, "at most 20 times the MTBF")

    @property
    def work(self) -> float:
        return self.work_s or 100 * self.mtbf_s

    @property
    def interval(self) -> float:
        return young(self) if self.interval_s is None else self.interval_s


@dataclass(frozen=True, kw_only=True)
class Goodput:
    interval_s: float
    mean: float
    """Share of the elapsed time that was training and was not lost."""
    low: float
    """20th percentile of the seeds."""
    high: float
    """80th percentile of the seeds."""
    failures: float
    """Mean number of failures."""
    expected: float
    """By the closed formula for endless training."""


def mtbf_of(hours: float, ranks: int, of: str) -> float:
    """Mean seconds between failures of a cluster; devices fail independently, and one failure stops all."""
    require(of in ("device", "cluster"), "mtbf-of", of, "device, cluster")
    within(1e-6, hours, 1e9, "mtbf hours")
    return 3600 * hours / (ranks if of == "device" else 1)


def young(cluster: Cluster) -> float:
    """The interval sqrt(2 C M), by Young and Daly."""
    return max(1e-3, math.sqrt(2 * cluster.checkpoint_s * cluster.mtbf_s))


def expected(cluster: Cluster) -> float:
    """Goodput of endless training, with failures during checkpoints and restarts (Daly's complete model)."""
    mean, interval = cluster.mtbf_s, cluster.interval
    exponent = cluster.restart_s / mean + (interval + cluster.checkpoint_s) / mean
    if exponent > 700:
        return 0.0
    segment = math.exp(cluster.restart_s / mean) * mean * math.expm1((interval + cluster.checkpoint_s) / mean)
    return interval / segment


def simulate(cluster: Cluster, *, seed: int = 0, seeds: int = SEEDS) -> Goodput:
    """One cluster per seed until its training ends; equal seeds give equal failure times at any interval."""
    within(2, seeds, 1 << 16, "seeds")
    draw = np.random.default_rng(seed)
    done_S, elapsed_S, failures_S = np.zeros(seeds), np.zeros(seeds), np.zeros(seeds)
    starting_S, running_S = np.zeros(seeds), np.ones(seeds, bool)
    most = _most_failures(cluster)
    while running_S.any() and failures_S.max() < most:
        failure_S = draw.exponential(cluster.mtbf_s, seeds)
        finish_S, saved_S = _until(cluster, done_S, failure_S - starting_S)
        ends_S = running_S & (starting_S + finish_S <= failure_S)
        fails_S = running_S & ~ends_S
        elapsed_S += np.where(ends_S, starting_S + finish_S, np.where(fails_S, failure_S, 0.0))
        done_S += np.where(fails_S, saved_S, 0.0)
        done_S[ends_S] = cluster.work
        failures_S += fails_S
        starting_S[:] = cluster.restart_s
        running_S &= ~ends_S
    share_S = done_S / np.maximum(elapsed_S, 1e-12)
    low, high = np.quantile(share_S, (0.2, 0.8))
    return Goodput(
        interval_s=cluster.interval,
        mean=float(share_S.mean()),
        low=float(low),
        high=float(high),
        failures=float(failures_S.mean()),
        expected=expected(cluster),
    )


def _until(
    cluster: Cluster, done_S: NDArray[np.float64], time_S: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds to the end of the training, and the training that checkpoints have saved after `time_S`."""
    left_S = cluster.work - done_S
    # No checkpoint follows the last piece.
    saves_S = np.maximum(0.0, np.ceil(left_S / cluster.interval) - 1)
    whole_S = np.floor(np.maximum(time_S, 0.0) / (cluster.interval + cluster.checkpoint_s))
    return left_S + saves_S * cluster.checkpoint_s, np.minimum(whole_S, saves_S) * cluster.interval


def _most_failures(cluster: Cluster) -> int:
    """The simulation ends after this many failures: there would be hardly any progress."""
    return 2_000 + round(5 * cluster.work / cluster.mtbf_s)


def best(cluster: Cluster, *, seed: int = 0, seeds: int = SEEDS) -> Goodput:
    """The interval with the best mean goodput, searched with equal failure times."""
    around = young(cluster)
    intervals = np.geomspace(around / 4, around * 4, SEARCHED)
    simulated = [simulate(replace(cluster, interval_s=float(one)), seed=seed, seeds=seeds) for one in intervals]
    # Without failures all intervals are equal, and that of the formula is taken.
    return max(simulated, key=lambda one: (one.mean, -abs(math.log(one.interval_s / around))))
