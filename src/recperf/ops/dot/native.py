"""The dot interaction in C: torch's batched product on a CPU calls several operators per sample.

Shapes: B samples, F sparse vectors, D width, W output width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..arguments import ANY, address, widened
from ..compile import I64, POINTER, even_cuts, native_library, share, usable
from ..operators import operator
from .reference import flops

SMALL = 512
"""With fewer samples a second thread costs more than it saves."""


_FUNCTIONS = {"dot_forward": [POINTER] * 3 + [I64] * 7, "dot_backward": [POINTER] * 5 + [I64] * 7}
library = native_library(__file__, _FUNCTIONS)
"""Returns the compiled library, or the reason why it cannot be used."""


def _cuts(samples: int) -> list[int]:
    return even_cuts(samples, torch.get_num_threads() if samples >= SMALL else 1)


@operator("dot_forward", flops=lambda dense_BD, sparse_FBD, **_: flops(sparse_FBD))
def forward(
    dense_BD: Tensor, sparse_FBD: Tensor, *, diagonal: bool, width: int | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    dense_BD, sparse_FBD = widened(dense_BD).contiguous(), sparse_FBD.contiguous()
    vectors, (features, samples, dim) = _addresses(dense_BD, sparse_FBD)
    out_width = dim + _pairs(features, diagonal)
    if width is not None and width < out_width:
        raise ArgumentError(f"width is {width}; the dense vector and the pairs need {out_width}")
    out_BW = torch.empty(samples, width or out_width)
    call, places = usable(library()).dot_forward, (*vectors, out_BW.data_ptr())

    def work(first: int, last: int) -> None:
        call(*places, first, last, samples, features, dim, out_BW.shape[1], int(diagonal))

    share(work, _cuts(samples))
    return out_BW, (dense_BD, sparse_FBD)


@operator("dot_backward", flops=lambda saved, *_, **__: 2 * flops(saved[1]))
def backward(saved: tuple[Tensor, Tensor], gradient_BW: Tensor, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    dense_BD, sparse_FBD = saved
    vectors, (features, samples, dim) = _addresses(dense_BD, sparse_FBD)
    gradient_BW = widened(gradient_BW).contiguous()
    width, least = gradient_BW.shape[-1], dim + _pairs(features, diagonal)
    if width < least:
        raise ArgumentError(f"gradient_BW is {width} wide; the dense vector and the pairs need {least}")
    gradient = address("gradient_BW", gradient_BW, torch.float32, (samples, width))
    to_dense, to_sparse = torch.empty_like(dense_BD), torch.empty_like(sparse_FBD)
    call, places = usable(library()).dot_backward, (*vectors, gradient, to_dense.data_ptr(), to_sparse.data_ptr())

    def work(first: int, last: int) -> None:
        call(*places, first, last, samples, features, dim, width, int(diagonal))

    share(work, _cuts(samples))
    return to_dense, to_sparse


def _addresses(dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The addresses of both, and the number of features, samples and the width."""
    sparse = address("sparse_FBD", sparse_FBD, torch.float32, (ANY, ANY, ANY))
    features, samples, dim = sparse_FBD.shape
    return (address("dense_BD", dense_BD, torch.float32, (samples, dim)), sparse), (features, samples, dim)


def _pairs(features: int, diagonal: bool) -> int:
    return features * (features + 1) // 2 + (features + 1 if diagonal else 0)
