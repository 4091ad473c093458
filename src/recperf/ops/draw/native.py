"""Drawing a batch of uniform or Zipf ids with a small C file, compiled once with the machine's own compiler.

Shapes: F features, B samples, D dense features, V slots for ids.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ..compile import even_cuts, load, share
from .plan import DENSE_SCALE, FAST_KINDS, Buffers, Plan

SOURCE = Path(__file__).with_name("native.c")
SMALL = 1 << 16
"""Batches of fewer random numbers are drawn by one thread: starting a second costs more than it saves."""

_I64, _I32, _PTR = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
_ARRAYS = {
    "rows": "rows_F", "max_ids": "max_ids_F", "first": "first_F", "factor": "factor_F", "shift": "shift_F",
    "slope": "slope_F", "start": "start_F", "weights": "weights_D", "score_keys": "score_keys_F2",
}  # fmt: skip


class _Plan(ctypes.Structure):
    """The struct `plan` of native.c."""

    _fields_ = (
        *((name, _PTR) for name in _ARRAYS),
        *((name, _I64) for name in ("samples", "features", "dense", "first_dense", "first_length", "first_label")),
        ("power", ctypes.c_double),
        ("dense_scale", ctypes.c_float),
        *((name, _I32) for name in ("kind", "fixed", "distinct")),
        ("key", ctypes.c_uint32 * 2),
    )


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or the reason why it cannot be used."""
    loaded = load(SOURCE)
    if not isinstance(loaded, str):
        loaded.draw_lengths.argtypes = [_PTR] * 2 + [_I64] * 2
        loaded.add_up.argtypes = [_PTR, _I64]
        loaded.draw_ids.argtypes = [_PTR] * 4 + [_I64] * 2
        loaded.draw_samples.argtypes = [_PTR] * 4 + [_I64] * 2
    return loaded


def draw(plan: Plan, index_1: Tensor, out: Buffers) -> None:
    """Fill the buffers with the batch whose number the tensor holds."""
    loaded = library()
    assert not isinstance(loaded, str), loaded
    bags = plan.features * plan.samples
    struct, offsets, scores_FB = _struct(plan, int(index_1)), out.offsets_FB1.data_ptr(), torch.empty(bags)
    address = ctypes.addressof(struct)
    threads = torch.get_num_threads() if plan.words >= SMALL else 1
    by_bag = even_cuts(bags, threads)

    def lengths(first: int, last: int) -> None:
        loaded.draw_lengths(address, offsets, first, last)

    def ids(first: int, last: int) -> None:
        loaded.draw_ids(address, offsets, out.values_V.data_ptr(), scores_FB.data_ptr(), first, last)

    def samples(first: int, last: int) -> None:
        targets = out.dense_BD.data_ptr(), out.labels_B.data_ptr()
        loaded.draw_samples(address, scores_FB.data_ptr(), *targets, first, last)

    share(lengths, by_bag)
    loaded.add_up(offsets, bags)
    share(ids, by_bag)
    share(samples, even_cuts(plan.samples, threads))


def _struct(plan: Plan, index: int) -> _Plan:
    # The plan owns the tensors that these addresses point to.
    return _Plan(
        **{name: getattr(plan, tensor).data_ptr() for name, tensor in _ARRAYS.items()},
        samples=plan.samples,
        features=plan.features,
        dense=plan.dense,
        first_dense=plan.first_dense,
        first_length=plan.first_length,
        first_label=plan.first_label,
        kind=FAST_KINDS.index(plan.kind),
        fixed=plan.fixed,
        distinct=plan.distinct,
        power=plan.power,
        dense_scale=DENSE_SCALE,
        key=plan.keys(index),
    )
