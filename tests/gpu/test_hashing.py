from __future__ import annotations

import pytest
import torch

from recperf.ops import hashing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

EXTREMES = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)])


@pytest.mark.parametrize("seed", [0, 1, 0xA5A5A5A5, -1, 2**63])
def test_a_gpu_hashes_as_a_cpu_does(seed: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-(2**63), 2**63 - 1, (98_304,), generator=generator)
    values = torch.cat([EXTREMES, torch.arange(-1000, 1000), values])
    assert torch.equal(hashing.hash_torch(values.cuda(), seed).cpu(), hashing.hash_torch(values, seed))
    assert hashing.hash_torch(EXTREMES.cuda(), seed).cpu().tolist() == [
        hashing.signed(hashing.hash_int(value, seed)) for value in EXTREMES.tolist()
    ]
    for rows in (1, 1682, 2_000_000, hashing.MOST_ROWS):
        actual = hashing.rows_torch(values.cuda(), seed, rows)
        assert actual.device.type == "cuda"
        assert torch.equal(actual.cpu(), hashing.rows_torch(values, seed, rows))
