"""Dropout: the same bits in every body and in the written rule."""

from __future__ import annotations

import pytest
import torch

from recperf.ops.dropout import Dropout, drop, dropout_seed, keep_mask
from recperf.ops.hashing import hash_int

KINDS = [torch.float32, torch.bfloat16, torch.float16]


def mix_int(word: int) -> int:
    word = (word ^ (word >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    word = (word ^ (word >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return word ^ (word >> 16)


def word_int(seed: int, row: int, column: int) -> int:
    """The rule once more, in integers."""
    hashed = hash_int(seed, 0x64726F70)
    first, second = hashed & 0xFFFFFFFF, hashed >> 32
    a = mix_int((mix_int((row & 0xFFFFFFFF) ^ first) + second) & 0xFFFFFFFF)
    b = mix_int(a ^ second)
    x = (column * 0x9E3779B1 + a) & 0xFFFFFFFF
    x = (x ^ (x >> 16) ^ b) * 0x7FEB352D & 0xFFFFFFFF
    return (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF


def test_the_mask_is_what_the_rule_says() -> None:
    rate = 0.93
    dropout = Dropout(rate, seed=77)
    expected = [[word_int(77, row, column) >= rate * 2**32 for column in range(50)] for row in range(20)]
    assert keep_mask(dropout, 20, 50, "cpu").tolist() == expected


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (17, 7), (3, 700)])
@pytest.mark.usefixtures("poisoned")
def test_the_kernel_drops_the_same(rows: int, columns: int, kind: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, columns + 3, generator=draw).to(kind)[:, :columns]
    for dropout in (Dropout(0.3, 5), Dropout(0.3, 5, torch.randint(0, 1 << 40, (rows,), generator=draw))):
        plain, kernel = drop(x, dropout, "reference"), drop(x, dropout, "triton")
        assert kernel.dtype == plain.dtype == kind
        assert torch.equal(kernel != 0, plain != 0)
        # The interpreter cuts where a GPU rounds.
        torch.testing.assert_close(kernel, plain, rtol=8e-3 if kind == torch.bfloat16 else 1e-3, atol=0.0)
        if kind == torch.float32:
            assert torch.equal(kernel, plain)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_values_are_kept_or_zero_and_the_gradient_goes_the_same_way(impl: str) -> None:
    x = torch.randn(40, 33, generator=torch.Generator().manual_seed(2)).requires_grad_()
    dropout = Dropout(0.5, 3)
    kept = keep_mask(dropout, 40, 33, "cpu")
    dropped = drop(x, dropout, impl)  # type: ignore[arg-type]
    assert torch.equal(dropped, torch.where(kept, x * 2.0, 0.0))
    dropped.backward(torch.full_like(x, 3.0))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(kept, 6.0, 0.0))


def test_seeds_do_not_change_from_release_to_release() -> None:
    """A resumed run must drop what the interrupted one would have."""
    assert dropout_seed(1, 2, 3, "output") == 4807087395884125185
    assert keep_mask(Dropout(0.5, 1), 2, 8, "cpu").int().tolist() == [
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 1, 0, 0],
    ]
