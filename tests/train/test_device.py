"""Choice of device, threads and matrix-product library."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest
import torch

from recperf.errors import MachineError
from recperf.train import device
from recperf.train.config import TrainConfig
from recperf.train.device import applied, choose, repeatable


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
