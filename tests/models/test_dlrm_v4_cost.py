"""Counted work of DLRMv4 against the published formula, sums by hand and torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from history_batches import batch_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recperf.errors import ConfigError
from recperf.measure.cost import Cost
from recperf.models.dlrm_v4 import cost
from recperf.models.dlrm_v4.config import DLRMv4Config, HSTUConfig, laptop, mlperf
from recperf.models.dlrm_v4.inputs import prepare
from recperf.models.dlrm_v4.model import DLRMv4
from recperf.ops.hstu_attention import reference

STU = ("stu_input", "attention", "stu_output")


def with_hstu(config: DLRMv4Config, **changes: object) -> DLRMv4Config:
    return replace(config, hstu=replace(config.hstu, **changes))  # type: ignore[arg-type]


def small() -> DLRMv4Config:
    """Every width differs, so that mixing up two of them is noticed."""
    hstu = HSTUConfig(layers=3, dim=10, heads=2, qk_dim=3, v_dim=5, max_length=64, candidate_only=False)
    return DLRMv4Config(
        hstu=hstu,
        table_dim=6,
        rows=(50,) * 11,
        encoder_hidden=7,
        action_dim=4,
        item_hidden=9,
        head_hidden=11,
        positions=100,
        time_buckets=40,
        shared_encoders=False,
    )


def flops(parts: dict[str, Cost], *names: str) -> int:
    return sum(parts[name].flops + parts[f"{name}_backward"].flops for name in names)


def test_the_dense_equivalent_is_the_published_number() -> None:
    config = with_hstu(mlperf(), candidate_only=False)
    assert cost.published_flops(config.hstu, 4096) == pytest.approx(315.68e9, rel=1e-5)
    parts = cost.step(config, [cost.full_load(config, 2)])
    assert flops(parts, *STU) == 2 * cost.published_flops(config.hstu, 4096)
    assert flops(parts, *STU) == cost.stack_flops(config.hstu, (4096, 4096))
    assert flops(parts, "stu_input") / 2 == pytest.approx(77.3e9, rel=1e-3)
    assert flops(parts, "attention") / 2 == pytest.approx(180.4e9, rel=1e-3)
    assert flops(parts, "stu_output") / 2 == pytest.approx(58.0e9, rel=1e-3)


def test_attention_is_counted_as_the_published_rates_are() -> None:
    hstu, lengths = mlperf().hstu, (4096,) * 32
    forward = 32 * 4096**2 / 2 * 4 * (128 + 128) * 2
    assert cost.attention_flops(hstu, lengths) == forward
    assert cost.attention_flops(hstu, lengths) + cost.attention_flops(hstu, lengths, backward=True) == 3.5 * forward
    assert forward / 1.95e-3 / 1e12 == pytest.approx(282, rel=0.01)


def test_micro_batches_add_up_and_rows_are_looked_up_and_updated_once() -> None:
    config = small()
    parts = [cost.load_of(config, lengths, triples=4) for lengths in ((20, 30), (40,))]
    whole = cost.step(config, [cost.load_of(config, (20, 30, 40), triples=4)], rows=77)
    split = cost.step(config, parts, rows=77)
    assert {name: part.flops for name, part in split.items()} == {name: part.flops for name, part in whole.items()}
    assert split["sparse_update"] == whole["sparse_update"] == Cost(0, 77 * (4 * (3 * 6 + 2) + 8))
    picks = (20 + 30 + 40 - 3 * 8) * 3 + 3 * (3 + 8)
    assert split["embedding"] == whole["embedding"] == Cost(0, 77 * (48 + 8) + picks * (48 + 8))


@pytest.mark.parametrize("shared", [False, True])
def test_flops_of_samples_add_up_to_those_of_a_step(shared: bool) -> None:
    """By which ranks divide a batch: constant, linear and square parts of a row's length."""
    config = replace(mlperf(), shared_encoders=shared, hstu=replace(mlperf().hstu, recompute=True))
    lengths = [config.context_tokens + 1 + length for length in (0, 7, 400, 1999, 4086)] * 200
    constant, linear, square = cost.sample_flops(config)
    samples = sum(constant + linear * length + square * length**2 for length in lengths)
    positions = sum(lengths) - config.context_tokens * len(lengths)
    load = cost.load_of(config, lengths, triples=round(cost.UNIQUE["item_id"] * positions))
    assert samples == pytest.approx(sum(part.flops for part in cost.step(config, [load]).values()), rel=1e-6)


def test_bytes_of_the_layers_are_their_inputs_and_outputs() -> None:
    config = with_hstu(small(), layers=1)
    load = cost.load_of(config, (20, 30))
    ahead, back = cost.forward(config, load), cost.backward(config, load)
    tokens, dim, keys, wide = 50, 10, 6, 10
    assert ahead["attention"].bytes == 4 * tokens * (2 * keys + wide + wide)
    assert back["attention_backward"].bytes == 4 * tokens * (2 * keys + wide + wide + 2 * keys + wide)
    weights = 4 * (dim + 1) * 2 * (keys + wide)
    assert ahead["stu_input"].bytes == 4 * tokens * (dim + 2 * (keys + wide)) + weights
    assert ahead["stu_output"].bytes == 4 * tokens * (2 * wide + 2 * dim) + 4 * 3 * wide * dim
    half = cost.forward(replace(config, precision="bfloat16"), load)
    assert half["attention"].bytes == ahead["attention"].bytes // 2


def test_rows_too_short_for_context_and_candidate_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 9"):
        cost.load_of(laptop(), (9, 8))


def no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the attention: its cost is counted as half of each square, not as it is computed."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        return torch.zeros(q.shape[0], *v.shape[1:])

    def backward(*_: object, into: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(gradient.zero_() for gradient in into)

    for name in ("forward", "forward_last"):
        monkeypatch.setattr(reference, name, forward)
    for name in ("backward", "backward_last"):
        monkeypatch.setattr(reference, name, backward)


@pytest.mark.parametrize(
    ("shared", "candidate_only", "recompute"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_products_are_counted_as_torch_counts_them(
    shared: bool, candidate_only: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_attention(monkeypatch)
    config = with_hstu(replace(small(), shared_encoders=shared), candidate_only=candidate_only, recompute=recompute)
    lengths = (4, 7, 0, 11)
    inputs = prepare(batch_of(lengths, items=5), config)
    model = DLRMv4(config).train()
    counter = FlopCounterMode(display=False)
    with counter:
        model.loss(inputs).backward()
    distinct = inputs.entities["item_id"].index_N.numel()
    load = cost.load_of(config, [length + 9 for length in lengths], triples=distinct)
    parts = cost.step(config, [load])
    products = sum(part.flops for name, part in parts.items() if not name.startswith("attention"))
    if recompute:
        products -= parts["attention"].flops
    assert counter.get_total_flops() == products
