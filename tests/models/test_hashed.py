from __future__ import annotations

import pytest
import torch

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.config import HashedDLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.tables import HashedTable
from recperf.ops.hashing import rows_torch
from recperf.train.optim import AdamW
from recperf.train.sparse import SparseRows, SplitOptimizer

KEYS = ("user", "item", "occupation")


def batch(seed: int, samples: int = 6) -> ClickBatch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS), samples), generator=draw).tolist()
    bags = [[torch.randint(-5, 10**12, (n,), generator=draw).tolist() for n in feature] for feature in lengths]
    labels = torch.randint(0, 2, (samples,), generator=draw).float()
    return ClickBatch(torch.randn(samples, 16, generator=draw), JaggedFeatures.from_bags(KEYS, bags), labels)


def model(bag: str = "reference", rows: int = 97, dim: int = 8) -> tuple[DLRM, HashedTable]:
    table = HashedTable(KEYS, rows, dim, seed=3, bag=bag)
    config = HashedDLRMConfig(rows=rows, dim=dim, table_init_std=0.5).dlrm(rows)
    return DLRM(config, seed=1, embeddings=table), table


def test_ids_are_hashed_with_a_seed_per_feature() -> None:
    _, table = model()
    features = JaggedFeatures.from_bags(KEYS, [[[7, -1]], [[7]], [[]]])
    assert table.rows_of(features).tolist() == [
        *rows_torch(torch.tensor([7, -1]), 3, 97).tolist(),
        *rows_torch(torch.tensor([7]), 4, 97).tolist(),
    ]


@pytest.mark.parametrize("adagrad", [True, False])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_sparse_steps_equal_those_of_a_dense_table(adagrad: bool, clip: float) -> None:
    """Compare with autograd on an ordinary parameter and the optimizer written out on whole tensors."""
    net, table = model()
    dense = AdamW([(net.dense_parameters(), 0.01)])
    optimizer = SplitOptimizer(
        dense, SparseRows(table, "rowwise-adagrad" if adagrad else "sgd"), table_ratio=2.0, clip=clip
    )
    other, other_table = model()
    weight = other_table.table_RD.clone().requires_grad_()
    state = torch.zeros(97)
    other_dense = torch.optim.AdamW(other.dense_parameters(), weight_decay=0.01, fused=True)
    for step in range(4):
        sample = batch(step)
        net.loss(sample).backward()
        optimizer.step(1e-2)
        rows = other_table.rows_of(sample.features)
        pooled = torch.nn.functional.embedding_bag(
            rows, weight, sample.features.offsets_FB1, mode="sum", include_last_offset=True
        ).view(3, -1, 8)
        vectors = torch.cat([other.bottom(sample.dense_BD), *pooled.unbind(0)], 1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(other.top(vectors).squeeze(1), sample.labels_B)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([*other.dense_parameters(), weight], clip)
        with torch.no_grad():
            used = weight.grad.abs().sum(1) > 0
            state[used] += weight.grad[used].square().mean(1)
            rate = 2e-2 / (state.sqrt() + 1e-8) if adagrad else torch.full((97,), 2e-2)
            weight[used] -= rate[used].unsqueeze(1) * weight.grad[used]
            weight.grad = None
        for group in other_dense.param_groups:
            group["lr"] = 1e-2
        other_dense.step()
        other_dense.zero_grad()
    torch.testing.assert_close(table.table_RD, weight.detach(), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(net.dense_parameters(), other.dense_parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
