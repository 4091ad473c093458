"""Drawing a batch of uniform or Zipf ids with a small C file, compiled once with the machine's own compiler.

Shapes: F features, B samples, D dense features, V slots for ids.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..arguments import address
from ..compile import I64, POINTER, even_cuts, native_library, share, usable
from ..operators import operator
from . import DENSE_SCALE, FAST_KINDS, Buffers, DrawPlan

SMALL = 1 << 16
"""Batches of fewer random numbers are drawn by one thread: starting a second costs more than it saves."""

_ARRAYS = {
    "rows": "rows_F", "max_ids": "max_ids_F", "first": "first_F", "factor": "factor_F", "shift": "shift_F",
    "slope": "slope_F", "start": "start_F", "weights": "weights_D", "score_keys": "score_keys_F2",
}  # fmt: skip


_COUNTS = (
    "samples", "features", "dense", "first_dense", "first_length", "first_label", "whole_samples", "begin", "step"
)  # fmt: skip


class _Plan(ctypes.Structure):
    """The struct `plan` of native.c."""

    _fields_ = (
        *((name, POINTER) for name in _ARRAYS),
        *((name, I64) for name in _COUNTS),
        ("power", ctypes.c_double),
        ("dense_scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("kind", "fixed", "distinct")),
        ("key", ctypes.c_uint32 * 2),
    )


_FUNCTIONS = {
    "draw_lengths": [POINTER] * 2 + [I64] * 2,
    "add_up": [POINTER, I64],
    "draw_ids": [POINTER] * 4 + [I64] * 2,
    "draw_samples": [POINTER] * 4 + [I64] * 2,
}
library = native_library(__file__, _FUNCTIONS)
"""Returns the compiled library, or the reason why it cannot be used."""


@operator("draw")
def draw(plan: DrawPlan, index_1: Tensor, out: Buffers) -> None:
    """Fill the buffers with the batch whose number the tensor holds."""
    bags = plan.features * plan.samples
    offsets = address("offsets_FB1", out.offsets_FB1, torch.int64, (bags + 1,))
    values = address("values_V", out.values_V, torch.int64, (plan.capacity,))
    dense = address("dense_BD", out.dense_BD, torch.float32, (plan.samples, plan.dense))
    labels = address("labels_B", out.labels_B, torch.float32, (plan.samples,))
    loaded, struct, scores_FB = usable(library()), _struct(plan, int(index_1)), torch.empty(bags)
    scores, place = scores_FB.data_ptr(), ctypes.addressof(struct)
    threads = torch.get_num_threads() if plan.words >= SMALL else 1
    by_bag = even_cuts(bags, threads)
    share(lambda first, last: loaded.draw_lengths(place, offsets, first, last), by_bag)
    loaded.add_up(offsets, bags)
    share(lambda first, last: loaded.draw_ids(place, offsets, values, scores, first, last), by_bag)
    by_sample = even_cuts(plan.samples, threads)
    share(lambda first, last: loaded.draw_samples(place, scores, dense, labels, first, last), by_sample)


def _struct(plan: DrawPlan, index: int) -> _Plan:
    # The plan owns the tensors that these addresses point to.
    return _Plan(
        **{name: getattr(plan, tensor).data_ptr() for name, tensor in _ARRAYS.items()},
        **{name: getattr(plan, name) for name in _COUNTS},
        kind=FAST_KINDS.index(plan.kind),
        fixed=plan.fixed,
        distinct=plan.distinct,
        power=plan.power,
        dense_scale=DENSE_SCALE,
        key=plan.keys(index),
    )
