"""Initial values drawn from (seed, name): independent of what else is drawn, of the order and of the device.

Shapes: R rows, D width, P rows of the pattern, N single rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.hashing import GOLDEN, finalise_torch_, signed, stream

CHUNK = 1 << 22
"""Uniform values drawn at a time, so that a table never needs its memory twice."""
STEP = 2.0**-23
"""24 random bits times this, minus 1, is an exact number in [-1, 1)."""
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
        self.description = {"kind": "pattern", "rows": rows, "dim": dim, "std": std, "seed": seed, "name": name}
        """The arguments as JSON values, for a checkpoint without rows that were never trained."""
        self.half = max(1, PATTERN // dim // 2)
        pattern_PD, draw = torch.empty(min(rows, 2 * self.half), dim), generator(seed, name)
        if std is None:
            pattern_PD.uniform_(-1, 1, generator=draw)
        else:
            pattern_PD.normal_(0, std, generator=draw)
        self.pattern_PD = pattern_PD
        blocks = -(-rows // (2 * self.half))
        # Memory that is taken as blocks are used.
        self._known_B, self._transforms_B2D = torch.zeros(blocks, dtype=torch.bool), torch.empty(blocks, 2, dim)

    @torch.no_grad()
    def rows(self, rows_N: Tensor) -> Tensor:
        """Single rows, in any order: the bits that `fill_` writes there."""
        out_ND = torch.empty(len(rows_N), self.pattern_PD.shape[1], device=rows_N.device)
        for start in range(0, len(rows_N), 2 * self.half):
            part = slice(start, start + 2 * self.half)
            out_ND[part] = self._single(rows_N[part])
        return out_ND.mul_(self.bound) if self.std is None else out_ND

    def _single(self, rows_N: Tensor) -> Tensor:
        pattern_PD = self.pattern_PD = self.pattern_PD.to(rows_N.device)
        blocks_N, places_N = rows_N // (2 * self.half), rows_N % (2 * self.half)
        own_ND, later_N1 = pattern_PD[places_N], (blocks_N > 0)[:, None]
        if not later_N1.any():
            return own_ND
        transform_N2D = self._transforms(blocks_N)[blocks_N]
        if self.std is None:
            moved_ND = own_ND + transform_N2D[:, 0]
            moved_ND.sub_(torch.mul(moved_ND, 0.5).round_(), alpha=2)
        else:
            other_ND = pattern_PD[(places_N + self.half) % (2 * self.half)]
            cosine_ND, sine_ND = transform_N2D.unbind(1)
            sine_ND = torch.where((places_N >= self.half)[:, None], sine_ND, -sine_ND)
            moved_ND = (own_ND * cosine_ND).add_(other_ND.mul_(sine_ND))
        return torch.where(later_N1, moved_ND, own_ND)

    def _transforms(self, blocks_N: Tensor) -> Tensor:
        """The transforms of all blocks, of which those of these blocks are computed."""
        device = blocks_N.device
        self._known_B, self._transforms_B2D = self._known_B.to(device), self._transforms_B2D.to(device)
        new_B = torch.unique(blocks_N[~self._known_B[blocks_N]])
        if new_B.numel():
            transforms_B2D = torch.stack([torch.stack(self._transform(block)) for block in new_B.tolist()])
            self._transforms_B2D[new_B] = transforms_B2D.to(device)
            self._known_B[new_B] = True
            if device.type == "cuda":
                # Threads on other streams read them too.
                torch.cuda.current_stream(device).synchronize()
        return self._transforms_B2D

    def _transform(self, block: int) -> tuple[Tensor, Tensor]:
        """How a block differs from the pattern: the shift of each column, or cosine and sine of its rotation."""
        draw = generator(self.seed, f"{self.name}.{block}")
        amount_D = torch.empty(self.pattern_PD.shape[1]).uniform_(-1, 1, generator=draw)
        return (amount_D, amount_D) if self.std is None else ((amount_D * math.pi).cos(), (amount_D * math.pi).sin())

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
        if not block:
            out.copy_(own)
        elif self.std is None:
            torch.add(own, self._transform(block)[0].to(out.device), out=out)
            torch.mul(out, 0.5, out=scratch).round_()
            out.sub_(scratch, alpha=2)
        else:
            cosine_D, sine_D = self._transform(block)
            torch.mul(own, cosine_D.to(out.device), out=out)
            out.add_(torch.mul(other, (sine_D if lower else -sine_D).to(out.device), out=scratch))
        if self.std is None:
            out.mul_(self.bound)


class UniformRows:
    """The initial rows of a table, uniform in +-1/sqrt(rows): each number depends on the seed and its place alone."""

    def __init__(self, rows: int, dim: int, *, seed: int) -> None:
        self.dim, self.bound, self.seed = dim, rows**-0.5, seed
        self.description = {"kind": "uniform", "bound": self.bound, "seed": seed}

    def rows(self, rows_N: Tensor) -> Tensor:
        return uniform_rows(rows_N, self.dim, self.bound, self.seed)

    def fill_(self, out_RD: Tensor, first_row: int = 0) -> None:
        fill_uniform_(out_RD, self.bound, self.seed, first_row)


@torch.no_grad()
def fill_uniform_(table_RD: Tensor, bound: float, seed: int, first_row: int = 0) -> None:
    """Fill with numbers in +-bound, the same bits on every device; a shard begins at `first_row` of the table."""
    flat, start_place = table_RD.view(-1), first_row * table_RD.shape[1]
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        part.copy_(_uniform(torch.arange(part.numel(), device=flat.device), start_place + start, bound, seed))


@torch.no_grad()
def uniform_rows(rows_U: Tensor, dim: int, bound: float, seed: int) -> Tensor:
    """Rows of a table that `fill_uniform_` fills, alone."""
    out_UD, columns_D = torch.empty(len(rows_U), dim, device=rows_U.device), torch.arange(dim, device=rows_U.device)
    step = max(1, CHUNK // dim)
    for start in range(0, len(rows_U), step):
        places = rows_U[start : start + step, None] * dim + columns_D
        out_UD[start : start + step] = _uniform(places, 0, bound, seed)
    return out_UD


def _uniform(places: Tensor, start: int, bound: float, seed: int) -> Tensor:
    """The numbers at places of a table, counted from a start; overwrites the places."""
    words = finalise_torch_(places.mul_(signed(GOLDEN)).add_(signed(stream(seed) + GOLDEN * start)))
    bits = words.bitwise_right_shift_(40).bitwise_and_((1 << 24) - 1)
    return bits.to(torch.float32).mul_(STEP).sub_(1.0).mul_(bound)


Fill = Callable[[Tensor, int], None]
"""Fills a contiguous tensor with the initial rows of a table, beginning at a row."""


def initial_rows(initial: Mapping[str, Any], shape: tuple[int, ...]) -> Fill:
    """How the rows of a tensor of that shape begin.

    zero: all are 0; uniform (bound, seed): as DLRMv4's tables; pattern (rows, dim, std, seed, name): as the tables of
    bags; stacked (parts, each with its rows and its initial): tables one below the other.
    """
    fields = dict(initial)
    return _KINDS[fields.pop("kind")](shape, **fields)


def _zero(shape: tuple[int, ...]) -> Fill:
    def fill(out: Tensor, first_row: int) -> None:
        out.zero_()

    return fill


def _uniform_rows(shape: tuple[int, ...], *, bound: float, seed: int) -> Fill:
    return lambda out, first_row: fill_uniform_(out, bound, seed, first_row)


def _pattern(shape: tuple[int, ...], *, rows: int, dim: int, std: float | None, seed: int, name: str) -> Fill:
    if (rows, dim) != shape:
        raise ValueError(f"initial rows of shape {(rows, dim)} are not those of a tensor of shape {shape}")
    return InitialRows(rows, dim, std=std, seed=seed, name=name).fill_


def _stacked(shape: tuple[int, ...], *, parts: list[dict[str, Any]]) -> Fill:
    if sum(part["rows"] for part in parts) != shape[0] or any(part["rows"] < 1 for part in parts):
        raise ValueError(f"initial rows of {len(parts)} tables are not those of a tensor of shape {shape}")
    fills = [initial_rows(part["initial"], (part["rows"], *shape[1:])) for part in parts]

    def fill(out: Tensor, first_row: int) -> None:
        start = 0
        for part, fill_part in zip(parts, fills):
            first, stop = max(start, first_row), min(start + part["rows"], first_row + out.shape[0])
            if first < stop:
                fill_part(out[first - first_row : stop - first_row], first - start)
            start += part["rows"]

    return fill


_KINDS: dict[str, Callable[..., Fill]] = {
    "zero": _zero,
    "uniform": _uniform_rows,
    "pattern": _pattern,
    "stacked": _stacked,
}
