from __future__ import annotations

import pytest
import torch

from recperf.measure import peaks
from recperf.measure.ceilings import ceilings_of
from recperf.measure.peaks import gpu
from recperf.measure.peaks.sampling import TINY, Sampler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


def test_every_kind_of_gpu_has_its_ceilings() -> None:
    measured = peaks.measure_with(TINY, quick=True, say=lambda _: None)
    assert peaks.faults(measured) == []
    assert set(measured["gpu"]) == {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    for name, one in measured["gpu"].items():
        ceilings = ceilings_of(measured, device=name)
        assert ceilings is not None
        assert ceilings.knee > 0
        assert set(one["gemm"]) == {"float64", "float32", "tf32", "bfloat16", "float16"}
        assert set(one["launch"]) == {"queue", "kernel", "round_trip"}
        assert set(one["transfer"]) == {
            "host_to_device_pinned",
            "device_to_host_pinned",
            "host_to_device_pageable",
            "device_to_host_pageable",
        }
        assert 0 < one["launch"]["kernel"]["p50"] < one["launch"]["round_trip"]["p50"]
        for table in ("cache", "dram"):
            rows = one["gather"][table]["rows"]
            assert [row["row_bytes"] for row in rows] == [32, 64, 128, 256, 512, 1024, 2048]


def test_the_precision_of_products_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        gpu.Gpu(Sampler(TINY), lambda _: None, lambda _: None).products()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_ids_are_fresh_and_the_l2_is_flushed_before_every_reading() -> None:
    device = gpu.Gpu(Sampler(TINY), lambda _: None, lambda _: None)
    assert device.flush.numel() * 4 >= 2 * device.l2_bytes
    before = float(device.flush[0])
    order: list[str] = []
    device.timed(lambda: order.append("work"), lambda: order.append("warm"))()
    assert order == ["warm", "work"]
    assert float(device.flush[0]) == before + 1
