from __future__ import annotations

import pytest
import torch

from recperf.measure import peaks
from recperf.measure.ceilings import ceilings_of
from recperf.measure.peaks.sampling import TINY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


def test_every_kind_of_gpu_has_its_ceilings() -> None:
    measured = peaks.measure_with(TINY, quick=True, say=lambda _: None)
    gpus = measured.gpu or {}
    assert set(gpus) == {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    for name, one in gpus.items():
        ceilings = ceilings_of(measured, device=name)
        assert ceilings is not None
        assert ceilings.cache_bytes > 0
        assert set(one.gemm) == {"float64", "float32", "tf32", "bfloat16", "float16"}
        assert one.launch is not None
        assert set(one.transfer) == {
            "host_to_device_pinned",
            "device_to_host_pinned",
            "host_to_device_pageable",
            "device_to_host_pageable",
        }
        assert one.launch.kernel.p50 > 0
        for table in (one.gather.cache, one.gather.dram):
            assert [row.row_bytes for row in table.rows] == [32, 64, 128, 256, 512, 1024, 2048]
