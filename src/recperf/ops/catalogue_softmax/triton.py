"""The softmax over a catalogue on a GPU, by one kernel: a program owns rows of one side and goes over those of the
other. With positions as rows it adds up exponentials and the items that they weigh, with items as rows the items'
gradients. No score is stored and nothing is added by atomics, so that repeats have the same bits.

The reference serves float64, float16 and vectors wider than 256, and lists of the highest scores. Sizes of tiles follow
a rule; `benchmarks/catalogue_softmax.py --sweep` tries others.

Shapes: T positions, I items, R own rows, C rows of the other side, D width, P parts of the other side, M items of all
masks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..gpu import interpreted, precision, roomy, tf32
from ..operators import operator
from . import reference
from .kernel import sweep
from .reference import Scoring
from .reference import top as top

WIDEST = 256
PARTS_BYTES = 512 << 20
"""Memory for the sums of parts of the other side, at most."""
WASTE = 0.05
"""The share of a GPU's time at which the last programs may run alone."""
BASE_2 = 1 / math.log(2)


class Tiles(NamedTuple):
    """What decides a kernel's speed, and nothing else but the order of its sums."""

    own: int
    """Own rows of a program."""
    other: int
    """Rows of the other side that it works on at a time."""
    warps: int
    stages: int
    """How many blocks of the other side are loaded ahead."""
    programs: int = 1
    """Programs of a multiprocessor: while one computes exponentials, another multiplies."""
    parts: int = 0
    """Parts of the other side, each for programs of its own; 0: as many as keep all multiprocessors busy."""
    persistent: bool = False
    """As many programs as run at a time, which take one unit of work after the other."""
    engine: bool = False
    """Hopper's copy engine loads the other side."""
    emulated: int = 0
    """Of every 4 exponentials those that are computed without the special-function unit."""
    registers: int | None = None
    """Registers of a thread, at most."""


def tiles_of(width: int, itemsize: int, roomy: bool, *, items_own: bool) -> Tiles:
    """The fastest on an H200 at widths of 96 and 256, where several programs share a multiprocessor up to 96."""
    if itemsize > 2 or not roomy:
        return Tiles(64, 32, 4, 2) if width <= 128 else Tiles(32, 32, 4, 1)
    if width <= 96 and items_own:
        return Tiles(64, 128, 4, 3, programs=2, engine=True, registers=255)
    if width <= 96:
        return Tiles(64, 64, 4, 3, programs=4, engine=True, registers=128)
    return Tiles(128, 128, 8, 2, engine=True) if width <= 128 else Tiles(128, 64, 8, 3, engine=True)


@operator(
    "catalogue_softmax_forward",
    flops=lambda users_TD, items_ID, scoring, *, mean=True: (2 + 2 * mean) * users_TD.numel() * len(items_ID),
    special=lambda users_TD, items_ID, *_, **__: len(users_TD) * len(items_ID),
)
def forward(users_TD: Tensor, items_ID: Tensor, scoring: Scoring, *, mean: bool = True) -> tuple[Tensor, Tensor | None]:
    if not _served(users_TD):
        return reference.forward(users_TD, items_ID, scoring, mean=mean)
    plus_I = None if scoring.bias_I is None else scoring.bias_I.float() * BASE_2
    swept = _swept(users_TD, items_ID, scoring, plus_other=plus_I, shifted=not scoring.bounded, sums=mean)
    totals_PT, highs_PT, sums_PTD = swept.totals_PR.double(), swept.highs_PR, swept.sums_PRD
    if highs_PT is not None:
        fades_PT = torch.exp2(highs_PT - highs_PT.amax(0))
        totals_PT *= fades_PT
        sums_PTD = sums_PTD.mul_(fades_PT[:, :, None]) if mean else sums_PTD
    total_T = totals_PT.sum(0).clamp_(min=torch.finfo(torch.float32).tiny)
    logs_T = total_T.log2() if highs_PT is None else total_T.log2() + highs_PT.amax(0)
    return logs_T * math.log(2), sums_PTD.sum(0).div_(total_T.float()[:, None]) if mean else None


