"""Drawing a batch in plain torch, on any device: the definition that the other implementations must equal.

Dense features, lengths and uniform ids are the same bits everywhere. Zipf and Gaussian ids go through
float64 functions such as log, whose last digit depends on the device: about one id in a billion may differ. In float32
most ids of a large table would, and it would draw them on a grid. Labels go through a float32 sum: one in many
thousands may differ.

Shapes: F features, B samples, I ids of the longest bag, D dense features, V ids, P = B * sum of I slots for ids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..hashing import hash_torch
from . import DENSE_SCALE, MULTIPLIERS, Buffers, DrawPlan

_SIGNED = tuple(factor - (1 << 32) if factor >> 31 else factor for factor in MULTIPLIERS)


def draw(plan: DrawPlan, index_1: Tensor, out: Buffers) -> None:
    """Fill the buffers with the batch whose number the tensor holds; the host does not wait."""
    word_1 = hash_torch(index_1, plan.batch_seed)
    keys = word_1.to(torch.int32), (word_1 >> 32).to(torch.int32)
    ids = [feature_ids(plan, keys, feature) for feature in range(plan.features)]
    used = [_used(plan, keys, feature, ids_BI) for feature, ids_BI in enumerate(ids)]
    counts_FB = torch.stack([used_BI.sum(1) for used_BI in used])
    out.offsets_FB1[:1].zero_()
    torch.cumsum(counts_FB.view(-1), 0, out=out.offsets_FB1[1:])
    _pack(plan, ids, used, out)
    words_BD = words(keys, plan.first_dense, plan.numbers_B, plan.dense)
    torch.mul(words_BD >> 8, DENSE_SCALE, out=out.dense_BD)
    scores_FB = torch.stack(
        [
            (score_words(ids_BI, plan.score_keys_F2[f]).to(torch.int64) * used_BI).sum(1)
            for f, (ids_BI, used_BI) in enumerate(zip(ids, used))
        ]
    )
    logits_B = _logits(plan, out.dense_BD, scores_FB, counts_FB)
    chances_B = unsigned(words(keys, plan.first_label, plan.numbers_B, 1).view(-1)) >> 8
    out.labels_B.copy_(chances_B.float() * 2.0**-24 < logits_B.sigmoid())


def planted_logits(plan: DrawPlan, dense_BD: Tensor, values_V: Tensor, offsets_FB1: Tensor) -> Tensor:
    """The log odds that labels are drawn from: what a perfect model would predict."""
    counts_FB = offsets_FB1.diff().view(plan.features, -1)
    bag_V = torch.arange(counts_FB.numel(), device=values_V.device).repeat_interleave(counts_FB.view(-1))
    keys_V2 = plan.score_keys_F2[bag_V // counts_FB.shape[1]]
    scores_V = score_words(values_V, keys_V2.t()).to(torch.int64)
    scores_FB = torch.zeros_like(counts_FB).view(-1).index_add_(0, bag_V, scores_V)
    return _logits(plan, dense_BD, scores_FB.view_as(counts_FB), counts_FB)


def mix(words: Tensor) -> Tensor:
    """The bijection of 32-bit words, held as int32; the masks clear the copies of the sign bit that torch shifts in."""
    words = (words ^ ((words >> 16) & 0xFFFF)) * _SIGNED[0]
    words = (words ^ ((words >> 15) & 0x1FFFF)) * _SIGNED[1]
    return words ^ ((words >> 16) & 0xFFFF)


def words(keys: tuple[Tensor, Tensor], first: int, numbers_B: Tensor, each: int) -> Tensor:
    """The random words of samples of a batch, `each` of every sample; `first` is the counter of sample 0's first."""
    counters = first + numbers_B.unsqueeze(1) * each + torch.arange(each, device=numbers_B.device)
    return mix(mix(counters.to(torch.int32) ^ keys[0]) + keys[1])


def unsigned(words: Tensor) -> Tensor:
    return words.to(torch.int64) & 0xFFFFFFFF


def feature_ids(plan: DrawPlan, keys: tuple[Tensor, Tensor], feature: int) -> Tensor:
    """The ids of a feature as if every bag had its maximum length."""
    longest = plan.max_ids[feature]
    words_BI = words(keys, plan.firsts[feature], plan.numbers_B, longest)
    if plan.kind == "uniform":
        return (unsigned(words_BI) * plan.rows[feature]) >> 32
    return _gaussian(plan, feature, words_BI) if plan.kind == "gaussian" else _zipf(plan, feature, words_BI)


