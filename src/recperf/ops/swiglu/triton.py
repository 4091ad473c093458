"""silu(gate) * up on a GPU, in float32 between loads and stores. Shapes: see the package."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator

BLOCK = 1024
"""Columns of a row that a program of four warps takes."""


@triton.jit
def _forward(both, out, F, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(both + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * stride + F + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _backward(grad, both, out, F, grad_stride, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    slope = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(both + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * stride + F + column, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    of_gate = slope * up * open_ * (1.0 + gate * (1.0 - open_))
    tl.store(out + row * 2 * F + column, of_gate, mask=inside)
    tl.store(out + row * 2 * F + F + column, slope * gate * open_, mask=inside)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@operator("swiglu_forward")
def forward(both_TG: Tensor) -> Tensor:
    both_TG = _rows(both_TG)
    tokens, columns = both_TG.shape[0], both_TG.shape[1] // 2
    out_TF = both_TG.new_empty(tokens, columns)
    if out_TF.numel():
        grid = (tokens, triton.cdiv(columns, BLOCK))
        _forward[grid](both_TG, out_TF, columns, both_TG.stride(0), BLOCK=BLOCK, num_warps=4)
    return out_TF


@operator("swiglu_backward")
def backward(grad_TF: Tensor, both_TG: Tensor) -> Tensor:
    """The gradients of gate and up."""
    grad_TF, both_TG = _rows(grad_TF), _rows(both_TG)
    tokens, columns = grad_TF.shape
    grad_TG = torch.empty(tokens, 2 * columns, dtype=both_TG.dtype, device=both_TG.device)
    if grad_TG.numel():
        grid, strides = (tokens, triton.cdiv(columns, BLOCK)), (grad_TF.stride(0), both_TG.stride(0))
        _backward[grid](grad_TF, both_TG, grad_TG, columns, *strides, BLOCK=BLOCK, num_warps=4)
    return grad_TG
