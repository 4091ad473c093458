"""The softmax over a catalogue in plain torch, some positions at a time: defines what every implementation computes.

Shapes: T positions, C of them at a time, I items, N of them at a time, D width, S masks, M items of all masks, K items
of a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ArgumentError

SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores held at a time: on a CPU few enough for its caches."""
BLOCK = 1 << 16
"""Items that are scored at a time for lists of the highest scores."""
LOWEST = -1e30
"""Stands for the highest score of a position where all items are masked."""


@dataclass(frozen=True, eq=False)
class Masks:
    """Items that do not compete. A mask is a list of items, and positions may share one."""

    offsets_S1: Tensor
    """Where each mask begins in `items_M`, and after the last."""
    items_M: Tensor
    masks_T: Tensor | None = None
    """The number of the mask of each position; None: position t has mask t."""

    @cached_property
    def codes_M(self) -> Tensor:
        """Mask and item in one number, ascending."""
        owners_M = torch.repeat_interleave(self.offsets_S1.diff(), output_size=len(self.items_M))
        return (owners_M.long() << 32 | self.items_M.long()).sort()[0]

    @property
    def sorted_M(self) -> Tensor:
        """The items, ascending in each mask."""
        return self.codes_M & 0xFFFFFFFF

    def ranges(self, positions: int) -> tuple[Tensor, Tensor]:
        """Where the mask of each position begins and ends."""
        owners_T = slice(0, positions) if self.masks_T is None else self.masks_T
        begins_T, ends_T = self.offsets_S1[:-1][owners_T].long(), self.offsets_S1[1:][owners_T].long()
        if len(begins_T) != positions:
            raise ArgumentError(
                f"there are masks of {len(begins_T)} positions; there must be one for each of {positions}"
            )
        return begins_T, ends_T

    def have(self, items_T: Tensor) -> Tensor:
        """Whether the mask of each position has an item."""
        masks_T = torch.arange(len(items_T), device=items_T.device) if self.masks_T is None else self.masks_T
        return torch.isin(masks_T.long() << 32 | items_T, self.codes_M)

    def sums(self, rows_IF: Tensor) -> Tensor:
        """For each mask the sum of the rows of its items; differentiable."""
        distinct_M = torch.ones_like(self.codes_M, dtype=rows_IF.dtype)
        distinct_M[1:] = self.codes_M[1:] != self.codes_M[:-1]
        inputs = (one.to(rows_IF.device) for one in (self.sorted_M, rows_IF, self.offsets_S1[:-1].long(), distinct_M))
        items_M, rows_IF, begins_S, distinct_M = inputs
        return F.embedding_bag(items_M, rows_IF, begins_S, mode="sum", per_sample_weights=distinct_M)


@dataclass(frozen=True, eq=False)
class Scoring:
    """The score of an item is `scale` times its product with the user's vector, plus its bias."""

    scale: float
    bias_I: Tensor | None = None
    masks: Masks | None = None
    targets_T: Tensor | None = None
    """Item numbers that are never masked, one for each position."""
    first: int = 0
    """The number of the first of the items."""
    bounded: bool = False
    """Whether no score is above 60 or below -60, so that sums of exponentials need no shift."""


def forward(users_TD: Tensor, items_ID: Tensor, scoring: Scoring, *, mean: bool = True) -> tuple[Tensor, Tensor | None]:
    """The logarithm of each position's sum of exponentials, and with `mean` its items, weighted by their probabilities.

    Both are float32 or wider. Of a position whose items are all masked the mean is 0 and the logarithm very low."""
    users_TD, items_ID = _wide(users_TD), _wide(items_ID)
    logs_T = users_TD.new_empty(len(users_TD))
    mean_TD = torch.empty_like(users_TD) if mean else None
    for part in _parts(len(users_TD), len(items_ID), users_TD.device):
        scores_CI = _scores(users_TD, items_ID, scoring, part)
        high_C1 = scores_CI.amax(1, keepdim=True).clamp_(min=LOWEST)
        powers_CI = scores_CI.sub_(high_C1).exp_()
        total_C1 = powers_CI.sum(1, keepdim=True)
        logs_T[part] = (total_C1.log() + high_C1).clamp_(min=LOWEST).squeeze(1)
        if mean_TD is not None:
            mean_TD[part] = powers_CI @ items_ID / total_C1.clamp(min=torch.finfo(total_C1.dtype).tiny)
    return logs_T, mean_TD


