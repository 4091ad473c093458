"""Choice of device, threads and matrix-product library; a step in slices logs the norm of the whole gradient."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.errors import MachineError
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.train import device
from recperf.train.config import TrainConfig
from recperf.train.device import applied, choose, repeatable
from recperf.train.loop import Recipe, take_step
from recperf.train.optim import AdamW


def test_small_products_run_on_one_thread_with_a_reason() -> None:
    settings = choose(TrainConfig(device="cpu"), largest_product_flops=1000)
    assert settings.threads == 1
    assert settings.onednn == (platform.machine() not in ("aarch64", "arm64"))
    assert "too small" in settings.reasons["threads"]


def test_no_more_threads_than_cores_that_a_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 1)
    settings = choose(TrainConfig(device="cpu"), largest_product_flops=10**9)
    assert (settings.threads, settings.reasons["threads"]) == (1, "1: the cores that this process may use")


def test_settings_are_restored() -> None:
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    settings = choose(TrainConfig(device="cpu", threads=1, onednn="off"), largest_product_flops=1000)
    inside = []
    with pytest.raises(RuntimeError, match="inside"), applied(settings):
        inside = [torch.get_num_threads(), torch.backends.mkldnn.enabled]
        raise RuntimeError("inside")
    assert inside == [1, False]
    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(MachineError, match="no GPU"):
        choose(TrainConfig(device="cuda"), largest_product_flops=1)


@pytest.mark.long
def test_a_deterministic_run_records_it_and_restores_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = repeatable(choose(TrainConfig(device="cpu"), largest_product_flops=10))
    assert not settings.deterministic  # A CPU is always deterministic.
    assert "never vary" in settings.reasons["deterministic"]
    with applied(replace(settings, deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


KEYS = ("a", "b")


def batch(samples: int = 13) -> ClickBatch:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (samples,), generator=draw).float()
    ids = JaggedFeatures.from_ids(KEYS, torch.randint(0, 5, (2, samples), generator=draw))
    return ClickBatch(torch.randn(samples, 3, generator=draw), ids, labels)


def model() -> DLRM:
    return DLRM(DLRMConfig(features=KEYS, rows=(5, 7), dim=4, bottom=(3, 4), top=(6, 1), table_init_std=0.5), seed=1)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_norm_is_that_of_the_whole_gradient_and_changes_no_step(micro_batches: int) -> None:
    nets, norms = [model(), model(), model()], list[torch.Tensor]()
    recipes = [
        Recipe(
            model=net, optimizer=AdamW([(list(net.parameters()), 0.0)]), order=cast(Any, None),
            learning_rate=lambda _: 0.1, epochs=1, micro_batches=micro_batches,
        )
        for net in nets
    ]  # fmt: skip
    take_step(recipes[0], iter([batch()]), 0)
    take_step(recipes[1], iter([batch()]), 0, norms.append)
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters()):
        assert torch.equal(ours, theirs)
    nets[2].loss(batch()).backward()
    squares = sum(float(cast(torch.Tensor, p.grad).double().square().sum()) for p in nets[2].parameters())
    assert [float(norm) for norm in norms] == pytest.approx([squares**0.5], rel=1e-5)
