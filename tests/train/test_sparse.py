"""Updates of the rows a step used, against torch's optimizers on dense gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_peers import PEERS
from golden_cases import BAGS
from torch import nn

from recperf.data.batch import JaggedFeatures
from recperf.models.tables import SparseTables
from recperf.ops.table_rules import RULES
from recperf.train.optim import SparseRows, SplitOptimizer, make_dense

KEYS, ROWS, DIM, SAMPLES = ("a", "b"), (6, 40), 3, 5


def made(bag: Any) -> SparseTables:
    tables = SparseTables(KEYS, ROWS, DIM, bag=bag)
    tables.reset(0.5, seed=3)
    return tables


def step_of(seed: int) -> tuple[JaggedFeatures, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2, SAMPLES), generator=draw).tolist()
    bags = [[torch.randint(0, r, (n,), generator=draw).tolist() for n in feature] for r, feature in zip(ROWS, lengths)]
    return JaggedFeatures.from_bags(KEYS, bags), torch.randn(2, SAMPLES, DIM, generator=draw)


def dense_gradient(tables: SparseTables, features: JaggedFeatures, gradient: torch.Tensor) -> torch.Tensor:
    rows = tables.rows_of(features)
    per_id = gradient.reshape(-1, DIM).repeat_interleave(features.offsets_FB1.diff(), dim=0)
    return torch.zeros_like(tables.table_RD).index_add_(0, rows, per_id)


def rate(step: int) -> float:
    return 0.1 / (step + 1)


# Triton's updates are compared with these by tests/ops/test_bag.py.
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bag", BAGS[:2])
def test_ten_steps_equal_torchs(bag: str, rule: Any) -> None:
    """Also where the gradient is halved, and a rate that is a tensor."""
    tables = made(bag)
    weight = nn.Parameter(tables.table_RD.clone())
    peer, sparse = PEERS[rule](weight, 1e-12), SparseRows(tables, rule, eps=1e-12)
    for step in range(10):
        features, gradient = step_of(step)
        tables.backward(tables.record(features)[1], features, gradient)
        sparse.step(rate(step) if step % 2 else torch.tensor([rate(step)]), scale=0.5)
        whole, used = dense_gradient(tables, features, gradient) * 0.5, tables.rows_of(features).unique()
        sparse_grad = torch.sparse_coo_tensor(used[None], whole[used], whole.shape, check_invariants=True)
        weight.grad = sparse_grad if RULES[rule].counts else whole
        peer.param_groups[0]["lr"] = rate(step)
        peer.step()
    torch.testing.assert_close(tables.table_RD, weight.detach(), rtol=1e-5, atol=1e-5)


def test_clipping_counts_both_parts() -> None:
    tables, weight = made("reference"), nn.Parameter(torch.zeros(3))
    start = tables.table_RD.clone()
    clip = SplitOptimizer(make_dense("sgd", [([weight], 0.0)]), SparseRows(tables, "sgd"), clip=0.5)
    features, gradient = step_of(2)
    tables.backward(tables.record(features)[1], features, gradient)
    whole = dense_gradient(tables, features, gradient)
    weight.grad = torch.full((3,), 2.0)
    norm = float((whole.square().sum() + 12.0).sqrt())
    clip.step(1.0)
    torch.testing.assert_close(weight.detach(), torch.full((3,), -2.0 * 0.5 / norm))
    torch.testing.assert_close(tables.table_RD, start - whole * 0.5 / norm)
