"""The softmax over a catalogue in C: products, exponentials and sums of one block follow each other in the caches.

C computes in float32, half precision widened to it.

Shapes: T positions, I items, D width, P = D filled up with zeros to whole tiles, G groups of positions, K items of a
list.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ArgumentError
from ..arguments import address, widened
from ..compile import F32, I64, POINTER, even_cuts, native_library, share, usable
from ..operators import operator
from .reference import Masks, Scoring

POSITIONS, BLOCK, TILE = 96, 96, 16
"""The sizes of the same names in native.c."""
SMALL = 1 << 20
"""With fewer multiplications a second thread costs more than it saves."""
BASE_2 = 1 / math.log(2)


class _Call(ctypes.Structure):
    """The struct `Call` of native.c."""

    _fields_ = (
        *((name, POINTER) for name in ("items", "columns", "rows", "bias")),
        *((name, I64) for name in ("count", "dim", "positions")),
        ("scale", F32),
        *((name, POINTER) for name in ("masked", "begins", "ends", "targets")),
        ("first", I64),
    )


_FUNCTIONS = {
    "softmax_forward": [POINTER, I64, I64, POINTER, POINTER],
    "softmax_items": [POINTER, I64, I64, POINTER, POINTER, F32, POINTER, POINTER],
    "softmax_top": [POINTER, I64, I64, I64, *[POINTER] * 4],
    "softmax_own": [POINTER] * 3,
}
library = native_library(__file__, _FUNCTIONS, dict.fromkeys(set(_FUNCTIONS) - {"softmax_own"}, ctypes.c_int))
"""Returns the compiled library, or the reason why it cannot be used."""


@operator(
    "catalogue_softmax_forward",
    flops=lambda users_TD, items_ID, scoring, *, mean=True: (2 + 2 * mean) * users_TD.numel() * len(items_ID),
    special=lambda users_TD, items_ID, *_, **__: len(users_TD) * len(items_ID),
)
def forward(users_TD: Tensor, items_ID: Tensor, scoring: Scoring, *, mean: bool = True) -> tuple[Tensor, Tensor | None]:
    packed = _Packed(users_TD, items_ID, scoring, BASE_2)
    # Of large scores float32 would round away much of the probabilities.
    logs_T = torch.empty(packed.groups * POSITIONS, dtype=torch.float64)
    mean_TP = torch.empty_like(packed.rows_TP) if mean else None
    places = logs_T.data_ptr(), None if mean_TP is None else mean_TP.data_ptr()
    call = usable(library()).softmax_forward
    packed.share(packed.groups, lambda first, last: call(packed.place, first, last, *places))
    logs_T = logs_T[: packed.positions].mul_(math.log(2))
    return logs_T, None if mean_TP is None else mean_TP[: packed.positions, : packed.dim]


@operator(
    "catalogue_softmax_items",
    flops=lambda users_TD, items_ID, *_, **__: 2 * users_TD.numel() * len(items_ID),
    special=lambda users_TD, items_ID, *_, **__: len(users_TD) * len(items_ID),
)
def items_backward(
    users_TD: Tensor, items_ID: Tensor, scoring: Scoring, logs_T: Tensor, weights_T: Tensor, factor: Tensor,
    *, sums: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    packed = _Packed(users_TD, items_ID, scoring, BASE_2)
    missing = (0, packed.groups * POSITIONS - packed.positions)
    padded = [F.pad(one_T.float(), missing) for one_T in (logs_T * BASE_2, weights_T * factor)]
    shape, names = (len(packed.rows_TP),), ("logs_T", "weights_T")
    added_ID, sums_I = torch.empty(packed.items, packed.dim), torch.empty(packed.items) if sums else None
    places = (
        *(address(name, one_T, torch.float32, shape) for name, one_T in zip(names, padded)),
        *(scoring.scale, added_ID.data_ptr(), None if sums_I is None else sums_I.data_ptr()),
    )
    call = usable(library()).softmax_items
    packed.share(-(-packed.items // BLOCK), lambda first, last: call(packed.place, first, last, *places))
    return added_ID, sums_I


@operator("catalogue_softmax_top", flops=lambda users_TD, items_ID, *_, **__: 2 * users_TD.numel() * len(items_ID))
def top(
    users_TD: Tensor, items_ID: Tensor, scoring: Scoring, k: int, targets_T: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    packed = _Packed(users_TD, items_ID, scoring, 1.0)
    highest_TK = torch.full((packed.positions, k), -torch.inf)
    numbers_TK = torch.full((packed.positions, k), -1)
    own_T = torch.full((packed.positions,), torch.nan)
    reached_T = torch.zeros(packed.positions, dtype=torch.int64)
    functions = usable(library())
    places = [highest_TK.data_ptr(), numbers_TK.data_ptr(), None, None]
    if targets_T is not None:
        targets = address("targets_T", targets_T.contiguous(), torch.int64, (packed.positions,))
        functions.softmax_own(packed.place, targets, own_T.data_ptr())
        if scoring.masks is not None:
            own_T[scoring.masks.have(targets_T)] = -torch.inf
        places[2:] = own_T.data_ptr(), reached_T.data_ptr()
    packed.share(packed.groups, lambda first, last: functions.softmax_top(packed.place, first, last, k, *places))
    return highest_TK, numbers_TK, None if targets_T is None else reached_T


class _Packed:
    """What native.c reads of a call. `base`: what scores are multiplied by."""

    def __init__(self, users_TD: Tensor, items_ID: Tensor, scoring: Scoring, base: float) -> None:
        (self.positions, self.dim), self.items = users_TD.shape, len(items_ID)
        self.groups, wide = -(-self.positions // POSITIONS), -(-self.dim // TILE) * TILE
        missing = self.groups * POSITIONS - self.positions
        self.rows_TP = F.pad(widened(users_TD), (0, wide - self.dim, 0, missing))
        columns_GPT = self.rows_TP.view(self.groups, POSITIONS, wide).transpose(1, 2).contiguous()
        # The tensors stay while their addresses are used.
        self.tensors = {"items": widened(items_ID).contiguous(), "rows": self.rows_TP, "columns": columns_GPT}
        if scoring.bias_I is not None:
            self.tensors["bias"] = (scoring.bias_I.float() * base).contiguous()
        if scoring.targets_T is not None:
            self.tensors["targets"] = scoring.targets_T.long().contiguous()
        if scoring.masks is not None:
            none = {"targets": torch.full((self.positions,), -1)}
            self.tensors = {**none, **self.tensors, **_masks(scoring.masks, self.positions)}
        shapes = {"items": (self.items, self.dim), "bias": (self.items,), "targets": (self.positions,)}
        places = {
            name: address(name, tensor, _TYPES.get(name, torch.int64), shapes.get(name, tuple(tensor.shape)))
            for name, tensor in self.tensors.items()
        }
        sizes = {"count": self.items, "dim": self.dim, "positions": self.positions}
        self.call = _Call(**places, **sizes, scale=scoring.scale * base, first=scoring.first)
        self.place = ctypes.byref(self.call)

    def share(self, parts: int, work: Callable[[int, int], int]) -> None:
        """Share groups of positions or blocks of items between threads."""
        small = self.positions * self.items * self.dim < SMALL
        failures: list[int] = []
        threads = max(1, min(torch.get_num_threads(), parts))
        share(lambda first, last: failures.append(work(first, last)), even_cuts(parts, 1 if small else threads))
        if any(failures):
            raise MemoryError("not enough memory for a block of scores")


_TYPES = dict.fromkeys(("items", "rows", "columns", "bias"), torch.float32)


def _masks(masks: Masks, positions: int) -> dict[str, Tensor]:
    """The masked items in order, and where those of each position begin and end among them."""
    begins_T, ends_T = masks.ranges(positions)
    if positions and not 0 <= int(begins_T.min()) <= int(ends_T.max()) <= len(masks.items_M):
        lowest, highest = int(begins_T.min()), int(ends_T.max())
        raise ArgumentError(f"the masks are the items {lowest} to {highest} of {len(masks.items_M)}")
    return {"masked": masks.sorted_M, "begins": begins_T.contiguous(), "ends": ends_T.contiguous()}