@operator(
    "catalogue_softmax_items",
    flops=lambda users_TD, items_ID, *_, **__: 2 * users_TD.numel() * len(items_ID),
    special=lambda users_TD, items_ID, *_, **__: len(users_TD) * len(items_ID),
)
def items_backward(
    users_TD: Tensor, items_ID: Tensor, scoring: Scoring, logs_T: Tensor, weights_T: Tensor, factor: Tensor,
    *, sums: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if not _served(users_TD):
        return reference.items_backward(users_TD, items_ID, scoring, logs_T, weights_T, factor, sums=sums)
    plus_I = None if scoring.bias_I is None else scoring.bias_I.float() * BASE_2
    # The weight of a position is in the exponent too.
    plus_T = (weights_T.double().log2() - logs_T * BASE_2).float()
    swept = _swept(
        items_ID, users_TD, scoring, items_own=True, plus_own=plus_I, plus_other=plus_T, times=factor.float(),
        totals=sums,
    )  # fmt: skip
    added_PID = swept.sums_PRD
    return added_PID[0] if len(added_PID) == 1 else added_PID.sum(0), swept.totals_PR.sum(0) if sums else None


@dataclass(frozen=True, eq=False)
class _Swept:
    """What the kernel leaves of each part of the other side."""

    sums_PRD: Tensor
    totals_PR: Tensor
    highs_PR: Tensor | None


def _swept(
    own_RD: Tensor, other_CD: Tensor, scoring: Scoring, *, items_own: bool = False,
    plus_own: Tensor | None = None, plus_other: Tensor | None = None, times: Tensor | None = None,
    shifted: bool = False, sums: bool = True, totals: bool = True,
) -> _Swept:  # fmt: skip
    own_RD, other_CD, (count, width) = own_RD.contiguous(), other_CD.contiguous(), own_RD.shape
    main, rest = _widths(width)
    tiles = tiles_of(main + rest, own_RD.element_size(), roomy(own_RD.device), items_own=items_own)
    blocks, others = triton.cdiv(count, tiles.own), triton.cdiv(len(other_CD), tiles.other)
    places = _places(own_RD.device, tiles.programs)
    parts = tiles.parts or _parts(blocks, others, places, max(1, PARTS_BYTES // max(1, 4 * own_RD.numel())))
    span = triton.cdiv(max(1, others), parts) * tiles.other
    parts = max(1, triton.cdiv(len(other_CD), span))
    sums_PRD = own_RD.new_empty((parts, count, width) if sums else (1,), dtype=torch.float32)
    totals_PR = own_RD.new_empty((parts, count), dtype=torch.float32)
    highs_PR = torch.empty_like(totals_PR) if shifted else None
    if count and len(other_CD):
        # The copy engine wants rows that begin at multiples of 16 bytes.
        engine = tiles.engine and width * other_CD.element_size() % 16 == 0 and other_CD.data_ptr() % 16 == 0
        sides = (TensorDescriptor.from_tensor(other_CD, [tiles.other, wide]) for wide in (main, rest or main))
        other = tuple(sides) if engine else (other_CD, other_CD)
        units = blocks * parts
        options: dict[str, Any] = {"num_warps": tiles.warps}
        options |= {} if tiles.registers is None else {"maxnreg": tiles.registers}
        sweep[(min(units, places) if tiles.persistent else units,)](
            own_RD, width, count, *other, width, len(other_CD), plus_own, plus_other, times, scoring.scale,
            *_words(scoring, len(own_RD if items_own else other_CD), len(other_CD if items_own else own_RD)),
            scoring.first, scoring.scale * BASE_2, span, blocks, units, sums_PRD, totals_PR, highs_PR,
            D=width, W0=main, W1=rest, ROWS=tiles.own, COLUMNS=tiles.other, STAGES=tiles.stages, ITEMS_OWN=items_own,
            SHIFTED=shifted, SUMS=sums, TOTALS=totals, ENGINE=engine, EMULATED=tiles.emulated,
            PERSISTENT=tiles.persistent, PRECISION=precision(own_RD, rounded=tf32(own_RD)), **options,
        )  # fmt: skip
    else:
        sums_PRD.zero_()
        totals_PR.zero_()
        if highs_PR is not None:
            highs_PR.fill_(reference.LOWEST)
    return _Swept(sums_PRD, totals_PR, highs_PR)


def _words(scoring: Scoring, items: int, positions: int) -> tuple[Tensor | None, int, Tensor | None, Tensor | None]:
    """A bit for each mask and item, 32 in a word, the words of a mask, and the mask and the target of each position."""
    masks = scoring.masks
    if masks is None:
        return None, 0, None, None
    codes_M, count = masks.codes_M, triton.cdiv(items, 32)
    places_M, numbers_M = codes_M >> 32, (codes_M & 0xFFFFFFFF) - scoring.first
    set_M = (numbers_M >= 0) & (numbers_M < items)
    set_M[1:] &= codes_M[1:] != codes_M[:-1]
    words = torch.zeros((len(masks.offsets_S1) - 1) * count, dtype=torch.int32, device=codes_M.device)
    places_M = (places_M * count + numbers_M // 32).where(set_M, 0)
    # Each bit is added once, so that the order of additions changes nothing.
    words.index_add_(0, places_M, torch.where(set_M, 1 << numbers_M % 32, 0).to(torch.int32))
    sets_T = torch.arange(positions, device=words.device) if masks.masks_T is None else masks.masks_T
    targets_T = torch.full_like(sets_T, -1) if scoring.targets_T is None else scoring.targets_T
    return words, count, sets_T.contiguous(), targets_T.contiguous()


def _served(users_TD: Tensor) -> bool:
    return users_TD.shape[1] <= WIDEST and users_TD.dtype in (torch.bfloat16, torch.float32)


def _widths(width: int) -> tuple[int, int]:
    """One power of two that has room for so many numbers, or two that are less together; 16 at least."""
    whole = max(16, int(triton.next_power_of_2(width)))
    rest = max(16, int(triton.next_power_of_2(width - whole // 2)))
    return (whole, 0) if width <= whole // 2 or whole // 2 + rest >= whole else (whole // 2, rest)


@functools.cache
def _places(device: torch.device, programs: int) -> int:
    """Programs that run at a time."""
    if interpreted():
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * programs


@functools.lru_cache(maxsize=64)
def _parts(blocks: int, others: int, places: int, most: int) -> int:
    """The fewest parts of the other side with which hardly any place has nothing to do at the end."""

    def waste(parts: int) -> float:
        units = max(1, blocks * parts)
        return 1 - units / (-(-units // places) * places)

    options = range(1, max(1, min(others, most, 4 * places)) + 1)
    return next((parts for parts in options if waste(parts) <= WASTE), min(options, key=waste))
