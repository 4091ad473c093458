"""The DLRM: its configs, its written-out step against autograd, frozen parameters, and its counted FLOPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.errors import ConfigError, DataError
from recperf.models.config import DLRMConfig, dlrm_step
from recperf.models.dlrm import DLRM, LowRankCross
from recperf.models.mlp import Arithmetic, FastArithmetic, make_loss
from recperf.models.published import PUBLISHED, MicroDLRM, load_public_parameters, public_parameters
from recperf.ops.mlp import reference
from recperf.train.optim import SGD, Adagrad, AdamW
from recperf.workloads.micro_dlrm.config import default

SMALL = DLRMConfig(features=("a", "b"), rows=(5, 7), dim=4, bottom=(3, 4), top=(6, 1), cross_layers=3, cross_rank=2)


def test_the_published_adapter_refuses_what_does_not_fit() -> None:
    model, offsets = MicroDLRM(), torch.arange(5)
    ids = [torch.randint(0, rows, (5,)) for rows in PUBLISHED.rows]
    assert model(torch.randn(5, 16), ids, [offsets] * 3).shape == (5, 1)
    with pytest.raises(DataError, match="its table has 21 rows"):
        model(torch.randn(5, 16), [ids[0], ids[1], torch.full((5,), 21)], [offsets] * 3)
    with pytest.raises(ValueError, match="3 features need as many"):
        model(torch.randn(5, 16), ids[:2], [offsets] * 2)


def test_public_weights_that_do_not_fit_are_refused_before_anything_is_copied() -> None:
    model = DLRM(SMALL)
    before = {name: value.clone() for name, value in public_parameters(model).items()}
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    *_, last = zeros
    wrong = {
        "1 parameters are missing": {name: value for name, value in zeros.items() if name != last},
        r"1 are unknown \(first: what\)": zeros | {"what": torch.zeros(1)},
        "has shape": zeros | {last: torch.zeros(2)},
    }
    for message, values in wrong.items():
        with pytest.raises(DataError, match=message):
            load_public_parameters(model, values)
    assert all(torch.equal(value, before[name]) for name, value in public_parameters(model).items())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", (5, 6, 7), "model.rows"),
        ("rows", (5, 0), "at least 1 each"),
        ("features", ("a", "a"), "distinct names"),
        ("top", (6, 2), "a last width of 1"),
        ("bottom", (4,), "an input and an output width"),
        ("diagonal", True, "only with interaction dot"),
    ],
)
def test_an_invalid_size_is_reported_with_its_field(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **{field: value})


STEPS = [
    *((interaction, "bce", single) for interaction in ("concat", "dot", "diagonal", "dcn") for single in (True, False)),
    *((interaction, loss, True) for interaction in ("dot", "dcn") for loss in ("wbce", "mse")),
]


@pytest.mark.parametrize(("interaction", "loss", "single"), STEPS)
def test_the_written_out_step_equals_autograd(interaction: str, loss: str, single: bool) -> None:
    diagonal = interaction == "diagonal"
    config = replace(SMALL, interaction="dot" if diagonal else interaction, diagonal=diagonal, table_init_std=0.5)
    model = DLRM(config, seed=1, loss=make_loss(loss, (0.5, 3.0)))
    draw = torch.Generator().manual_seed(2)
    if single:
        features = JaggedFeatures.from_ids(("a", "b"), torch.tensor([[1, 4, 0, 4], [6, 0, 2, 2]]))
    else:
        features = JaggedFeatures.from_bags(("a", "b"), [[[1, 1], [], [4], [0]], [[], [], [5, 6, 5], [1]]])
    labels = torch.tensor([1.0, 0.0, 1.0, 1.0])
    batch = ClickBatch(torch.randn(4, 3, generator=draw), features, labels)
    gradients = []
    for value in (model.criterion.value(model(batch.dense_BD, batch.features), batch.labels_B), model.loss(batch)):
        model.zero_grad()
        value.backward()
        gradients.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
    for plain, written in zip(*gradients):
        torch.testing.assert_close(written, plain, rtol=1e-5, atol=1e-6)


def test_a_cross_layer_is_the_papers_formula_sample_by_sample() -> None:
    cross = LowRankCross(12, layers=2, rank=5)
    cross.reset(1)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for bias in cross.bias_N:
            bias.normal_(generator=draw)
    dense, sparse = torch.randn(3, 4, generator=draw), torch.randn(2, 3, 4, generator=draw)
    output = cross(dense, [*sparse])
    for sample in range(3):
        first = x = torch.cat([dense[sample], sparse[0, sample], sparse[1, sample]])
        for down, up, bias in cross.layers:
            x = first * (up @ (down @ x) + bias) + x
        torch.testing.assert_close(output[sample], x)


@pytest.mark.parametrize("interaction", ["concat", "dot", "dcn"])
def test_matrix_products_are_counted_as_torch_counts_them(interaction: str) -> None:
    config = replace(default().model, interaction=interaction, cross_layers=2, cross_rank=5)
    batch = ClickBatch(
        torch.randn(64, 16), JaggedFeatures.from_ids(config.features, torch.ones(3, 64).long()), torch.zeros(64)
    )
    counter = FlopCounterMode(display=False)
    with counter:
        model = DLRM(config)
        model.criterion.value(model(batch.dense_BD, batch.features), batch.labels_B).backward()
    cost = dlrm_step(config, 64)
    products = cost["bottom"].flops + cost["top"].flops
    products *= 3
    # The bottom MLP's first layer has no input gradient: nobody asks for the gradient of the data.
    products -= 2 * 64 * config.bottom[0] * config.bottom[1]
    # torch computes the full square of pairs, forward and (twice) backward; only the triangle is needed.
    full_square = 3 * 2 * 64 * config.vectors**2 * config.dim if interaction == "dot" else 0
    # A cross layer is two products forward and four backward, 32 wide and of rank 5.
    products += 2 * 6 * (2 * 64 * 32 * 5) if interaction == "dcn" else 0
    assert counter.get_total_flops() == products + full_square
    needed = 3 * 2 * 64 * config.pairs * config.dim
    scattered = 64 * 3 * config.dim
    parts = ("bottom", "top", "interaction", "bottom_backward", "top_backward", "interaction_backward")
    counted = sum(cost[name].flops for name in (*parts, "embedding_backward"))
    assert counted == products + needed + scattered


KEYS = ("a", "b")
BATCH = ClickBatch(
    torch.randn(4, 5, generator=torch.Generator().manual_seed(0)),
    JaggedFeatures.from_bags(KEYS, [[[1, 2], [], [4], [3, 3]], [[6], [5], [], [0, 1]]]),
    torch.tensor([1.0, 0, 1, 0]),
)


def dlrm(arithmetic: Arithmetic, interaction: Any) -> DLRM:
    config = DLRMConfig(
        features=KEYS, rows=(5, 7), dim=3, bottom=(5, 6, 3), top=(9, 1), interaction=interaction,
        cross_layers=2, cross_rank=2, table_init_std=0.5,
    )  # fmt: skip
    return DLRM(config, seed=1, arithmetic=arithmetic)


FAST = {"plain": Arithmetic(), **{f"copies {on}": FastArithmetic(relu=reference, copies=on) for on in (False, True)}}
OPTIMIZERS = [("dot", SGD), ("concat", Adagrad), ("dcn", lambda parameters: AdamW([(parameters, 0.1)]))]


@pytest.mark.parametrize("arithmetic", FAST.values(), ids=FAST)
@pytest.mark.parametrize(("interaction", "dense"), OPTIMIZERS)
def test_frozen_parameters_get_no_gradient_and_are_not_updated(interaction: str, arithmetic: Any, dense: Any) -> None:
    model = dlrm(arithmetic, interaction)
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
