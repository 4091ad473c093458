from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.interaction import LowRankCross
from recperf.models.losses import make

CONFIG = DLRMConfig(
    features=("a", "b"), rows=(5, 7), dim=4, bottom=(3, 4), top=(6, 1),
    interaction="dcn", cross_layers=3, cross_rank=2, table_init_std=0.5,
)  # fmt: skip


def batch(samples: int = 6) -> ClickBatch:
    draw = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randint(0, rows, (samples,), generator=draw) for rows in CONFIG.rows])
    labels = torch.randint(0, 2, (samples,), generator=draw).float()
    return ClickBatch(torch.randn(samples, 3, generator=draw), JaggedFeatures.from_ids(CONFIG.features, ids), labels)


def noisy(layers: int) -> LowRankCross:
    cross = LowRankCross(12, layers=layers, rank=5)
    cross.reset(1)
    with torch.no_grad():
        for bias in cross.bias_N:
            bias.normal_(generator=torch.Generator().manual_seed(3))
    return cross


def test_a_layer_is_the_papers_formula_sample_by_sample() -> None:
    cross = noisy(2)
    draw = torch.Generator().manual_seed(4)
    dense, sparse = torch.randn(3, 4, generator=draw), torch.randn(2, 3, 4, generator=draw)
    output = cross(dense, [*sparse])
    for sample in range(3):
        first = torch.cat([dense[sample], sparse[0, sample], sparse[1, sample]])
        x = first
        for down, up, bias in cross.layers:
            x = first * (up @ (down @ x) + bias) + x
        torch.testing.assert_close(output[sample], x)


@pytest.mark.parametrize("loss", ["bce", "wbce", "mse"])
@pytest.mark.parametrize("interaction", ["dcn", "dot"])
def test_the_whole_step_equals_autograd_with_every_loss(interaction: str, loss: str) -> None:
    model = DLRM(replace(CONFIG, interaction=interaction), seed=1, loss=make(loss, (0.5, 3.0)))
    gradients, of = [], batch()
    for value in (model.criterion.value(model(of.dense_BD, of.features), of.labels_B), model.loss(of)):
        model.zero_grad()
        value.backward()
        gradients.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
    assert len(gradients[0]) == 1 + len(list(model.parameters()))
    for plain, written in zip(*gradients):
        torch.testing.assert_close(written, plain, rtol=1e-5, atol=1e-6)
