"""DLRMv4: sizes, gradients against autograd, preparation of batches, updates of tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from history_batches import LENGTHS, batch_of
from torch import Tensor

from recperf.data.batch import HistoryBatch
from recperf.errors import DataError
from recperf.models.dlrm_v4 import inputs as dlrm_v4_inputs
from recperf.models.dlrm_v4.config import DLRMv4Config, HSTUConfig, gpu, mlperf
from recperf.models.dlrm_v4.inputs import Inputs, prepare
from recperf.models.dlrm_v4.model import DLRMv4
from recperf.models.dlrm_v4.padding import Padding

HSTU = HSTUConfig(layers=2, dim=12, heads=2, qk_dim=4, v_dim=3, max_length=40)
CONFIG = DLRMv4Config(
    hstu=HSTU,
    table_dim=6,
    rows=(40, 20, 30, *(25,) * 8),
    encoder_hidden=8,
    item_hidden=10,
    head_hidden=9,
    positions=64,
    time_buckets=50,
)


def built(config: DLRMv4Config = CONFIG) -> DLRMv4:
    """A float64 model whose norms and biases are not at their initial values."""
    model = DLRMv4(config, seed=4).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    model.set_step(5, 6)
    return model


def results(model: DLRMv4, batch: HistoryBatch | Inputs, *, autograd: bool = False) -> dict[str, Tensor]:
    """The loss and every gradient, tables included."""
    inputs = batch if isinstance(batch, Inputs) else prepare(batch, model.config)
    loss = model.criterion(model(inputs), inputs) if autograd else model.loss(inputs)
    loss.backward()
    values = {"loss": loss.detach()} | {f"tables.{name}": model.tables.dense_gradient(name) for name in CONFIG.tables}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        values[name] = parameter.grad
    return values


def same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        atol = tolerance * float(value.abs().max())
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=atol, msg=lambda message, name=name: f"{name}: {message}"
        )


def test_the_benchmarks_parameters_are_counted_without_a_tensor() -> None:
    config = mlperf()
    assert config.dense_parameters == 15_243_057
    assert config.table_parameters == 150_042_476_544
    assert sum(config.table_rows.values()) == 293_051_712
    assert replace(config, hstu=replace(config.hstu, layers=5)).dense_parameters == 18_921_265
    assert config.hstu.attention_scale == "batch-max"
    assert config.max_history == 4087
    large = gpu()
    assert large.table_parameters * 4 == pytest.approx(40e9, rel=0.01)
    assert large.hstu.attention_scale == "fixed"


@pytest.mark.parametrize("shared", [False, True])
def test_the_backward_pass_in_parts_equals_autograd(shared: bool) -> None:
    config = replace(CONFIG, shared_encoders=shared)
    same(results(built(config), batch_of()), results(built(config), batch_of(), autograd=True))


@pytest.mark.parametrize(
    ("lengths", "rows", "shared"),
    [
        (LENGTHS, CONFIG.rows, True),
        (LENGTHS, CONFIG.rows, False),
        ((0,), (1,) * 11, True),
        ((0, 0, 31), (1 << 20,) * 11, True),
        ((1,) * 40, CONFIG.rows, True),
    ],
)
def test_c_prepares_what_torch_does(
    lengths: tuple[int, ...], rows: tuple[int, ...], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids beyond the tables, and a context id below 0."""
    config, batch = replace(CONFIG, rows=rows, shared_encoders=shared), batch_of(lengths)
    batch.features.values_V[0] = -3
    actual = prepare(batch, config)
    monkeypatch.setattr(dlrm_v4_inputs.native, "library", lambda: "no compiler")
    expected = prepare(batch, config)
    for one, other in zip(actual.tensors(), expected.tensors(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    numbers = [(part.tokens, part.longest, part.whole_longest, part.plan.longest) for part in (actual, expected)]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("lengths", [LENGTHS, (0,), (31,) * 3])
def test_a_padded_batch_has_the_loss_and_gradients_of_a_plain_one(lengths: tuple[int, ...]) -> None:
    """Every batch of so many samples has the same shapes."""
    config, batch = replace(CONFIG, hstu=replace(HSTU, dropout=0.0), input_dropout=0.0), batch_of(lengths)
    padding = Padding(config, len(lengths))
    empty, packed = padding.unpacked(padding.empty()), padding.unpacked(padding.packed(batch, pinned=False))
    shapes = [[tensor.shape for tensor in inputs.tensors()] for inputs in (empty, packed)]
    assert shapes[0] == shapes[1]
    same(results(built(config), packed), results(built(config), batch))


def test_a_row_that_is_too_long_is_refused() -> None:
    prepare(batch_of((31,)), CONFIG)
    with pytest.raises(DataError, match="41 tokens") as refusal:
        prepare(batch_of((3, 32)), CONFIG)
    assert "31 events" in str(refusal.value.fix)


def test_half_precision_is_near_and_gradients_are_float32() -> None:
    batch, by_precision = batch_of(), {}
    for precision in ("float32", "bfloat16"):
        model = DLRMv4(replace(CONFIG, precision=precision), seed=4)  # type: ignore[arg-type]
        loss = model.loss(prepare(batch, CONFIG))
        loss.backward()
        assert loss.logits_B.dtype == torch.float32
        gradients = [parameter.grad for parameter in model.parameters()]
        gradients += [gradient for _, _, gradient in model.tables.gradients()]
        assert all(one is not None and one.dtype == torch.float32 for one in gradients)
        by_precision[precision] = torch.cat([one.flatten() for one in gradients if one is not None])
    exact, near = by_precision.values()
    assert not torch.equal(exact, near)
    assert float((near - exact).norm() / exact.norm()) < 0.05


def take_step(model: DLRMv4) -> None:
    model.loss(prepare(batch_of(), model.config)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    model.tables.update(0.1)


def changed(model: DLRMv4, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def test_frozen_parts_get_no_gradient_and_are_not_updated() -> None:
    model = DLRMv4(CONFIG, seed=1)
    frozen = {"position_weight", "head.first.weight", "hstu.layers.0.uvqk_weight", "hstu.layers.1.norm_bias"}
    frozen |= {name for name, _ in model.named_parameters() if name.startswith(("content.", "context"))}
    for name in frozen:
        model.get_parameter(name).requires_grad = False
    model.tables.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    take_step(model)
    assert not changed(model, before) & frozen
    assert not any(name.startswith("tables.") for name in changed(model, before))
    assert {"time_weight", "head.second.weight", "hstu.layers.0.norm_bias", "extra.first.weight"} <= changed(
        model, before
    )
    model.requires_grad_(True)
    take_step(model)
    assert {"tables.item_id", *frozen} <= changed(model, before)
