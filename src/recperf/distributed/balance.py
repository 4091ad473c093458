"""Which rank works on which samples of a batch, so that all ranks finish together. Torch-free.

Every rank computes the same deal from the same numbers, so nothing is sent. The largest sample goes first, each to the
rank with the least work so far.

Shapes: B samples of a batch, R ranks.
"""

from __future__ import annotations

from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray


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
