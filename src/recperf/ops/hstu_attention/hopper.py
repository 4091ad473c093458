"""HSTU attention on NVIDIA Hopper: plain causal rows, half-precision heads of 64, 128 and 256; triton.py serves
all else.

The chip's bulk copies bring blocks of rows and do not know where a row of the batch ends: the part of the next row that
they bring is masked or multiplied by zero, so that a NaN in one row also reaches the end of the previous row. Programs
of one row and head run side by side, because together they read each key many times.

Shapes: B rows, T tokens of all rows, H heads, A = V width of a head.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from .. import cuda
from .reference import Into, Mask

SOURCE = Path(__file__).with_name("hopper.cu")
WIDTHS = 64, 128, 256
GROUP = 64
"""Queries, or in the backward pass keys, of a group of warps."""
SHARED = 226 << 10
"""Bytes of shared memory of a program."""


Matrix = tuple[int, int, int, int, int]
"""What the copy engine must know: address, rows, numbers in a row, bytes from row to row, kind of number."""


def forward(q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask) -> Tensor | None:
    """The output; None where these kernels do not serve."""
    served = _served(q_THA, k_THA, v_THV, offsets_B1, mask)
    if served is None:
        return None
    kernels, q, k, v = served
    # Fresh rows lie as a plain tensor's do, whatever larger ones the inputs are cut from.
    out_THV = torch.empty_like(v_THV, memory_format=torch.contiguous_format)
    (_, heads, width), device = q_THA.shape, q_THA.device
    groups, keys = (2 if width > 128 else 3), (64 if width > 64 else 128)
    blocks = -(-mask.longest // (groups * GROUP))
    tiles, counter = (offsets_B1.numel() - 1) * heads * blocks, _counter(device)
    kernels["attend"].start(
        min(tiles, _processors(device)), *q, GROUP, *k, keys, *v, keys, out_THV.data_ptr(), heads * width, width,
        offsets_B1.data_ptr(), blocks, heads, tiles, counter.data_ptr(), mask.alpha / 2, 1 / mask.length,
    )  # fmt: skip
    return out_THV


def backward(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    *, into: Into | None = None, sums: Into | None = None,
) -> Into | None:  # fmt: skip
    """Gradients of q, k and v, and their sums over all tokens; the same bits every time. None as for `forward`."""
    served = _served(q_THA, k_THA, v_THV, offsets_B1, mask)
    if served is None or (into and any(one.dtype != q_THA.dtype or not _matrix(one) for one in into)):
        return None
    kernels, q, k, v = served
    plain = torch.contiguous_format
    grad, grad_dtype = _matrix(grad_THV), v_THV.dtype
    if grad is None or grad_THV.dtype is not grad_dtype:
        grad_THV = grad_THV.to(grad_dtype, memory_format=plain, copy=True)
        grad = _matrix(grad_THV)
        assert grad is not None
    dq, dk, dv = into or [torch.empty_like(one, memory_format=plain) for one in (q_THA, k_THA, v_THV)]
    rows, (tokens, heads, width), device = offsets_B1.numel() - 1, q_THA.shape, q_THA.device
    half, over, wide = mask.alpha / 2, 1 / mask.length, width > 128
    keys, queries = (1, 2) if wide else (2, 1)  # groups of 64 a program
    key_blocks, query_blocks = -(-mask.longest // (keys * GROUP)), -(-mask.longest // (queries * GROUP))
    key_totals = query_totals = None
    if sums is not None:
        key_totals = torch.empty(rows, heads, key_blocks * keys, 2, width, dtype=torch.float32, device=device)
        query_totals = torch.empty(rows, heads, query_blocks * queries, width, dtype=torch.float32, device=device)
    maps = *q, GROUP, *k, keys * GROUP, *v, keys * GROUP, *grad, GROUP
    starts, key_strides, query_strides = offsets_B1.data_ptr(), (*dk.stride()[:2], *dv.stride()[:2]), dq.stride()[:2]
    of_keys = _address(key_totals), dk.data_ptr(), dv.data_ptr(), *key_strides, starts, key_blocks, heads
    of_queries = _address(query_totals), dq.data_ptr(), *query_strides, starts, query_blocks, heads
    key_programs, query_programs = rows * heads * key_blocks, rows * heads * query_blocks
    if wide:
        kernels["grad_keys"].start(key_programs, *maps, *of_keys, half, over)
        kernels["grad_queries"].start(query_programs, *maps, *of_queries, half, over)
    else:
        # Sums of the queries' gradients, each row from a multiple of 64 tokens on, and whose turn it is to add.
        sum_blocks = tokens // GROUP + rows
        numbers, turns = sum_blocks * heads * GROUP * width, sum_blocks * heads * 2
        scratch = torch.empty(numbers + turns, dtype=torch.float32, device=device)
        added = scratch.data_ptr()
        kernels["grad_keys"].start(
            key_programs, *maps, added, added + 4 * numbers, turns, *of_keys, sum_blocks, half, over
        )
        kernels["grad_queries"].start(query_programs, added, *of_queries, sum_blocks, half * over)
    if key_totals is not None and query_totals is not None and sums is not None:
        torch.sum(query_totals, (0, 2), out=sums[0])
        totals = key_totals.sum((0, 2))
        sums[1].copy_(totals[:, 0])
        sums[2].copy_(totals[:, 1])
    return dq, dk, dv


def _served(
    q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask
) -> tuple[dict[str, cuda.Kernel], Matrix, Matrix, Matrix] | None:
    """The kernels and the matrices of q, k and v; None where they do not serve."""
    q, k, v = _matrix(q_THA), _matrix(k_THA), _matrix(v_THV)
    if q is None or k is None or v is None or q[2] != v[2] or not q[4] == k[4] == v[4]:
        return None
    if not mask.causal or not 0 < mask.longest < 1 << 31 or not 0 < q[1] < 1 << 31:
        return None
    if offsets_B1.dtype is not torch.int64 or not offsets_B1.is_contiguous():
        return None
    kernels = _kernels(q_THA.device, q_THA.dtype, q_THA.shape[2])
    return None if kernels is None else (kernels, q, k, v)


def _matrix(rows_THA: Tensor) -> Matrix | None:
    """All heads of a token side by side are a row; a token's stride may be that of a larger row. None where the chip's
    bulk copies cannot read it: there must be no gaps between heads, and rows at multiples of 16 bytes."""
    kind = cuda.KINDS.get(rows_THA.dtype)
    tokens, heads, width = rows_THA.shape
    token, head, one = rows_THA.stride()
    address = rows_THA.data_ptr()
    # Numbers of these kinds have two bytes.
    if kind is None or head != width or one != 1 or token < heads * width or token % 8 or address % 16:
        return None
    return address, tokens, heads * width, 2 * token, kind


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype, width: int) -> dict[str, cuda.Kernel] | None:
    if width not in WIDTHS:
        return None
    entries = {"attend": cuda.Entry("MMMPqqPiiiPff", 384 if width > 128 else 512, SHARED)}
    if width > 128:
        entries["grad_keys"] = cuda.Entry("MMMMPPPqqqqPiiff", 384, SHARED)
        entries["grad_queries"] = cuda.Entry("MMMMPPqqPiiff", 384, SHARED)
    else:
        entries["grad_keys"] = cuda.Entry("MMMMPZPPPqqqqPiiiff", 384, SHARED)
        entries["grad_queries"] = cuda.Entry("PPPqqPiiif", 128)
    options = [f"-DWIDTH={width}", *["-DFLOAT16"] * (dtype == torch.float16)]
    instead = "attention uses kernels that are slower on this GPU"
    return cuda.load(SOURCE, device, *options, entries=entries, instead=instead)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """From which programs take their blocks of queries. Calls on different streams run at the same time, so each has
    its own; a CUDA graph, which may run on any stream, clears its own."""
    if torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    place = device, torch._C._cuda_getCurrentRawStream(device.index)
    counter = _counters.get(place)
    if counter is None:
        counter = _counters[place] = torch.zeros(2, dtype=torch.int32, device=device)
    return counter
