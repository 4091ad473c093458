"""Memory of a step of DLRMv4: what autograd really keeps, and sums by hand.

Shapes: T tokens of all rows, D width of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from recperf.models import dlrm_v4_memory as memory
from recperf.models.dlrm_v4_config import DLRMv4Config, gpu
from recperf.models.dlrm_v4_cost import Load, load_of
from recperf.models.hstu import Rows, STULayer
from recperf.models.hstu_config import HSTUConfig
from recperf.ops.dropout import Dropout

GIB = 2**30


def kept_by(work: Callable[[], object], parameters: nn.Module) -> int:
    """Bytes autograd saves for the backward pass, parameters left out, each storage once."""
    saved: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters.parameters()}

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        alive = work()
    assert alive is not None
    return sum(saved.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("last_only", [False, True])
def test_a_layer_keeps_what_is_counted(last_only: bool, recompute: bool) -> None:
    config = HSTUConfig(dim=10, heads=2, qk_dim=3, v_dim=5, max_length=64, recompute=recompute)
    lengths = (20, 1, 30)
    layer, offsets_B1 = STULayer(config), torch.tensor((0, *lengths)).cumsum(0)
    x_TD = torch.randn(51, 10, requires_grad=True)
    kept = kept_by(lambda: layer(x_TD, Rows(offsets_B1, 30, 30), Dropout(0.0, 1), last_only=last_only), layer)
    assert kept == memory.layer_bytes(config, Load(lengths=lengths, triples=0), 4, last_only=last_only)


def test_the_fullest_moment_is_found() -> None:
    hstu = HSTUConfig(layers=2, dim=10, heads=2, qk_dim=3, v_dim=5, candidate_only=False)
    load, tokens = Load(lengths=(20, 30), triples=0), 50
    # Input, U V Q K, attention; two norms' statistics.
    kept = 2 * tokens * (10 + 32 + 10) + 2 * 8 * tokens
    # The output's gradient, that of U V Q K, that of the attention; the concatenation's.
    leaving = 2 * tokens * (10 + 32 + 10) + 2 * tokens * 30
    assert memory.layer_peak(hstu, load, 2) == (2 * kept, leaving)
    # A last layer of the candidate alone is gone when the one before it is on its way back.
    kept_first, leaving_first = memory.layer_peak(replace(hstu, candidate_only=True), load, 2)
    assert (kept_first, leaving_first) == (kept, leaving)
    # Layers that keep their input alone compute the rest again one at a time.
    again = 2 * tokens * (32 + 10)
    inputs = 2 * (2 * tokens * 10 + 2 * 8 * tokens)
    assert memory.layer_peak(replace(hstu, recompute=True), load, 2) == (inputs, leaving + again)


def test_queries_summed_in_float32_may_be_most() -> None:
    hstu = HSTUConfig(layers=1, dim=8, heads=1, qk_dim=64, v_dim=8, candidate_only=False)
    load = Load(lengths=(10,), triples=0)
    _, leaving = memory.layer_peak(hstu, load, 2)
    assert leaving == 10 * (2 * (8 + 144 + 8) + 4 * 64)


def switched(**changes: bool) -> DLRMv4Config:
    config = gpu()
    shared = changes.pop("shared_encoders", True)
    return replace(config, shared_encoders=shared, hstu=replace(config.hstu, **changes))  # type: ignore[arg-type]


def held(config: DLRMv4Config, parts: int = 1) -> dict[str, int]:
    return memory.memory(config, [load_of(config, (2672,) * (1024 // parts))] * parts)


def test_every_switch_saves_memory_where_it_should() -> None:
    plain = held(switched(shared_encoders=False, candidate_only=False))
    shared = held(switched(candidate_only=False))
    candidate, recompute = held(switched()), held(switched(recompute=True))
    tables = {name: plain[name] for name in ("parameters", "optimizer")}
    assert all({name: found[name] for name in tables} == tables for found in (shared, candidate, recompute))
    order = [found["activations"] for found in (plain, shared, candidate, recompute)]
    assert order == sorted(order, reverse=True)
    # Three rows of 512 floats for every position, 16.8 GB, are the least of what shared encoders do without.
    assert plain["activations"] - shared["activations"] > 3 * 512 * 4 * 1024 * 2664
    assert plain["activations"] > 100 * GIB > candidate["activations"]


def test_micro_batches_divide_what_grows_with_tokens() -> None:
    config = switched()
    whole, parts = held(config), held(config, 4)
    fetched = whole["gradients"] - 4 * config.dense_parameters
    assert whole["gradients"] == parts["gradients"]
    assert (parts["activations"] - fetched) / (whole["activations"] - fetched) == pytest.approx(0.25, rel=1e-3)


def test_parameters_and_optimizer_are_counted() -> None:
    config = switched()
    found = held(config)
    rows = sum(config.table_rows.values())
    assert found["parameters"] == 4 * (512 * rows + 15_243_057)
    assert found["optimizer"] == 4 * (rows + 2 * 15_243_057)
    assert found["parameters"] == pytest.approx(40e9, rel=0.01)
