"""Initial values drawn from (seed, name): the same whatever else was drawn, in whatever order, on whatever device."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator of its own for each (seed, name)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def normal_(tensor: Tensor, std: float, seed: int, name: str) -> None:
    drawn = torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, std, generator=generator(seed, name))
    tensor.copy_(drawn)
