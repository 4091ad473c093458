"""STU layers: against a dense formula in float64, the last token alone against all, recomputation, dropout, scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recperf.models.dlrm_v4.config import HSTUConfig
from recperf.models.dlrm_v4.hstu import HSTU, STU, Moment, Rows, STULayer
from recperf.ops.dropout import Dropout, keep_mask

CONFIG = HSTUConfig(layers=3, dim=10, heads=2, qk_dim=4, v_dim=3, max_length=40, dropout=0.25, candidate_only=False)
LENGTHS = (5, 1, 17, 9)


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> Rows:
    return Rows(torch.tensor([0, *lengths]).cumsum(0), max(lengths), max(lengths))


def stack(config: HSTUConfig = CONFIG) -> HSTU:
    """A stack whose parameters are not at their initial values."""
    model = HSTU(config).double()
    model.reset(3, "stack")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


def tokens(lengths: tuple[int, ...] = LENGTHS, dim: int = CONFIG.dim) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(sum(lengths), dim, generator=draw, dtype=torch.float64).requires_grad_()


def plain_layer(layer: STULayer, x_TD: Tensor, lengths: tuple[int, ...], length: float, dropout: Dropout) -> Tensor:
    """The definition of the layer, row by row, for autograd."""
    config, outputs = layer.config, []
    wide, narrow, heads = config.attention_width, config.key_width, config.heads
    kept = keep_mask(dropout, x_TD.shape[0], 3 * wide, "cpu").split(list(lengths)) if dropout.rate else None
    for row, x in enumerate(x_TD.split(list(lengths))):
        normed = F.layer_norm(x, (config.dim,), layer.norm_weight, layer.norm_bias, config.eps)
        u, v, q, k = (normed @ layer.uvqk_weight + layer.uvqk_bias).split([wide, wide, narrow, narrow], 1)
        gate = F.silu(u)
        v, q, k = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in (v, q, k))
        scores = F.silu(q @ k.transpose(1, 2) / config.qk_dim**0.5) / length
        attended = (scores.tril() @ v).transpose(0, 1).flatten(1)
        weight, bias = layer.output_norm_weight, layer.output_norm_bias
        z = torch.cat([gate, attended, gate * F.layer_norm(attended, (wide,), weight, bias, config.eps)], 1)
        if kept is not None:
            z = z * kept[row] / (1 - dropout.rate)
        outputs.append(x + z @ layer.output_weight)
    return torch.cat(outputs)


def gradients(out: Tensor, x_TD: Tensor, model: torch.nn.Module) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(out.shape, generator=draw, dtype=out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), [x_TD, *model.parameters()]))


def same(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-11) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_a_layer_is_its_formula(rate: float, recompute: bool) -> None:
    layer = stack(replace(CONFIG, layers=1, recompute=recompute)).layers[0]
    x_TD, dropout = tokens(), Dropout(rate, 7)
    actual, expected = layer(x_TD, rows_of(), dropout), plain_layer(layer, x_TD, LENGTHS, CONFIG.max_length, dropout)
    same([actual, *gradients(actual, x_TD, layer)], [expected, *gradients(expected, x_TD, layer)])


@pytest.mark.parametrize(
    ("lengths", "scale", "recompute"),
    [(LENGTHS, "fixed", False), (LENGTHS, "batch-max", True), ((1,), "fixed", True), ((3, 3), "batch-max", False)],
)
def test_the_last_token_alone_is_the_same(lengths: tuple[int, ...], scale: str, recompute: bool) -> None:
    """Also with dropout, which for a token does not depend on which others are computed."""
    config = replace(CONFIG, attention_scale=scale, recompute=recompute)  # type: ignore[arg-type]
    full, last = stack(config), stack(replace(config, candidate_only=True))
    x_TD, rows, moment = tokens(lengths), rows_of(lengths), Moment(1, 2)
    expected, actual = full(x_TD, rows, moment), last(x_TD, rows, moment)
    assert actual.shape == (len(lengths), config.dim)
    same([actual, *gradients(actual, x_TD, last)], [expected, *gradients(expected, x_TD, full)], 1e-12)


@pytest.mark.parametrize("candidate_only", [False, True])
def test_recomputation_changes_no_bit(candidate_only: bool) -> None:
    results = []
    for recompute in (False, True):
        model = stack(replace(CONFIG, candidate_only=candidate_only, recompute=recompute)).float()
        x_TD = tokens().detach().float().requires_grad_()
        out = model(x_TD, rows_of(), Moment(1, 2))
        results.append([out, *gradients(out, x_TD, model)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_other_rows_matter_only_for_the_scale() -> None:
    alone, mates = (9,), (9, 30)
    x_TD = tokens(mates).detach()
    for scale, equal in (("fixed", True), ("batch-max", False)):
        model = stack(replace(CONFIG, attention_scale=scale, dropout=0.0))  # type: ignore[arg-type]
        expected = model(x_TD[:9], rows_of(alone), Moment())
        actual = model(x_TD, rows_of(mates), Moment())[:1]
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12) == equal


def test_dropout_is_a_function_of_seed_step_part_and_layer() -> None:
    seeds = {
        Moment(seed, step, part).dropout(0.1, layer, STU).seed
        for seed in range(3)
        for step in range(3)
        for part in range(3)
        for layer in range(3)
    }
    assert len(seeds) == 81
