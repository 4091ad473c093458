"""Random rows, and how far a result may be from its value in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(actual: Tensor, exact: Tensor, limit: float, name: str = "") -> None:
    """The largest difference, relative to the largest value, is within the limit."""
    assert actual.shape == exact.shape
    if exact.numel():
        error = float((actual.double() - exact).abs().max() / exact.abs().max().clamp(min=0.1))
        assert error <= limit, name
