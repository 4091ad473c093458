"""Which rank works on which samples of a batch, so that all ranks finish together. Torch-free.

Every rank computes the same deal from the same numbers, so nothing is sent. The largest sample goes first, each to the
rank with the least work so far; then the slowest rank hands on or exchanges single samples while that makes it faster.

Shapes: B samples of a batch, R ranks.
"""

from __future__ import annotations

from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

NEGLIGIBLE = 1e-3
"""The deal is not refined further once the slowest rank is this close to the mean, as a share of it."""


def deal(work_B: NDArray[np.float64], ranks: int) -> list[NDArray[np.int64]]:
    """The positions of each rank's samples, ascending: each position once, and each rank at least one if there are
    enough. A pure function of its arguments."""
    largest_first = np.argsort(-work_B, kind="stable")
    # The number of samples is only there for samples without work: they do not all go to one rank.
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    ranks_of_B = []
    for work in work_B[largest_first].tolist():
        load, samples, rank = heap[0]
        ranks_of_B.append(rank)
        heapreplace(heap, (load + work, samples + 1, rank))
    rank_B = np.empty(len(work_B), np.int64)
    rank_B[largest_first] = ranks_of_B
    loads = [load for load, _, _ in sorted(heap, key=lambda entry: entry[2])]
    _refine(work_B, rank_B, loads)
    by_rank = np.argsort(rank_B, kind="stable").astype(np.int64)
    ends = np.bincount(rank_B, minlength=ranks).cumsum()[:-1]
    return np.split(by_rank, ends)


def stride(samples: int, ranks: int) -> list[NDArray[np.int64]]:
    """The deal that ignores work: rank r of n takes r, r + n, r + 2n and so on."""
    return [np.arange(rank, samples, ranks) for rank in range(ranks)]


def imbalance(work_B: NDArray[np.float64], parts: list[NDArray[np.int64]]) -> float:
    """The slowest rank's work over the mean of all ranks; 1 is even."""
    loads = [float(work_B[part].sum()) for part in parts]
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def _refine(work_B: NDArray[np.float64], rank_B: NDArray[np.int64], loads: list[float]) -> None:
    """Move work away from the slowest rank, one sample or one exchange at a time, until no other rank can help it."""
    mean = sum(loads) / len(loads)
    for _ in range(4 * len(loads)):
        slowest = max(range(len(loads)), key=loads.__getitem__)
        if loads[slowest] <= mean * (1 + NEGLIGIBLE):
            return
        others = sorted((rank for rank in range(len(loads)) if rank != slowest), key=loads.__getitem__)
        if not any(_relieve(work_B, rank_B, loads, slowest, other) for other in others):
            return


def _relieve(
    work_B: NDArray[np.float64], rank_B: NDArray[np.int64], loads: list[float], slowest: int, other: int
) -> bool:
    """Exchange the two samples (or hand on the one) that come closest to evening out two ranks, if any improves."""
    gap = loads[slowest] - loads[other]
    own, its = np.flatnonzero(rank_B == slowest), np.flatnonzero(rank_B == other)
    its = its[np.argsort(work_B[its], kind="stable")]
    # A sample without work stands for getting nothing in exchange.
    its_work = np.concatenate([[0.0], work_B[its]])
    # The best partner of each own sample is next to the one that is smaller by half the gap.
    after = np.searchsorted(its_work, work_B[own] - gap / 2)
    pairs = np.stack([np.clip(after - 1, 0, None), np.clip(after, None, len(its))])
    moved = work_B[own] - its_work[pairs]
    left = np.abs(gap - 2 * moved)
    best = int(np.argmin(left))
    if left.flat[best] >= gap * (1 - NEGLIGIBLE):
        return False
    sample, partner = own[best % len(own)], int(pairs.flat[best])
    rank_B[sample] = other
    if partner:
        rank_B[its[partner - 1]] = slowest
    loads[slowest] -= float(moved.flat[best])
    loads[other] += float(moved.flat[best])
    return True
