"""The dot interaction by a small C file: torch's batched product on a CPU calls several operators a sample.

Shapes: B samples, F sparse vectors, D width, W output width.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ..compile import even_cuts, load, share

SOURCE = Path(__file__).with_name("native.c")
SMALL = 512
"""Samples below which a second thread costs more than it brings."""

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    loaded = load(SOURCE)
    if isinstance(loaded, str):
        return loaded
    loaded.dot_forward.argtypes = [_PTR] * 3 + [_I64] * 7
    loaded.dot_backward.argtypes = [_PTR] * 5 + [_I64] * 7
    return loaded


def _loaded() -> ctypes.CDLL:
    found = library()
    assert not isinstance(found, str), found
    return found


def _cuts(samples: int) -> list[int]:
    return even_cuts(samples, torch.get_num_threads() if samples >= SMALL else 1)


def forward(
    dense_BD: Tensor, sparse_FBD: Tensor, *, diagonal: bool, width: int | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    features, samples, dim = sparse_FBD.shape
    pairs = features * (features + 1) // 2 + (features + 1 if diagonal else 0)
    width = width or dim + pairs
    dense_BD, sparse_FBD = dense_BD.float().contiguous(), sparse_FBD.contiguous()
    out_BW = torch.empty(samples, width)
    call = _loaded().dot_forward
    places = (dense_BD.data_ptr(), sparse_FBD.data_ptr(), out_BW.data_ptr())

    def work(first: int, last: int) -> None:
        call(*places, first, last, samples, features, dim, width, int(diagonal))

    share(work, _cuts(samples))
    return out_BW, (dense_BD, sparse_FBD)


def backward(saved: tuple[Tensor, Tensor], gradient_BW: Tensor, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    dense_BD, sparse_FBD = saved
    features, samples, dim = sparse_FBD.shape
    gradient_BW = gradient_BW.float().contiguous()
    to_dense, to_sparse = torch.empty_like(dense_BD), torch.empty_like(sparse_FBD)
    call, width = _loaded().dot_backward, gradient_BW.shape[1]
    places = tuple(tensor.data_ptr() for tensor in (dense_BD, sparse_FBD, gradient_BW, to_dense, to_sparse))

    def work(first: int, last: int) -> None:
        call(*places, first, last, samples, features, dim, width, int(diagonal))

    share(work, _cuts(samples))
    return to_dense, to_sparse
