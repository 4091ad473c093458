from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.errors import ConfigError
from recperf.models.config import DLRMConfig
from recperf.models.cross import LowRankCross
from recperf.models.dlrm import DLRM
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


def test_the_written_out_pass_equals_autograd() -> None:
    cross = noisy(3)
    draw = torch.Generator().manual_seed(4)
    dense = torch.randn(5, 4, generator=draw).requires_grad_()
    sparse = torch.randn(2, 5, 4, generator=draw).requires_grad_()
    upstream = torch.randn(5, 12, generator=draw)
    cross(dense, [*sparse]).backward(upstream)
    expected = [dense.grad, sparse.grad, *(p.grad for p in cross.parameters())]
    cross.zero_grad()
    with torch.no_grad():
        output, saved = cross.record(dense, sparse)
        torch.testing.assert_close(output, cross(dense, [*sparse]))
        before = upstream.clone()
        gradients = cross.backward(saved, upstream)
        assert torch.equal(upstream, before)
    for ours, theirs in zip([*gradients, *(p.grad for p in cross.parameters())], expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


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


def test_parameters_are_counted_named_and_seeded() -> None:
    model = DLRM(CONFIG, seed=1)
    assert CONFIG.cross_parameters == sum(p.numel() for p in model.interaction.parameters())
    assert CONFIG.table_parameters + CONFIG.mlp_parameters == sum(p.numel() for p in model.parameters())
    assert replace(CONFIG, interaction="concat").cross_parameters == 0
    tables = {id(p) for p in model.embeddings.parameters()}
    assert [id(p) for p in model.dense_parameters()] != []
    assert {id(p) for p in model.dense_parameters()} == {id(p) for p in model.parameters()} - tables
    again, other = DLRM(CONFIG, seed=1), DLRM(CONFIG, seed=2)
    assert torch.equal(model.interaction.down_KN[1], again.interaction.down_KN[1])
    assert not torch.equal(model.interaction.down_KN[1], other.interaction.down_KN[1])
    assert not torch.equal(model.interaction.down_KN[0], model.interaction.down_KN[1])
    # The rest of the model starts as it would without cross layers.
    assert torch.equal(model.bottom.flat[0], DLRM(replace(CONFIG, interaction="concat"), seed=1).bottom.flat[0])


def test_initial_weights_have_xaviers_deviation() -> None:
    cross = LowRankCross(400, layers=1, rank=100)
    cross.reset(0)
    for weight in (cross.down_KN[0], cross.up_NK[0]):
        assert float(weight.detach().std()) == pytest.approx((2 / 500) ** 0.5, rel=0.03)
    assert not cross.bias_N[0].any()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bottom", (3, 5), "with dcn a last width equal to model.dim"),
        ("cross_layers", 0, "model.cross_layers"),
        ("cross_rank", 0, "model.cross_rank"),
        ("diagonal", True, "only with interaction dot"),
    ],
)
def test_an_invalid_size_is_reported_with_its_field(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **{field: value})
