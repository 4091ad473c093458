"""A step in one or several slices logs the norm of the whole gradient; golden tests compare the gradients."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.train.loop import Recipe, take_step
from recperf.train.optim import AdamW

KEYS = ("a", "b")


def batch(samples: int = 13) -> ClickBatch:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (samples,), generator=draw).float()
    ids = JaggedFeatures.from_ids(KEYS, torch.randint(0, 5, (2, samples), generator=draw))
    return ClickBatch(torch.randn(samples, 3, generator=draw), ids, labels)


def model() -> DLRM:
    return DLRM(DLRMConfig(features=KEYS, rows=(5, 7), dim=4, bottom=(3, 4), top=(6, 1), table_init_std=0.5), seed=1)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_norm_is_that_of_the_whole_gradient_and_changes_no_step(micro_batches: int) -> None:
    nets, norms = [model(), model(), model()], list[torch.Tensor]()
    recipes = [
        Recipe(
            model=net, optimizer=AdamW([(list(net.parameters()), 0.0)]), order=cast(Any, None),
            learning_rate=lambda _: 0.1, epochs=1, micro_batches=micro_batches,
        )
        for net in nets
    ]  # fmt: skip
    take_step(recipes[0], iter([batch()]), 0)
    take_step(recipes[1], iter([batch()]), 0, norms.append)
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters()):
        assert torch.equal(ours, theirs)
    nets[2].loss(batch()).backward()
    squares = sum(float(cast(torch.Tensor, p.grad).double().square().sum()) for p in nets[2].parameters())
    assert [float(norm) for norm in norms] == pytest.approx([squares**0.5], rel=1e-5)
