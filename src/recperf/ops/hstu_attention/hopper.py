"""HSTU attention on NVIDIA Hopper: half-precision heads of 128, plain causal rows; all else is triton.py's.

Blocks of rows come by the chip's bulk copies, which know nothing of where a row of the batch ends: what they bring of
the next row is masked or multiplied by zero. Programs of one row and head run side by side, because together they read
each key many times: with the heads side by side instead, half of all reads would go to memory and the rate would fall
by a fifth to a quarter.

Shapes: B rows, T tokens of all rows, H heads, A = V = 128 width of a head.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
import triton
from torch import Tensor

from .reference import Into
from .rule import Mask

WIDTH = 128
FORWARD = {"QUERIES": 128, "KEYS": 64, "STAGES": 5}
BACKWARD = {"QUERIES": 64, "KEYS": 128, "STAGES": 3}


def serves(q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, mask: Mask) -> bool:
    """Whether the forward pass is taken over."""
    return _gluon() is not None and serves_backward(q_THA, k_THA, v_THV, mask)


def serves_backward(q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, mask: Mask) -> bool:
    plain = mask.targets_B is None and not mask.window and not mask.context
    halves = q_THA.dtype in (torch.bfloat16, torch.float16) and q_THA.dtype == k_THA.dtype == v_THV.dtype
    some = 0 < q_THA.shape[0] < 1 << 31 and mask.longest > 0
    return plain and halves and some and all(_copied_in_bulk(rows) for rows in (q_THA, k_THA, v_THV))


def forward(q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask) -> Tensor:
    kernels = _gluon()
    assert kernels is not None, "asked for what it does not serve"
    out_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
    heads, blocks = q_THA.shape[1], triton.cdiv(mask.longest, FORWARD["QUERIES"])
    q, k, v = (
        kernels.described(_flat(rows), FORWARD[size])
        for rows, size in ((q_THA, "QUERIES"), (k_THA, "KEYS"), (v_THV, "KEYS"))
    )
    kernels.attend[((offsets_B1.numel() - 1) * heads * blocks,)](
        q, k, v, out_THV, offsets_B1, blocks, mask.alpha / 2, 1 / mask.length, H=heads, D=WIDTH, **FORWARD, num_warps=8
    )
    return out_THV


def backward(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    *, into: Into | None = None,
) -> Into:  # fmt: skip
    """Gradients of q, k and v; those of q are added up by atomics, whose order varies."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from .hopper_backward import grad_keys

    def described(rows: Tensor, size: str) -> Any:
        return TensorDescriptor.from_tensor(_flat(rows), [BACKWARD[size], WIDTH])

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
        described(q_THA, "QUERIES"), described(k_THA, "KEYS"), described(v_THV, "KEYS"), described(grad, "QUERIES"),
        described(sum_q, "QUERIES"), dk, dv, *dk.stride()[:2], *dv.stride()[:2], offsets_B1, blocks,
        mask.alpha / 2, 1 / mask.length, H=heads, D=WIDTH, **BACKWARD, num_warps=8,
    )  # fmt: skip
    torch.mul(sum_q, mask.alpha / 2 / mask.length, out=dq)
    return dq, dk, dv


@functools.cache
def _gluon() -> Any:
    """The forward kernel, where this triton has the language it is written in."""
    if importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is None:
        return None
    return importlib.import_module(f"{__package__}.hopper_forward")


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
