"""Frozen parameters stay, with plain and with fast MLPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.mlp import Arithmetic, FastArithmetic
from recperf.ops.relu import reference
from recperf.train.optim import SGD, Adagrad, AdamW

KEYS = ("a", "b")
BATCH = ClickBatch(
    torch.randn(4, 5, generator=torch.Generator().manual_seed(0)),
    JaggedFeatures.from_bags(KEYS, [[[1, 2], [], [4], [3, 3]], [[6], [5], [], [0, 1]]]),
    torch.tensor([1.0, 0, 1, 0]),
)


def fast(*, copies: bool = False) -> FastArithmetic:
    return FastArithmetic(relu=reference, copies=copies)


def dlrm(arithmetic: Arithmetic, interaction: Any) -> DLRM:
    config = DLRMConfig(
        features=KEYS, rows=(5, 7), dim=3, bottom=(5, 6, 3), top=(9, 1), interaction=interaction,
        cross_layers=2, cross_rank=2, table_init_std=0.5,
    )  # fmt: skip
    return DLRM(config, seed=1, arithmetic=arithmetic)


def adamw(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW([(parameters, 0.1)])


@pytest.mark.parametrize("arithmetic", [Arithmetic, fast, lambda: fast(copies=True)], ids=["plain", "fast", "copies"])
@pytest.mark.parametrize(("interaction", "dense"), [("dot", SGD), ("concat", Adagrad), ("dcn", adamw)])
def test_frozen_parameters_get_no_gradient_and_are_not_updated(interaction: str, arithmetic: Any, dense: Any) -> None:
    model = dlrm(arithmetic(), interaction)
    names = [name for name, _ in model.named_parameters()]
    frozen = {"bottom.layers.0.weight", "top.layers.1.bias", "embeddings.weight_RD"}
    frozen |= {name for name in names if name.startswith("interaction.up_NK")}
    for name in frozen:
        model.get_parameter(name).requires_grad = False
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.loss(BATCH).backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == frozen
    dense(list(model.parameters())).step(0.1)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(names) - frozen
