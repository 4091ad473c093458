"""Dealing the samples of a batch to ranks by their work, and putting together what each has scored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recperf.distributed.balance import deal, imbalance, stride
from recperf.distributed.ranks import Ranks
from recperf.distributed.shares import SharedScores
from recperf.models.dlrm_v4.config import mlperf
from recperf.models.dlrm_v4.cost import sample_flops

rng = np.random.default_rng(20)
LENGTHS = {
    "zipf": np.minimum(rng.zipf(1.3, 8192), 4086),
    # About the published mean, and the published maximum.
    "published": np.where(rng.random(8192) < 0.46, rng.integers(2663, 4087, 8192), rng.integers(1449, 2663, 8192)),
    "uniform": rng.integers(1, 4087, 8192),
    "equal": np.full(8192, 7),
}


def work(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """FLOPs of the published model."""
    model = mlperf()
    constant, linear, square = sample_flops(model)
    tokens = lengths + model.context_tokens + 1.0
    return constant + (linear + square * tokens) * tokens


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_slowest_rank_is_within_5_percent_of_the_mean(lengths: NDArray[np.int64], ranks: int) -> None:
    work_B = work(lengths)
    parts = deal(work_B, ranks)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(lengths)))
    assert all(len(part) and (np.diff(part) > 0).all() for part in parts)
    assert imbalance(work_B, parts) <= 1.05
    assert imbalance(work_B, parts) <= imbalance(work_B, stride(len(lengths), ranks))
    again = deal(work_B.copy(), ranks)
    assert all(np.array_equal(part, same) for part, same in zip(parts, again))


def test_every_rank_gets_a_sample_if_there_are_enough() -> None:
    assert [len(part) for part in deal(np.zeros(4), 4)] == [1] * 4
    assert [len(part) for part in deal(np.array([1e9, 0.0, 0.0]), 3)] == [1] * 3
    assert [part.tolist() for part in deal(np.ones(2), 4)] == [[0], [1], [], []]
    assert [len(part) for part in deal(np.zeros(0), 2)] == [0, 0]


def test_scores_are_in_row_order_and_each_row_is_scored_once() -> None:
    scores = SharedScores(Ranks())
    scores.add(torch.tensor([0.2, 0.1, -0.5]), torch.tensor([1.0, 0.0, 1.0]), [np.array([2, 0, 1])])
    scores.add(torch.tensor([7.0]), torch.tensor([0.0]), [np.array([0])])
    logits_N, labels_N = scores.gather(4)
    assert torch.equal(logits_N, torch.tensor([0.1, -0.5, 0.2, 7.0]))
    assert labels_N.tolist() == [0.0, 1.0, 1.0, 0.0]
    with pytest.raises(RuntimeError, match="by no rank, or by two"):
        scores.gather(5)
    scores.add(torch.zeros(2), torch.zeros(2), [np.array([1, 1])])
    with pytest.raises(RuntimeError, match="by no rank, or by two"):
        scores.gather()
