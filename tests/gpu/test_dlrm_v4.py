"""DLRMv4 on a GPU: the published numbers, the switches against each other, the CPU's numbers, no waiting in a step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import dlrm_v4_cases as published
import pytest
import torch
from golden_cases import cases
from history_batches import batch_of
from torch import Tensor

from recperf.models.dlrm_v4.config import DLRMv4Config, HSTUConfig
from recperf.models.dlrm_v4.inputs import prepare_parts
from recperf.models.dlrm_v4.model import DLRMv4

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("exact_products"),
]

CASES = cases("dlrm_v4")
WAYS = list(product((False, True), repeat=3))
SWITCHES = ("candidate_only", "shared_encoders", "recompute")
HSTU = HSTUConfig(layers=2, dim=64, heads=2, qk_dim=32, v_dim=16, max_length=400)
CONFIG = DLRMv4Config(hstu=HSTU, table_dim=32, row_scale=1e-4, encoder_hidden=32, item_hidden=48, head_hidden=40)
LENGTHS = (70, 0, 391, 1, 128, 119, 300, 55)


def gradients(model: DLRMv4) -> dict[str, Tensor]:
    actual = {f"tables.{name}": model.tables.dense_gradient(name) for name in model.config.tables}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        actual[name] = parameter.grad
    return {name: value.double().cpu() for name, value in actual.items()}


def step(config: DLRMv4Config, device: str, *, parts: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    model, batch = DLRMv4(config, seed=3, device=device), batch_of(LENGTHS).to(device)
    model.set_step(1, 2)
    total = torch.zeros((), device=device)
    for inputs in prepare_parts(batch, config, parts):
        loss = model.loss(inputs) * (len(inputs) / len(batch))
        loss.backward()
        total += loss.detach()
    return total.cpu(), gradients(model)


def near(actual: dict[str, Tensor], wanted: dict[str, Tensor], share: float) -> None:
    for name, value in wanted.items():
        assert float((actual[name] - value).norm()) <= share * float(value.norm()) + 1e-12, name


@pytest.mark.parametrize("on", WAYS, ids=str)
@pytest.mark.parametrize("path", CASES)
def test_every_way_gives_the_published_numbers(path: Path, on: tuple[bool, ...]) -> None:
    published.check(published.Case(path), "cuda", **dict(zip(SWITCHES, on)))


@pytest.mark.parametrize("on", WAYS, ids=str)
def test_values_and_gradients_are_the_cpus(on: tuple[bool, ...]) -> None:
    """With dropout, which is the same on every device."""
    candidate_only, shared, recompute = on
    hstu = replace(HSTU, candidate_only=candidate_only, recompute=recompute)
    config = replace(CONFIG, hstu=hstu, shared_encoders=shared)
    (cpu, wanted), (gpu, actual) = step(config, "cpu"), step(config, "cuda")
    torch.testing.assert_close(gpu, cpu, rtol=1e-5, atol=1e-7)
    near(actual, wanted, 1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("on", [(True, True), (False, False)], ids=str)
def test_a_step_never_waits_for_the_device(on: tuple[bool, bool], precision: Any, no_waiting: Any) -> None:
    hstu = replace(HSTU, candidate_only=on[0])
    config = replace(CONFIG, hstu=hstu, shared_encoders=on[1], precision=precision)
    model = DLRMv4(config, seed=3, device="cuda")
    optimizer = torch.optim.Adam(model.dense_parameters(), lr=1e-3, fused=True)
    rate = torch.full((1,), 0.05, device="cuda")
    batches = [prepare_parts(batch_of(LENGTHS, seed=seed).to("cuda"), config, 2) for seed in range(3)]
    for number, parts in enumerate(batches):
        torch.cuda.synchronize()
        # The first step compiles.
        with no_waiting() if number else nullcontext():
            for part, inputs in enumerate(parts):
                model.set_step(1, number, part)
                (model.loss(inputs) * 0.5).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.tables.update(rate)


def test_a_step_gives_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it torch refuses products when asked for the same bits.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        (one, first), (other, second) = step(CONFIG, "cuda"), step(CONFIG, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(one, other)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
