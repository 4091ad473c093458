"""Initial values drawn from (seed, name): independent of what else is drawn, of the order and of the device.

Shapes: R rows, D width, P rows of the pattern.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

PATTERN = 1 << 20
"""Numbers of a large table that are drawn one by one."""


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for this (seed, name) alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def normal_(tensor: Tensor, std: float, seed: int, name: str) -> None:
    drawn = torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, std, generator=generator(seed, name))
    tensor.copy_(drawn)


@torch.no_grad()
def uniform_(tensor: Tensor, bound: float, seed: int, name: str) -> None:
    """Fill with numbers uniform in +-bound."""
    drawn = torch.empty(tensor.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator(seed, name))
    tensor.copy_(drawn)


def xavier_normal_(matrix: Tensor, seed: int, name: str) -> None:
    normal_(matrix, math.sqrt(2 / sum(matrix.shape)), seed, name)


def xavier_uniform_(matrix: Tensor, seed: int, name: str) -> None:
    uniform_(matrix, math.sqrt(6 / sum(matrix.shape)), seed, name)


class InitialRows:
    """The initial rows of a table: normal with a standard deviation or, without one, uniform in +-1/sqrt(rows).

    Drawing every number of a large table would take longer than a training. So the first P rows, the pattern, are drawn
    one by one, and each further block of P rows is the pattern after a random transform that keeps its distribution and
    takes rows of different blocks to unrelated ones: normal rows are rotated in pairs, uniform rows shifted modulo the
    interval, by a random amount per column. No row repeats, and a row depends on the seed, name and its place alone.
    """

    def __init__(self, rows: int, dim: int, *, std: float | None, seed: int, name: str) -> None:
        self.bound, self.std, self.seed, self.name = rows**-0.5, std, seed, name
        self.half = max(1, PATTERN // dim // 2)
        pattern_PD, draw = torch.empty(min(rows, 2 * self.half), dim), generator(seed, name)
        if std is None:
            pattern_PD.uniform_(-1, 1, generator=draw)
        else:
            pattern_PD.normal_(0, std, generator=draw)
        self.pattern_PD = pattern_PD

    @torch.no_grad()
    def fill_(self, out_RD: Tensor, first_row: int = 0) -> None:
        """Write the rows of the table, beginning with `first_row`."""
        self.pattern_PD = self.pattern_PD.to(out_RD.device)
        scratch_PD, row, last = torch.empty_like(self.pattern_PD), first_row, first_row + out_RD.shape[0]
        while row < last:
            block, start = divmod(row, self.half)
            stop = min(self.half, start + last - row)
            out = out_RD[row - first_row : row - first_row + stop - start]
            self._fill(out, block, start, stop, scratch_PD[start:stop])
            row += stop - start

    def _fill(self, out: Tensor, half_block: int, start: int, stop: int, scratch: Tensor) -> None:
        """Write rows start to stop of half a block. Each operation rounds once, so all devices give the same bits."""
        block, lower = divmod(half_block, 2)
        own, other = (self.pattern_PD[half * self.half :][start:stop] for half in (lower, 1 - lower))
        draw = generator(self.seed, f"{self.name}.{block}")
        amount_D = torch.empty(out.shape[1]).uniform_(-1, 1, generator=draw)
        if not block:
            out.copy_(own)
        elif self.std is None:
            torch.add(own, amount_D.to(out.device), out=out)
            torch.mul(out, 0.5, out=scratch).round_()
            out.sub_(scratch, alpha=2)
        else:
            cosine_D, sine_D = (amount_D * math.pi).cos(), (amount_D * math.pi).sin()
            torch.mul(own, cosine_D.to(out.device), out=out)
            out.add_(torch.mul(other, (sine_D if lower else -sine_D).to(out.device), out=scratch))
        if self.std is None:
            out.mul_(self.bound)
