"""Counted work and memory of a step of DLRMv4: against the published formula, torch's own counter, what autograd
saves, and what the page states."""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from history_batches import batch_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recperf.measure.cost import Cost
from recperf.models.dlrm_v4 import cost, memory
from recperf.models.dlrm_v4.config import DLRMv4Config, HSTUConfig, gpu, laptop, mlperf
from recperf.models.dlrm_v4.cost import load_of, model_flops, step
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


GIB = 2**30


class SavedBytes:
    """Counts the bytes of each storage once, except those of some tensors."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self.sizes: dict[int, int] = {}
        self.excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        self.alive: list[Tensor] = []

    def see(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.excluded:
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self.alive.append(tensor)
        return tensor

    def hooks(self) -> AbstractContextManager[object]:
        """Count what autograd saves for the backward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self.see, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


@pytest.mark.parametrize(
    ("shared", "candidate_only", "recompute"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_a_forward_pass_saves_about_the_counted_bytes(shared: bool, candidate_only: bool, recompute: bool) -> None:
    config = laptop()
    hstu = replace(config.hstu, max_length=600, candidate_only=candidate_only, recompute=recompute)
    config = replace(config, hstu=hstu, shared_encoders=shared, rows=(500,) * 11, row_scale=1.0, positions=700)
    inputs = prepare(batch_of((380, 580, 550), items=60), config)
    model = DLRMv4(config).train()
    saved = SavedBytes([*model.parameters(), *inputs.tensors()])
    with saved.hooks():
        loss = model.loss(inputs)
    for stage in loss._stages._stages:
        for tensor in (*stage.inputs, *stage.cut, *stage.outputs):
            saved.see(tensor)
    distinct = inputs.entities["item_id"].index_N.numel()
    load = load_of(config, inputs.offsets_B1.diff().tolist(), triples=distinct)
    rows = {name: rows_U.numel() for name, rows_U in inputs.rows.items()}
    last = [candidate_only and index == hstu.layers - 1 for index in range(hstu.layers)]
    layers = sum(memory.layer_bytes(hstu, load, 4, last_only=only) for only in last)
    counted = memory.activations(config, load)["encoders"] + layers + 4 * config.table_dim * sum(rows.values())
    # Not counted: tensors with one number per sample.
    assert counted < saved.bytes < 1.05 * counted
    assert memory.input_bytes(config, load, rows) == pytest.approx(inputs.nbytes, rel=0.001)


def switched(**changes: bool) -> DLRMv4Config:
    config = gpu()
    shared = changes.pop("shared_encoders", True)
    return replace(config, shared_encoders=shared, hstu=replace(config.hstu, **changes))  # type: ignore[arg-type]


def held(config: DLRMv4Config, parts: int = 1) -> dict[str, int]:
    return memory.memory(config, [load_of(config, (2672,) * (1024 // parts))] * parts)


PAGE = (Path(__file__).parents[2] / "docs" / "dlrm-v4.md").read_text()


def test_the_page_states_the_counted_work_and_memory() -> None:
    plain, both = switched(shared_encoders=False, candidate_only=False), switched()
    gflops = [model_flops(step(config, [load_of(config, (2672,) * 1024)])) / 1024e9 for config in (both, plain)]
    gib = [held(both, parts)["activations"] / GIB for parts in (1, 4)]
    text = " ".join(PAGE.split())
    assert f"needs {gflops[0]:.1f} GFLOP with both switches on, {gflops[1]:.1f} without" in text
    assert f"holds {gib[0]:.0f} GiB beside 38 GiB of tables" in text
    assert f"four micro-batches need {gib[1]:.0f} GiB" in text


def test_the_step_of_the_examples_runs() -> None:
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "dlrm_v4_step.py"))
    assert len(names["parts"]) == 2
    assert int((names["model"].tables.state("item_id") > 0).sum()) == 1
