"""Micro-batches give the gradients, weights and loss of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.losses import make
from recperf.train.loop import Recipe, slices, take_step
from recperf.train.optim import AdamW

KEYS = ("a", "b")


def batch(seed: int, samples: int = 13, *, single: bool = False) -> ClickBatch:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (samples,), generator=draw).float()
    dense = torch.randn(samples, 3, generator=draw)
    if single:
        return ClickBatch(
            dense, JaggedFeatures.from_ids(KEYS, torch.randint(0, 5, (2, samples), generator=draw)), labels
        )
    lengths = torch.randint(0, 4, (2, samples), generator=draw).tolist()
    bags = [[torch.randint(0, 5, (n,), generator=draw).tolist() for n in feature] for feature in lengths]
    return ClickBatch(dense, JaggedFeatures.from_bags(KEYS, bags), labels)


class ListOrder:
    """An order of listed batches."""

    def __init__(self, batches: list[ClickBatch]) -> None:
        self.listed = batches

    def __len__(self) -> int:
        return len(self.listed)

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        return iter(self.listed[start:])


class Recording:
    """SGD that stores the gradients of its last step."""

    def __init__(self, model: DLRM) -> None:
        self.parameters = list(model.parameters())
        self.gradients: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self.gradients = [p.grad.clone() for p in self.parameters]
        for parameter in self.parameters:
            parameter -= learning_rate * parameter.grad
            parameter.grad = None


def model(interaction: str, loss: str) -> DLRM:
    config = DLRMConfig(
        features=KEYS, rows=(5, 7), dim=4, bottom=(3, 4), top=(6, 1), interaction=interaction, cross_rank=2,
        table_init_std=0.5,
    )  # fmt: skip
    return DLRM(config, seed=1, loss=make(loss, (0.5, 3.0)))


class Plain:
    """The same model through autograd."""

    def __init__(self, inner: DLRM) -> None:
        self.inner = inner

    def train(self, mode: bool = True) -> Any:
        return self.inner.train(mode)

    def loss(self, clicks: ClickBatch) -> torch.Tensor:
        return self.inner.plain_loss(clicks)


def trained(
    count: int, *, interaction: str = "dot", loss: str = "bce", plain: bool = False, single: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Losses, last gradients and weights after 3 steps of batches in `count` slices."""
    net = model(interaction, loss)
    optimizer = Recording(net)
    order = [batch(seed, single=single) for seed in range(3)]
    recipe = Recipe(
        model=Plain(net) if plain else net, optimizer=optimizer, order=ListOrder(order), learning_rate=lambda _: 0.1,
        epochs=1, micro_batches=count,
    )  # fmt: skip
    batches = iter(order)
    losses = [take_step(recipe, batches, step)[0] for step in range(3)]
    return losses, optimizer.gradients, [p.detach() for p in net.parameters()]


def close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("count", [5, 50])
@pytest.mark.parametrize(("interaction", "loss"), [("concat", "bce"), ("dot", "wbce"), ("dcn", "mse")])
def test_slices_add_up_to_the_batch(count: int, interaction: str, loss: str) -> None:
    whole = trained(1, interaction=interaction, loss=loss, plain=True)
    sliced = trained(count, interaction=interaction, loss=loss)
    for one, other in zip(whole, sliced):
        assert close(one, other)


@pytest.mark.parametrize("plain", [True, False])
def test_slices_of_bags_with_one_id_and_of_autograd(plain: bool) -> None:
    for one, other in zip(trained(1, single=True), trained(3, plain=plain, single=True)):
        assert close(one, other)


def test_one_slice_is_bit_identical_to_the_batch() -> None:
    net = model("dot", "bce")
    optimizer = AdamW([(list(net.parameters()), 0.0)])
    clicks = batch(0)
    recipe = Recipe(model=net, optimizer=optimizer, order=ListOrder([clicks]), learning_rate=lambda _: 0.1, epochs=1)
    loss, samples = take_step(recipe, iter([clicks]), 0)
    assert samples == 13
    assert torch.equal(loss, model("dot", "bce").loss(clicks).detach())


def test_slices_of_uneven_and_small_batches() -> None:
    parts = slices(batch(0), 5)
    assert [len(part) for part in parts] == [2, 3, 2, 3, 3]
    assert torch.equal(torch.cat([part.labels_B for part in parts]), batch(0).labels_B)
    assert [len(part) for part in slices(batch(0, 3), 5)] == [1, 1, 1]
