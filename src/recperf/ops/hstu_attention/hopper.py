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


def serves(
    q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    *, into: Into | None = None,
) -> bool:  # fmt: skip
    """Whether these kernels serve a pass that writes `into`."""
    dtype, width = q_THA.dtype, q_THA.shape[2]
    half = dtype in (torch.bfloat16, torch.float16) and width == v_THV.shape[2] and width in WIDTHS
    some = 0 < q_THA.shape[0] < 1 << 31 and 0 < mask.longest < 1 << 31
    plain = mask.causal and offsets_B1.dtype == torch.int64 and offsets_B1.is_contiguous()
    if not (half and some and plain):
        return False
    if not all(one.dtype == dtype and _copied_in_bulk(one) for one in (q_THA, k_THA, v_THV, *(into or ()))):
        return False
    return _kernels(q_THA.device, dtype, width) is not None


def forward(q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask) -> Tensor:
    out_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
    rows, (_, heads, width) = offsets_B1.numel() - 1, q_THA.shape
    groups, keys = (2 if width > 128 else 3), (64 if width > 64 else 128)
    blocks = -(-mask.longest // (groups * GROUP))
    tiles = rows * heads * blocks
    programs = min(tiles, _processors(q_THA.device))
    _loaded(q_THA)["attend"](
        programs, _map(q_THA, GROUP), _map(k_THA, keys), _map(v_THV, keys), out_THV, *out_THV.stride()[:2],
        offsets_B1, blocks, heads, tiles, _counter(q_THA.device), mask.alpha / 2, 1 / mask.length,
    )  # fmt: skip
    return out_THV


def backward(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    *, into: Into | None = None, sums: Into | None = None,
) -> Into:  # fmt: skip
    """Gradients of q, k and v, and their sums over all tokens; the same bits every time."""
    # Fresh ones lie as a plain tensor does, whatever larger rows the inputs are cut from.
    dq, dk, dv = into or (
        torch.empty_like(q_THA, memory_format=torch.contiguous_format),
        torch.empty_like(k_THA, memory_format=torch.contiguous_format),
        torch.empty_like(v_THV, memory_format=torch.contiguous_format),
    )
    grad = grad_THV.to(v_THV.dtype)
    if not _copied_in_bulk(grad):
        grad = grad.contiguous()
    rows, (tokens, heads, width), device = offsets_B1.numel() - 1, q_THA.shape, q_THA.device
    half, over, kernels, wide = mask.alpha / 2, 1 / mask.length, _loaded(q_THA), width > 128
    keys, queries = (1, 2) if wide else (2, 1)  # groups of 64 a program
    key_blocks, query_blocks = (-(-mask.longest // (groups * GROUP)) for groups in (keys, queries))
    key_totals = query_totals = None
    if sums is not None:
        key_totals = torch.empty(rows, heads, key_blocks * keys, 2, width, dtype=torch.float32, device=device)
        query_totals = torch.empty(rows, heads, query_blocks * queries, width, dtype=torch.float32, device=device)
    maps = _map(q_THA, GROUP), _map(k_THA, keys * GROUP), _map(v_THV, keys * GROUP), _map(grad, GROUP)
    of_keys = key_totals, dk, dv, *dk.stride()[:2], *dv.stride()[:2], offsets_B1, key_blocks, heads
    of_queries = query_totals, dq, *dq.stride()[:2], offsets_B1, query_blocks, heads
    key_programs, query_programs = rows * heads * key_blocks, rows * heads * query_blocks
    if wide:
        kernels["grad_keys"](key_programs, *maps, *of_keys, half, over)
        kernels["grad_queries"](query_programs, *maps, *of_queries, half, over)
    else:
        # Every row begins at a multiple of 64 tokens in them.
        sum_blocks = tokens // GROUP + rows
        query_sums = torch.empty(sum_blocks * heads * GROUP * width, dtype=torch.float32, device=device)
        turns = torch.zeros(sum_blocks * heads * 2, dtype=torch.int32, device=device)
        kernels["grad_keys"](key_programs, *maps, query_sums, turns, *of_keys, sum_blocks, half, over)
        kernels["grad_queries"](query_programs, query_sums, *of_queries, sum_blocks, half * over)
    if sums is not None:
        assert key_totals is not None
        assert query_totals is not None
        torch.sum(query_totals, (0, 2), out=sums[0])
        totals = key_totals.sum((0, 2))
        sums[1].copy_(totals[:, 0])
        sums[2].copy_(totals[:, 1])
    return dq, dk, dv


def _loaded(q_THA: Tensor) -> dict[str, cuda.Kernel]:
    kernels = _kernels(q_THA.device, q_THA.dtype, q_THA.shape[2])
    assert kernels is not None
    return kernels


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype, width: int) -> dict[str, cuda.Kernel] | None:
    entries = {"attend": cuda.Entry("MMMPqqPiiiPff", 384 if width > 128 else 512, SHARED)}
    if width > 128:
        entries["grad_keys"] = cuda.Entry("MMMMPPPqqqqPiiff", 384, SHARED)
        entries["grad_queries"] = cuda.Entry("MMMMPPqqPiiff", 384, SHARED)
    else:
        entries["grad_keys"] = cuda.Entry("MMMMPPPPPqqqqPiiiff", 384, SHARED)
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
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    if (device, stream) not in _counters:
        _counters[device, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return _counters[device, stream]


def _map(rows_THA: Tensor, rows: int) -> bytes:
    """Heads side by side; a token's stride may be that of a larger row."""
    tokens, heads, width = rows_THA.shape
    return cuda.block_map(rows_THA.data_ptr(), tokens, heads * width, rows_THA.stride(0), rows_THA.dtype, rows)


def _copied_in_bulk(rows_THA: Tensor) -> bool:
    """Whether the chip's bulk copies can read it: heads without gaps, rows at multiples of 16 bytes."""
    size = rows_THA.element_size()
    return (
        rows_THA.stride()[1:] == (rows_THA.shape[2], 1)
        and rows_THA.stride(0) >= rows_THA.shape[1] * rows_THA.shape[2]
        and rows_THA.stride(0) * size % 16 == 0
        and rows_THA.data_ptr() % 16 == 0
    )
