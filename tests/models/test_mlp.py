"""The fast MLPs against the plain ones: the same numbers in float32, close ones in bfloat16; frozen parameters stay."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.mlp import Arithmetic, FastArithmetic
from recperf.ops.relu import native
from recperf.train.optim import SGD, Adagrad, AdamW

# On a CPU without bfloat16 torch warns once that it uses another product.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
needs_c = pytest.mark.skipif(isinstance(native.library(), str), reason=f"no C: {native.library()}")
KEYS = ("a", "b")
BATCH = ClickBatch(
    torch.randn(4, 5, generator=torch.Generator().manual_seed(0)),
    JaggedFeatures.from_bags(KEYS, [[[1, 2], [], [4], [3, 3]], [[6], [5], [], [0, 1]]]),
    torch.tensor([1.0, 0, 1, 0]),
)


def fast(body: str = "reference", low: torch.dtype = torch.float32, *, copies: bool = False) -> FastArithmetic:
    return FastArithmetic(relu=importlib.import_module(f"recperf.ops.relu.{body}"), low=low, copies=copies)


def dlrm(arithmetic: Arithmetic, interaction: Any) -> DLRM:
    config = DLRMConfig(
        features=KEYS, rows=(5, 7), dim=3, bottom=(5, 6, 3), top=(9, 1), interaction=interaction,
        cross_layers=2, cross_rank=2, table_init_std=0.5,
    )  # fmt: skip
    return DLRM(config, seed=1, arithmetic=arithmetic)


@pytest.mark.parametrize("interaction", ["dot", "concat", "dcn"])
@pytest.mark.parametrize(("low", "copies"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
@pytest.mark.parametrize("body", ["reference", pytest.param("native", marks=needs_c)])
def test_a_whole_step_is_the_plain_one(body: str, low: torch.dtype, copies: bool, interaction: str) -> None:
    """Also where the ReLU overwrites the gradient that is passed to it."""
    results = []
    for arithmetic in (Arithmetic(), fast(body, low, copies=copies)):
        model = dlrm(arithmetic, interaction)
        loss = model.loss(BATCH)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    tolerance = 1e-5 if low == torch.float32 else 5e-2
    for expected, actual in zip(*results):
        assert actual.dtype == torch.float32
        assert actual.shape == expected.shape
        assert float((actual - expected).norm()) <= tolerance * float(expected.norm()) + 1e-7


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
