"""Counted work of DLRMv4 against the published formula and torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from history_batches import batch_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recperf.measure.cost import Cost
from recperf.models.dlrm_v4 import cost
from recperf.models.dlrm_v4.config import DLRMv4Config, HSTUConfig, mlperf
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
