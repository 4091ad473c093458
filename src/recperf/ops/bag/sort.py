"""Sorts the rows of a batch by as many bits as a row number has, in CUDA C++; torch's sort looks at all bits of a type.

Shapes: V slots for ids.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from .. import cuda

SOURCE = Path(__file__).with_name("sort.cu")
LEAST_BITS, MOST_BITS = 5, 9
"""Of a pass."""
THREADS, TILE = 512, 4096
"""As in the kernels: threads of a block, and items of a tile."""
COUNTING = 264
"""Blocks that count digits: two for each processor of a large GPU."""


def serves(slots: int, rows: int, device: torch.device) -> bool:
    """Whether these kernels can sort `slots` ids of tables of `rows` rows; a row after the last is sorted too."""
    fits = 0 < slots < 1 << 30 and rows < 1 << 31
    return fits and device.type == "cuda" and torch.version.hip is None and _kernels(_bits(rows)[0], device) is not None


def sort_rows(rows_V: Tensor, bags_V: Tensor, used_1: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The first `used_1` rows, int32 and at most `rows`, in ascending order, and the bag of each; equal rows keep their
    order. What follows them in the results is unspecified."""
    (bits, passes), device = _bits(rows), rows_V.device
    kernels = _kernels(bits, device)
    assert kernels is not None
    radix, most = 1 << bits, rows_V.numel()
    tiles = -(-most // TILE)
    scratch = torch.zeros(1 + passes * (1 + radix + tiles * radix), dtype=torch.int32, device=device)
    done_1, tickets, counts = scratch[:1], scratch[1 : 1 + passes], scratch[1 + passes :]
    published = counts[passes * radix :]
    kernels["count_digits"](min(tiles, COUNTING), rows_V, used_1, most, passes, counts, done_1)
    source = rows_V, bags_V
    for number in range(passes):
        target = torch.empty_like(rows_V), torch.empty_like(bags_V)
        kernels["sort_digit"](
            tiles, *source, *target, used_1, most, number * bits, counts[number * radix :],
            published[number * tiles * radix :], tickets[number:],
        )  # fmt: skip
        source = target
    return source


def _bits(rows: int) -> tuple[int, int]:
    """Bits of a pass and the number of passes for numbers up to `rows`."""
    whole = max(1, rows.bit_length())
    passes = -(-whole // MOST_BITS)
    return max(LEAST_BITS, -(-whole // passes)), passes


@functools.cache
def _kernels(bits: int, device: torch.device) -> dict[str, cuda.Kernel] | None:
    shared = 4 * ((THREADS // 32 + 2) * (1 << bits) + 2 * TILE)
    entries = {
        "count_digits": cuda.Entry("PPiiPP", THREADS),
        "sort_digit": cuda.Entry("PPPPPiiPPP", THREADS, shared),
    }
    instead = "ids are sorted by torch, which takes longer"
    return cuda.load(SOURCE, device, f"-DBITS={bits}", entries=entries, instead=instead)
