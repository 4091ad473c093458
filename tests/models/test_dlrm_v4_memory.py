"""Memory of a step of DLRMv4: the tensors that autograd saves, and what the page states."""

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

from recperf.models.dlrm_v4 import memory
from recperf.models.dlrm_v4.config import DLRMv4Config, gpu, laptop
from recperf.models.dlrm_v4.cost import load_of, model_flops, step
from recperf.models.dlrm_v4.inputs import prepare
from recperf.models.dlrm_v4.model import DLRMv4

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