def items_backward(
    users_TD: Tensor, items_ID: Tensor, scoring: Scoring, logs_T: Tensor, weights_T: Tensor, factor: Tensor,
    *, sums: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradients of the items and, with `sums`, of their bias, of the sum of the logarithms times `weights_T` times
    the factor. Both are float32 or wider."""
    users_TD, items_ID = _wide(users_TD), _wide(items_ID)
    added_ID, sums_I = torch.zeros_like(items_ID), items_ID.new_zeros(len(items_ID)) if sums else None
    sharp_TD = users_TD * scoring.scale
    for part in _parts(len(users_TD), len(items_ID), users_TD.device):
        shares_CI = _scores(users_TD, items_ID, scoring, part).sub_(logs_T[part, None]).exp_()
        shares_CI.mul_((weights_T[part] * factor)[:, None])
        added_ID.addmm_(shares_CI.t(), sharp_TD[part])
        if sums_I is not None:
            sums_I += shares_CI.sum(0)
    return added_ID, sums_I


def top(
    users_TD: Tensor, items_ID: Tensor, scoring: Scoring, k: int, targets_T: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The k highest scores of each position, in float32, and the numbers of their items: of equal scores the lowest
    number comes first, and NaN never comes. Where fewer items are left, the score is -infinity and the number -1.

    With targets also how many items have a score that is not below that of the target, the target among them. The items
    may lie on another device: some are brought over at a time."""
    none_TK = torch.full((len(users_TD), k), -torch.inf, device=users_TD.device)
    keys_TK = _keys(none_TK, 0)
    own_T = users_TD.new_full((len(users_TD),), torch.nan, dtype=torch.float32)
    reached_T = None
    if targets_T is not None:
        reached_T = torch.zeros_like(own_T, dtype=torch.int64)
        for part, first, scores_CN in _tiles(users_TD, items_ID, scoring):
            places_C = targets_T[part] - first
            inside_C = (places_C >= 0) & (places_C < scores_CN.shape[1])
            found_C = scores_CN.gather(1, places_C.where(inside_C, 0)[:, None]).squeeze(1)
            own_T[part] = found_C.where(inside_C, own_T[part])
    for part, first, scores_CN in _tiles(users_TD, items_ID, scoring):
        if reached_T is not None:
            reached_T[part] += (~(scores_CN < own_T[part, None])).sum(1)
        numbers_N = torch.arange(first, first + scores_CN.shape[1], device=scores_CN.device)
        keys_CN = _keys(scores_CN.nan_to_num_(-torch.inf, torch.inf, -torch.inf), numbers_N)
        highest_CK = keys_CN.topk(min(k, keys_CN.shape[1]))[0]
        keys_TK[part] = torch.cat([keys_TK[part], highest_CK], 1).topk(k)[0]
    # The number was subtracted from the bits of the score, which a division that rounds up brings back.
    bits_TK = -(-keys_TK >> 32)
    numbers_TK = (bits_TK << 32) - keys_TK
    scores_TK = torch.where(bits_TK < 0, bits_TK ^ 0x7FFFFFFF, bits_TK).int().view(torch.float32)
    return scores_TK, numbers_TK.where(scores_TK > -torch.inf, -1), reached_T


def _keys(scores: Tensor, numbers: Tensor | int) -> Tensor:
    """Integers in the order of the scores, and of equal scores against the order of the numbers."""
    bits = (scores.float() + 0.0).view(torch.int32).long()
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32) - numbers


def _tiles(users_TD: Tensor, items_ID: Tensor, scoring: Scoring) -> Iterator[tuple[slice, int, Tensor]]:
    """Scores of some positions and some items at a time, in float32: the positions and the number of the first item."""
    users_TD = users_TD.float()
    for first in range(0, len(items_ID), BLOCK):
        block_ND = items_ID[first : first + BLOCK].to(users_TD.device).float()
        for part in _parts(len(users_TD), len(block_ND), users_TD.device):
            yield part, scoring.first + first, _scores(users_TD, block_ND, scoring, part, first)


def _parts(positions: int, items: int, device: torch.device) -> Iterator[slice]:
    together = max(1, SCORES.get(device.type, SCORES["cuda"]) // max(1, items))
    return (slice(first, min(first + together, positions)) for first in range(0, positions, together))


def _scores(users_TD: Tensor, items_ND: Tensor, scoring: Scoring, part: slice, skipped: int = 0) -> Tensor:
    """Scores of some positions and items, the first of them after so many `skipped` ones; -infinity where masked."""
    scores_CN = (users_TD[part] * scoring.scale) @ items_ND.t()
    count, first = scores_CN.shape[1], scoring.first + skipped
    if scoring.bias_I is not None:
        scores_CN += scoring.bias_I[skipped : skipped + count].to(scores_CN)
    if scoring.masks is None:
        return scores_CN
    begins_T, ends_T = scoring.masks.ranges(len(users_TD))
    begins_C, lengths_C = begins_T[part], (ends_T - begins_T)[part]
    rows_P = torch.repeat_interleave(lengths_C)
    within_P = torch.arange(len(rows_P), device=rows_P.device) - (lengths_C.cumsum(0) - lengths_C)[rows_P]
    items_P = scoring.masks.items_M[begins_C[rows_P] + within_P].long()
    masked_P = (items_P >= first) & (items_P < first + count)
    if scoring.targets_T is not None:
        masked_P &= items_P != scoring.targets_T[part][rows_P]
    places_P = (rows_P * count + items_P - first)[masked_P]
    return scores_CN.view(-1).index_fill_(0, places_P, -torch.inf).view(scores_CN.shape)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
