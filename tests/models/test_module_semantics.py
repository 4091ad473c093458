"""A DLRM behaves as any nn.Module: frozen parameters stay, assigned tensors train, float64 is right or an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.arithmetic import Arithmetic, FastArithmetic
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.embeddings import StackedTables
from recperf.models.tables import HashedTable, SparseTables
from recperf.ops.relu import reference as relu
from recperf.train.optim import SGD, Adagrad, AdamW
from recperf.train.sparse import SparseRows, SplitOptimizer

KEYS, ROWS, DIM = ("a", "b"), (5, 7), 4
TABLES: dict[str, Any] = {
    "stacked": lambda: StackedTables(KEYS, ROWS, DIM),
    "sparse": lambda: SparseTables(KEYS, ROWS, DIM),
    "sparse reference": lambda: SparseTables(KEYS, ROWS, DIM, bag="reference"),
    "hashed": lambda: HashedTable(KEYS, 11, DIM),
}
ARITHMETICS: dict[str, Any] = {
    "plain": Arithmetic,
    "fast": lambda: FastArithmetic(relu=relu),
    "copies": lambda: FastArithmetic(relu=relu, copies=True),
}
BATCH = ClickBatch(
    torch.randn(4, 5, generator=torch.Generator().manual_seed(3)),
    JaggedFeatures.from_bags(KEYS, [[[1, 2], [], [4], [3, 3]], [[6], [5], [], [0, 1]]]),
    torch.tensor([1.0, 0, 1, 0]),
)


def dlrm(tables: str = "stacked", arithmetic: str = "plain", interaction: str = "dot", seed: int = 1) -> DLRM:
    config = DLRMConfig(
        features=KEYS, rows=ROWS if tables != "hashed" else (11,), dim=DIM, bottom=(5, 6, DIM), top=(9, 1),
        interaction=interaction, cross_layers=2, cross_rank=3, table_init_std=0.5,
    )  # fmt: skip
    return DLRM(config, seed=seed, embeddings=TABLES[tables](), arithmetic=ARITHMETICS[arithmetic]())


def optimizer(model: DLRM, dense: Any = SGD) -> Any:
    if isinstance(model.embeddings, StackedTables):
        return dense(list(model.parameters()))
    return SplitOptimizer(dense(model.dense_parameters()), SparseRows(model.embeddings, "rowwise-adagrad"), clip=0.5)


def train(model: DLRM, batch: ClickBatch = BATCH, dense: Any = SGD) -> None:
    step = optimizer(model, dense)
    for _ in range(2):
        model.loss(batch).backward()
        step.step(0.1)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def adamw(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW([(parameters, 0.1)])


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(("interaction", "dense"), [("dot", SGD), ("concat", Adagrad), ("dcn", adamw)])
def test_frozen_parameters_get_no_gradient_and_are_not_updated(interaction: str, arithmetic: str, dense: Any) -> None:
    model = dlrm("stacked", arithmetic, interaction)
    names = [name for name, _ in model.named_parameters()]
    frozen = {"bottom.layers.0.weight", "top.layers.1.bias", "embeddings.weight_RD"}
    frozen |= {name for name in names if name.startswith("interaction.up_NK")}
    for name in frozen:
        model.get_parameter(name).requires_grad = False
    before = values(model)
    model.loss(BATCH).backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == frozen
    optimizer(model, dense).step(0.1)
    assert changed(model, before) == set(names) - frozen


@pytest.mark.parametrize("interaction", ["dot", "concat", "dcn"])
@pytest.mark.parametrize("tables", TABLES)
def test_a_float64_model_computes_in_float64(tables: str, interaction: str) -> None:
    model, exact = dlrm(tables, interaction=interaction), dlrm(tables, interaction=interaction).double()
    batch = replace(BATCH, dense_BD=BATCH.dense_BD.double(), labels_B=BATCH.labels_B.double())
    loss = exact.loss(batch)
    plain = exact.criterion.value(exact(batch.dense_BD, batch.features), batch.labels_B)
    assert loss.value.dtype == torch.float64
    assert float(loss.value) == pytest.approx(float(plain.detach()), rel=1e-12)
    train(model)
    train(exact, batch)
    for name, value in exact.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].double(), value, rtol=1e-4, atol=1e-6, msg=name)
        assert not name.endswith("weight") or not torch.equal(value, value.float().double())
