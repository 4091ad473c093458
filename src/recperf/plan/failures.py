"""A cluster whose devices fail: what share of its time is work that counts, and how often it should save.

Shapes: S seeds, simulated side by side.

Work goes on for `interval_s`, then a checkpoint takes `checkpoint_s` in which nothing is learned. A failure, at moments
without memory, throws away all since the last whole checkpoint; `restart_s` later work goes on from it, unless another
failure comes first. Events are the failures and the end: between two of them everything is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..config import require, within

SEEDS = 64
SEARCHED = 25
"""Intervals tried between a quarter and four times the formula's."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    mtbf_s: float
    """Mean seconds between two failures of the whole cluster."""
    checkpoint_s: float
    """Seconds a checkpoint keeps the training waiting."""
    restart_s: float = 300.0
    """Seconds from a failure to the first step after it."""
    work_s: float = 0.0
    """Seconds the training would take without failures; 0: a hundred mean times between failures."""
    interval_s: float | None = None
    """Seconds of work between two checkpoints; none: the formula's."""

    def __post_init__(self) -> None:
        within(1e-3, self.mtbf_s, 1e12, "mtbf")
        within(0.0, self.checkpoint_s, 1e9, "checkpoint seconds")
        within(0.0, self.restart_s, 1e9, "restart seconds")
        within(0.0, self.work_s, 1e12, "work seconds")
        if self.interval_s is not None:
            within(1e-3, self.interval_s, 1e12, "interval seconds")
        # A restart that hardly ever ends would be simulated for ever.
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
    """Share of the elapsed time that was work that counts."""
    low: float
    """A fifth of the seeds have less."""
    high: float
    """A fifth of the seeds have more."""
    failures: float
    """Mean number of them."""
    expected: float
    """By the closed formula for endless work."""


def mtbf_of(hours: float, ranks: int, of: Literal["device", "cluster"]) -> float:
    """Seconds between failures of a cluster; devices fail on their own, and one stops all."""
    require(of in ("device", "cluster"), "mtbf-of", of, "device, cluster")
    within(1e-6, hours, 1e9, "mtbf hours")
    return 3600 * hours / (ranks if of == "device" else 1)


def young(cluster: Cluster) -> float:
    """Young's and Daly's first-order interval, sqrt(2 C M)."""
    return max(1e-3, math.sqrt(2 * cluster.checkpoint_s * cluster.mtbf_s))


def expected(cluster: Cluster) -> float:
    """Goodput of endless work, failures in checkpoints and restarts included (Daly's complete model)."""
    mean, interval = cluster.mtbf_s, cluster.interval
    exponent = cluster.restart_s / mean + (interval + cluster.checkpoint_s) / mean
    if exponent > 700:
        return 0.0
    segment = math.exp(cluster.restart_s / mean) * mean * math.expm1((interval + cluster.checkpoint_s) / mean)
    return interval / segment


def simulate(cluster: Cluster, *, seed: int = 0, seeds: int = SEEDS) -> Goodput:
    """One cluster a seed until its work is done; the same seed gives the same moments of failure at any interval."""
    within(2, seeds, 1 << 16, "seeds")
    draw = np.random.default_rng(seed)
    done_S, elapsed_S, failures_S = np.zeros(seeds), np.zeros(seeds), np.zeros(seeds)
    starting_S, running_S = np.zeros(seeds), np.ones(seeds, bool)
    most = _most_failures(cluster)
    while running_S.any() and failures_S.max() < most:
        calm_S = draw.exponential(cluster.mtbf_s, seeds)
        finish_S, kept_S = _until(cluster, done_S, calm_S - starting_S)
        ends_S = running_S & (starting_S + finish_S <= calm_S)
        fails_S = running_S & ~ends_S
        elapsed_S += np.where(ends_S, starting_S + finish_S, np.where(fails_S, calm_S, 0.0))
        done_S += np.where(fails_S, kept_S, 0.0)
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
    """Seconds to the end of the work from here, and the work that is safe after `time_S`."""
    left_S = cluster.work - done_S
    # The last piece needs no checkpoint behind it.
    saves_S = np.maximum(0.0, np.ceil(left_S / cluster.interval) - 1)
    whole_S = np.floor(np.maximum(time_S, 0.0) / (cluster.interval + cluster.checkpoint_s))
    return left_S + saves_S * cluster.checkpoint_s, np.minimum(whole_S, saves_S) * cluster.interval


def _most_failures(cluster: Cluster) -> int:
    """Beyond this a simulation is cut short: hardly anything would be learned."""
    return 2_000 + round(5 * cluster.work / cluster.mtbf_s)


def best(cluster: Cluster, *, seed: int = 0, seeds: int = SEEDS) -> Goodput:
    """The interval with the best mean goodput, by search with the same failures for all."""
    around = young(cluster)
    tried = np.geomspace(around / 4, around * 4, SEARCHED)
    found = [simulate(replace(cluster, interval_s=float(one)), seed=seed, seeds=seeds) for one in tried]
    # Where nothing fails all are alike, and the formula's is as good as any.
    return max(found, key=lambda one: (one.mean, -abs(math.log(one.interval_s / around))))
