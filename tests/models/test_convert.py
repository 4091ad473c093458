"""Weights with TorchRec's names and order, checked by an imitation of its forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recperf.data.batch import JaggedFeatures
from recperf.errors import DataError
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.torchrec_weights import load_torchrec_parameters, torchrec_parameters

DOT = DLRMConfig(
    features=("a", "b", "c", "d"), rows=(5, 7, 3, 4), dim=4, bottom=(3, 6, 4), top=(8, 5, 1), interaction="dot",
    cross_layers=2, cross_rank=3, table_init_std=0.5,
)  # fmt: skip
DCN = replace(DOT, interaction="dcn")


def made(config: DLRMConfig, seed: int = 1) -> DLRM:
    """A model with random parameters, biases included."""
    model = DLRM(config, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 2)
    return model


def torchrec_logits(config: DLRMConfig, named: dict[str, Tensor], dense: Tensor, bags: list[list[list[int]]]) -> Tensor:
    """Compute the logits as TorchRec does, from its parameters: the upper triangle, pair by pair."""

    def layer(x: Tensor, prefix: str) -> Tensor:
        return x @ named[f"{prefix}.weight"].T + named[f"{prefix}.bias"]

    x = dense
    for index in range(len(config.bottom) - 1):
        x = layer(x, f"dense_arch.model._mlp.{index}._linear").relu()
    vectors = [x]
    for key, feature in zip(config.features, bags):
        table = named[f"sparse_arch.embedding_bag_collection.embedding_bags.t_{key}.weight"]
        vectors.append(torch.stack([table[bag].sum(0) for bag in feature]))
    if config.interaction == "dot":
        count = len(vectors)
        pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(count) for j in range(i + 1, count)]
        x = torch.cat([x, torch.stack(pairs, 1)], 1)
    else:
        first = x = torch.cat(vectors, 1)
        for index in range(config.cross_layers):
            low = x @ named[f"inter_arch.crossnet.V_kernels.{index}"].T
            up = low @ named[f"inter_arch.crossnet.W_kernels.{index}"].T
            x = first * (up + named[f"inter_arch.crossnet.bias.{index}"].reshape(-1)) + x
    for index in range(len(config.top) - 1):
        x = layer(x, f"over_arch.model.0._mlp.{index}._linear").relu()
    return layer(x, "over_arch.model.1").squeeze(1)


BAGS = [[[1, 2], [], [4]], [[6], [0, 0], [3]], [[], [2], [1]], [[3], [1, 2, 3], []]]


@pytest.mark.parametrize("config", [DOT, DCN], ids=["dot", "dcn"])
def test_torchrec_computes_the_same_logits_with_our_weights(config: DLRMConfig) -> None:
    model = made(config)
    dense = torch.randn(3, 3, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours = model(dense, JaggedFeatures.from_bags(config.features, BAGS))
        theirs = torchrec_logits(config, torchrec_parameters(model), dense, BAGS)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert float(ours.std()) > 0.01


@pytest.mark.parametrize("config", [DOT, DCN], ids=["dot", "dcn"])
def test_a_round_trip_keeps_every_bit(config: DLRMConfig) -> None:
    model, other = made(config), made(config, seed=2)
    named = torchrec_parameters(model)
    assert len(named) == len(config.features) + len(list(model.dense_parameters()))
    assert sum(value.numel() for value in named.values()) == config.table_parameters + config.mlp_parameters
    load_torchrec_parameters(other, named)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    again = torchrec_parameters(other)
    assert all(torch.equal(named[name], again[name]) for name in named)


def test_weights_of_another_model_are_refused_and_nothing_is_copied() -> None:
    model = made(DOT)
    before = [p.detach().clone() for p in model.parameters()]
    named = torchrec_parameters(made(DOT, seed=2))
    incomplete = {name: value for name, value in named.items() if "t_c" not in name}
    with pytest.raises(DataError, match=r"1 parameters are missing \(first: sparse_arch.*t_c"):
        load_torchrec_parameters(model, incomplete)
    with pytest.raises(DataError, match=r"0 parameters are missing, 1 are unknown \(first: extra"):
        load_torchrec_parameters(model, {**named, "extra": torch.zeros(1)})
    with pytest.raises(DataError, match=r"over_arch\.model\.1\.bias has shape"):
        load_torchrec_parameters(model, {**named, "over_arch.model.1.bias": torch.zeros(2)})
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters()))
