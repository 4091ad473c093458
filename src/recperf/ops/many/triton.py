"""Copies and SGD of many tensors on a GPU, some tensors in each launch and many programs for each tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator
from . import reference

BLOCK = 2048
"""Numbers of a program."""
AT_ONCE = 16
"""Tensors of a launch, whose arguments must all fit."""


@triton.jit
def _copy(targets, sources, firsts, sizes, widths, strides, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    for number in tl.static_range(COUNT):
        if (program >= firsts[number]) & (program < firsts[number + 1]):
            at = (program - firsts[number]).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < sizes[number]
            value = tl.load(sources[number] + at, mask=inside)
            to = at // widths[number] * strides[number] + at % widths[number]
            tl.store(targets[number] + to, value.to(targets[number].dtype.element_ty), mask=inside)


@triton.jit
def _descend(parameters, gradients, rates, firsts, sizes, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    rate = tl.load(rates)
    for number in tl.static_range(COUNT):
        if (program >= firsts[number]) & (program < firsts[number + 1]):
            at = (program - firsts[number]).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < sizes[number]
            value = tl.load(parameters[number] + at, mask=inside)
            value -= rate * tl.load(gradients[number] + at, mask=inside)
            tl.store(parameters[number] + at, value, mask=inside)


@operator("copy_many")
def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, or into the first columns of a wider one, which keeps the others."""
    if not all(one.is_contiguous() for one in (*targets, *sources)):
        reference.copy(targets, sources)
        return
    for first in range(0, len(targets), AT_ONCE):
        to, of = tuple(targets[first : first + AT_ONCE]), tuple(sources[first : first + AT_ONCE])
        firsts, sizes = _blocks(of)
        widths = tuple(max(1, one.shape[-1]) for one in of)
        strides = tuple(max(1, one.shape[-1]) for one in to)
        if firsts[-1]:
            _copy[(firsts[-1],)](to, of, firsts, sizes, widths, strides, COUNT=len(to), BLOCK=BLOCK, num_warps=4)


@operator("descend_many", updates=True)
def descend(parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: float | Tensor) -> None:
    """Subtract each gradient times the rate."""
    if not all(one.is_contiguous() and one.dtype == torch.float32 for one in (*parameters, *gradients)):
        reference.descend(parameters, gradients, rate)
        return
    rates = rate if isinstance(rate, Tensor) else torch.full((1,), rate, device=parameters[0].device)
    for first in range(0, len(parameters), AT_ONCE):
        mine, theirs = tuple(parameters[first : first + AT_ONCE]), tuple(gradients[first : first + AT_ONCE])
        firsts, sizes = _blocks(mine)
        if firsts[-1]:
            _descend[(firsts[-1],)](mine, theirs, rates, firsts, sizes, COUNT=len(mine), BLOCK=BLOCK, num_warps=4)


def _blocks(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first program of each tensor, and after the last, and how many numbers it has."""
    sizes = tuple(one.numel() for one in tensors)
    firsts = [0]
    for size in sizes:
        firsts.append(firsts[-1] + -(-size // BLOCK))
    return tuple(firsts), sizes
