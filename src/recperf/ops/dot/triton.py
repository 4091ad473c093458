"""The dot interaction on a GPU: one kernel per direction; products and stacked vectors stay on the chip.

Shapes: B samples, F sparse vectors, V = F + 1 vectors (the dense one first), D width, P pairs, W = D + P.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator
from .reference import flops


@triton.jit
def _load_vectors(dense, sparse, sample, B, F, D, VECTORS: tl.constexpr, WIDTH: tl.constexpr):
    """The vectors of a sample, V x D; the dense one is row 0."""
    vector = tl.arange(0, VECTORS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    wide = column < D
    first = tl.load(dense + sample * D + column + vector * 0, mask=wide & (vector == 0), other=0.0).to(tl.float32)
    place = ((vector - 1) * B + sample) * D + column
    rest = tl.load(sparse + place, mask=wide & (vector > 0) & (vector <= F), other=0.0).to(tl.float32)
    return first + rest


@triton.jit
def _place(row, column, DIAGONAL: tl.constexpr):
    """The column of a pair, counted after the dense vector."""
    return (row * (row + 1) // 2 if DIAGONAL else row * (row - 1) // 2) + column


@triton.jit
def _forward(
    dense, sparse, out, B, F, D, P, W,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, DIAGONAL: tl.constexpr, TF32: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    vectors = _load_vectors(dense, sparse, sample, B, F, D, VECTORS, WIDTH)
    products = tl.dot(vectors, tl.trans(vectors), input_precision="tf32" if TF32 else "ieee")
    row, column = tl.arange(0, VECTORS)[:, None], tl.arange(0, VECTORS)[None, :]
    lower_half = (row <= F) & ((column <= row) if DIAGONAL else (column < row))
    kind = out.dtype.element_ty
    tl.store(out + sample * W + D + _place(row, column, DIAGONAL), products.to(kind), mask=lower_half)
    columns = tl.arange(0, WIDTH)
    dense_row = tl.load(dense + sample * D + columns, mask=columns < D, other=0.0)
    tl.store(out + sample * W + columns, dense_row.to(kind), mask=columns < D)
    rest = D + P + tl.arange(0, PADDING)
    tl.store(out + sample * W + rest, tl.zeros([PADDING], dtype=kind), mask=rest < W)


@triton.jit
def _backward(
    dense, sparse, gradient, to_dense, to_sparse, B, F, D, W,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, DIAGONAL: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    vectors = _load_vectors(dense, sparse, sample, B, F, D, VECTORS, WIDTH)
    row, column = tl.arange(0, VECTORS)[:, None], tl.arange(0, VECTORS)[None, :]
    lower_half = (row <= F) & ((column <= row) if DIAGONAL else (column < row))
    place = gradient + sample * W + D + _place(row, column, DIAGONAL)
    lower = tl.load(place, mask=lower_half, other=0.0).to(tl.float32)
    # The other triangle is read, not transposed in registers: both come from the cache.
    mirrored = (column <= F) & ((row <= column) if DIAGONAL else (row < column))
    place = gradient + sample * W + D + _place(column, row, DIAGONAL)
    upper = tl.load(place, mask=mirrored, other=0.0).to(tl.float32)
    gradient_VD = tl.dot(lower + upper, vectors, input_precision="tf32" if TF32 else "ieee")
    vector, columns = tl.arange(0, VECTORS)[:, None], tl.arange(0, WIDTH)[None, :]
    wide = columns < D
    straight = tl.load(gradient + sample * W + columns + vector * 0, mask=wide & (vector == 0), other=0.0).to(
        tl.float32
    )
    tl.store(
        to_dense + sample * D + columns + vector * 0, (gradient_VD + straight).to(to_dense.dtype.element_ty),
        mask=wide & (vector == 0),
    )  # fmt: skip
    place = ((vector - 1) * B + sample) * D + columns
    tl.store(to_sparse + place, gradient_VD, mask=wide & (vector > 0) & (vector <= F))


@operator("dot_forward", flops=lambda dense_BD, sparse_FBD, **_: flops(sparse_FBD))
def forward(
    dense_BD: Tensor, sparse_FBD: Tensor, *, diagonal: bool, width: int | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    features, batch, dim = sparse_FBD.shape
    pairs = features * (features + 1) // 2 + (features + 1 if diagonal else 0)
    width = width or dim + pairs
    out = torch.empty(batch, width, dtype=dense_BD.dtype, device=dense_BD.device)
    dense_BD, sparse_FBD = dense_BD.contiguous(), sparse_FBD.contiguous()
    if batch:
        _forward[(batch,)](
            dense_BD, sparse_FBD, out, batch, features, dim, pairs, width,
            PADDING=triton.next_power_of_2(max(1, width - dim - pairs)), **_shapes(features, dim, diagonal),
        )  # fmt: skip
    return out, (dense_BD, sparse_FBD)


@operator("dot_backward", flops=lambda saved, *_, **__: 2 * flops(saved[1]))
def backward(saved: tuple[Tensor, Tensor], gradient_BW: Tensor, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    dense_BD, sparse_FBD = saved
    features, batch, dim = sparse_FBD.shape
    to_dense, to_sparse = torch.empty_like(dense_BD), torch.empty_like(sparse_FBD)
    if batch:
        # Rows may lie further apart than they are long: part of a wider product's result.
        gradient_BW = gradient_BW if gradient_BW.stride(1) == 1 else gradient_BW.contiguous()
        _backward[(batch,)](
            dense_BD, sparse_FBD, gradient_BW, to_dense, to_sparse, batch, features, dim, gradient_BW.stride(0),
            **_shapes(features, dim, diagonal),
        )  # fmt: skip
    return to_dense, to_sparse


def _shapes(features: int, dim: int, diagonal: bool) -> dict[str, int | bool]:
    vectors = max(16, triton.next_power_of_2(features + 1))
    width = max(16, triton.next_power_of_2(dim))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    # A warp for every 16 x 64 vectors.
    warps = min(8, max(1, vectors * width // 2048))
    return {"VECTORS": vectors, "WIDTH": width, "DIAGONAL": diagonal, "TF32": tf32, "num_warps": warps}
