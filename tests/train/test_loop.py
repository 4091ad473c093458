"""Slices of a batch, and a step of one slice; golden tests compare the gradients of several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.train.loop import Position, Recipe, slices, take_step, train
from recperf.train.optim import AdamW

KEYS = ("a", "b")


def batch(samples: int = 13) -> ClickBatch:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (samples,), generator=draw).float()
    ids = JaggedFeatures.from_ids(KEYS, torch.randint(0, 5, (2, samples), generator=draw))
    return ClickBatch(torch.randn(samples, 3, generator=draw), ids, labels)


def model() -> DLRM:
    return DLRM(DLRMConfig(features=KEYS, rows=(5, 7), dim=4, bottom=(3, 4), top=(6, 1), table_init_std=0.5), seed=1)


def test_one_slice_is_bit_identical_to_the_batch() -> None:
    net, clicks = model(), batch()
    optimizer = AdamW([(list(net.parameters()), 0.0)])
    recipe = Recipe(model=net, optimizer=optimizer, order=cast(Any, None), learning_rate=lambda _: 0.1, epochs=1)
    loss, samples = take_step(recipe, iter([clicks]), 0)
    assert samples == 13
    assert torch.equal(loss, model().loss(clicks).detach())


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_norm_is_that_of_the_whole_gradient_and_changes_no_step(micro_batches: int) -> None:
    nets, norms = [model(), model(), model()], []
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


def test_slices_of_uneven_and_small_batches() -> None:
    parts = slices(batch(), 5)
    assert [len(part) for part in parts] == [2, 3, 2, 3, 3]
    assert torch.equal(torch.cat([part.labels_B for part in parts]), batch().labels_B)
    assert [len(part) for part in slices(batch(3), 5)] == [1, 1, 1]


class Batches(list[int]):
    def batches(self, epoch: int, start: int = 0) -> Any:
        return iter(self[start:])


def test_an_epoch_that_has_become_shorter_ends() -> None:
    """A run that is resumed with larger batches may have done more of them than an epoch now has."""
    recipe = Recipe(
        model=cast(Any, model()), optimizer=cast(Any, None), order=Batches([1, 2]), learning_rate=lambda _: 0.1,
        epochs=4, whole_step=cast(Any, lambda batches, rate, _: (torch.zeros(()), next(batches))),
    )  # fmt: skip
    names = ("before_epoch", "before_step", "after_step", "after_epoch")
    watch = SimpleNamespace(**dict.fromkeys(names, lambda *_: None))
    assert train(recipe, Position(0, 5, 5), cast(Any, watch)) == Position(2, 1, 8)