def score_words(ids: Tensor, keys_2: Tensor) -> Tensor:
    """The planted scores of ids as 24-bit signed integers: their sums are exact in any order."""
    return mix(mix(ids.to(torch.int32) ^ keys_2[0]) + keys_2[1]) >> 8


def _lengths(plan: DrawPlan, keys: tuple[Tensor, Tensor], feature: int) -> Tensor:
    """round(max(1, u * maximum)) in integers, so that it is the same everywhere."""
    first = plan.first_length + feature * plan.whole_samples
    words_B = unsigned(words(keys, first, plan.numbers_B, 1).view(-1))
    return ((words_B * plan.max_ids[feature] + (1 << 31)) >> 32).clamp_(min=1)


def _used(plan: DrawPlan, keys: tuple[Tensor, Tensor], feature: int, ids_BI: Tensor) -> Tensor:
    """Which of the slots of a bag hold an id."""
    place_I = torch.arange(ids_BI.shape[1], device=ids_BI.device)
    used_BI = torch.ones_like(ids_BI, dtype=torch.bool)
    if not plan.fixed:
        used_BI = place_I < _lengths(plan, keys, feature).unsqueeze(1)
    if plan.distinct:
        same_BII = ids_BI.unsqueeze(2) == ids_BI.unsqueeze(1)
        used_BI &= ~(same_BII & (place_I < place_I.unsqueeze(1))).any(2)
    return used_BI


def _pack(plan: DrawPlan, ids: list[Tensor], used: list[Tensor], out: Buffers) -> None:
    """Move the used ids together; the others go to one slot past the end, so that no shape depends on the data."""
    targets = []
    for used_BI, offsets_B in zip(used, out.offsets_FB1[:-1].view(plan.features, -1)):
        place_BI = offsets_B.unsqueeze(1) + used_BI.cumsum(1) - 1
        targets.append(torch.where(used_BI, place_BI, plan.capacity).view(-1))
    ids_P = torch.cat([ids_BI.reshape(-1) for ids_BI in ids])
    packed = ids_P.new_zeros(plan.capacity + 1).scatter_(0, torch.cat(targets), ids_P)
    out.values_V.copy_(packed[:-1])


def _logits(plan: DrawPlan, dense_BD: Tensor, scores_FB: Tensor, counts_FB: Tensor) -> Tensor:
    bags_FB = scores_FB.float() * 2.0**-23 / counts_FB.float().sqrt()
    return (dense_BD * plan.weights_D).sum(1) + bags_FB.sum(0)


def _gaussian(plan: DrawPlan, feature: int, words_BI: Tensor) -> Tensor:
    """Box-Muller: one half of the word gives the radius, the other the angle."""
    high_BI, low_BI = (words_BI >> 16) & 0xFFFF, words_BI & 0xFFFF
    radius_BI = (((high_BI.double() + 0.5) * 2.0**-16).log() * -2.0).sqrt()
    normal_BI = radius_BI * (low_BI.double() * (math.pi / 32768)).cos()
    place_BI = (normal_BI * plan.slope_F[feature] + plan.start_F[feature]).floor().to(torch.int64)
    return place_BI.clamp_(0, plan.rows[feature] - 1)


def _zipf(plan: DrawPlan, feature: int, words_BI: Tensor) -> Tensor:
    """Invert the integral of x^-exponent over [1/2, rows + 1/2); x, rounded, is a rank from 1 on.

    The cell of rank k approximates k^-exponent by the midpoint rule: for exponents near 1 about 12 % too much for the
    first rank, 6 % for the second and ever closer after that.
    """
    log_BI = unsigned(words_BI).double() * 2.0**-32 * plan.slope_F[feature] + plan.start_F[feature]
    if plan.power:
        log_BI = log_BI.log() * plan.power
    # Clamped before the conversion to an integer: rounding takes steep laws near infinity.
    rank_BI = (log_BI.exp() - 0.5).clamp_(0, plan.rows[feature] - 1).to(torch.int64)
    return (rank_BI * plan.factor_F[feature] + plan.shift_F[feature]) % plan.rows[feature]
