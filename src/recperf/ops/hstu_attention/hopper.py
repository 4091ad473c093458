"""HSTU attention on NVIDIA Hopper: half-precision heads of 128, plain causal rows; triton.py serves all else.

The chip's bulk copies bring blocks of rows and do not know where a row of the batch ends: the part of the next row that
they bring is masked or multiplied by zero, so that a NaN in one row also reaches the end of the previous row. Programs
of one row and head run side by side, because together they read each key many times: with the heads side by side
instead, half of all reads would go to memory and the rate would fall by a fifth to a quarter.

Shapes: B rows, T tokens of all rows, H heads, A = V = 128 width of a head.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
import triton
from torch import Tensor

from .reference import Into
from .rule import Mask

WIDTH = 128
FORWARD = {"QUERIES": 128, "KEYS": 64, "STAGES": 5}
BACKWARD = {"QUERIES": 64, "KEYS": 128, "STAGES": 2}


def serves(q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, mask: Mask) -> bool:
    """Whether these kernels serve the pass, forward or backward."""
    plain = mask.targets_B is None and not mask.window and not mask.context
    halves = q_THA.dtype in (torch.bfloat16, torch.float16) and q_THA.dtype == k_THA.dtype == v_THV.dtype
    some = 0 < q_THA.shape[0] < 1 << 31 and 0 < mask.longest < (1 << 31) // (q_THA.shape[1] * WIDTH)
    return _written() and plain and halves and some and all(map(_copied_in_bulk, (q_THA, k_THA, v_THV)))


serves_backward = serves


def forward(q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask) -> Tensor:
    from .hopper_forward import attend, described

    out_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
    heads, blocks = q_THA.shape[1], triton.cdiv(mask.longest, FORWARD["QUERIES"])
    q, k, v = (
        described(_flat(rows), FORWARD[size]) for rows, size in ((q_THA, "QUERIES"), (k_THA, "KEYS"), (v_THV, "KEYS"))
    )
    attend[((offsets_B1.numel() - 1) * heads * blocks,)](
        q, k, v, out_THV, offsets_B1, blocks, mask.alpha / 2, 1 / mask.length, H=heads, D=WIDTH, **FORWARD, num_warps=8
    )
    return out_THV


def backward(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    *, into: Into | None = None,
) -> Into:  # fmt: skip
    """Gradients of q, k and v; those of q are added up by atomics, whose order varies."""
    from .hopper_backward import grad_keys
    from .hopper_forward import described

    # Fresh ones lie as a plain tensor does, whatever larger rows the inputs are cut from.
    dq, dk, dv = into or (
        torch.empty_like(q_THA, memory_format=torch.contiguous_format),
        torch.empty_like(k_THA, memory_format=torch.contiguous_format),
        torch.empty_like(v_THV, memory_format=torch.contiguous_format),
    )
    grad = grad_THV.to(v_THV.dtype)
    if not _copied_in_bulk(grad):
        grad = grad.contiguous()
    sum_q = torch.zeros(q_THA.shape, dtype=torch.float32, device=q_THA.device)
    heads, blocks = q_THA.shape[1], triton.cdiv(mask.longest, BACKWARD["KEYS"])
    grad_keys[((offsets_B1.numel() - 1) * heads * blocks,)](
        *(
            described(_flat(rows), BACKWARD[size])
            for rows, size in ((q_THA, "QUERIES"), (k_THA, "KEYS"), (v_THV, "KEYS"), (grad, "QUERIES"))
        ),
        sum_q, dk, dv, *dk.stride()[:2], *dv.stride()[:2], offsets_B1, blocks,
        mask.alpha / 2, 1 / mask.length, H=heads, D=WIDTH, **BACKWARD, num_warps=8,
    )  # fmt: skip
    torch.mul(sum_q, mask.alpha / 2 / mask.length, out=dq)
    return dq, dk, dv


@functools.cache
def _written() -> bool:
    """Whether this triton has Gluon, the language of the kernels."""
    return importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None


def _flat(rows_THA: Tensor) -> Tensor:
    """Heads side by side; a token's stride may be that of a larger row."""
    tokens, heads, width = rows_THA.shape
    return rows_THA.as_strided((tokens, heads * width), (rows_THA.stride(0), 1))


def _copied_in_bulk(rows_THA: Tensor) -> bool:
    """Whether the chip's bulk copies can read it: heads without gaps, rows at multiples of 16 bytes."""
    size = rows_THA.element_size()
    return (
        rows_THA.shape[2] == WIDTH
        and rows_THA.stride()[1:] == (WIDTH, 1)
        and rows_THA.stride(0) * size % 16 == 0
        and rows_THA.data_ptr() % 16 == 0
    )
