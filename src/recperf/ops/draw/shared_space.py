"""Drawing bags of fixed length from one id space of up to 2^40 ids that all features share.

All random numbers of a seed are one splitmix64 sequence, and batch n is its n-th section: any batch is computed without
those before it, and no number is used by two batches. Uniform ids and dense features are the same bits on every device;
Zipf ids and labels go through exp and log, whose last digit depends on the device.

Shapes: B samples, F sparse features, D dense features, I ids per bag, V = F * B * I ids in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...config import require
from ..hashing import GOLDEN, finalise_torch_, hash_int, signed, stream
from . import NEARLY_ONE, Buffers, Kind, planted_weights, scatter_factor, zipf_line

MAX_ID_SPACE = 1 << 40


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedSpacePlan:
    """The task of a `RandomBags` whose features share an id space."""

    samples: int
    dense: int
    features: int
    kind: Kind
    id_space: int
    ids_per_bag: int
    seed: int
    device: str
    exponent: float = 1.0

    def __post_init__(self) -> None:
        require(self.kind in ("uniform", "zipf"), "ids", self.kind, "uniform or zipf with a shared id space")
        require(1 <= self.id_space <= MAX_ID_SPACE, "id_space", self.id_space, f"1 to {MAX_ID_SPACE}")

    @property
    def capacity(self) -> int:
        """Number of ids in a batch."""
        return self.features * self.samples * self.ids_per_bag

    @property
    def exact(self) -> bool:
        return True

    @property
    def max_ids(self) -> tuple[int, ...]:
        return (self.ids_per_bag,) * self.features

    @cached_property
    def steps(self) -> Tensor:
        """The distance of each number of a batch from the batch's start in the splitmix64 sequence."""
        count = self.capacity + self.samples * (self.dense + 1)
        return torch.arange(1, count + 1, device=self.device).mul_(signed(GOLDEN))

    @cached_property
    def score_keys_F1(self) -> Tensor:
        """Random words; 40-bit ids added to two of them practically never collide, so features share no scores."""
        keys = [signed(hash_int(1 + index, self.seed)) for index in range(self.features)]
        return torch.tensor(keys, device=self.device).view(-1, 1)

    @cached_property
    def weights_D(self) -> Tensor:
        return planted_weights([hash_int(-1 - index, self.seed) for index in range(self.dense)], self.device)

    @cached_property
    def shift(self) -> int:
        """Offset of the bijection from ranks to ids."""
        return hash_int(0, self.seed) % self.id_space


def draw(plan: SharedSpacePlan, index_1: Tensor, out: Buffers) -> None:
    """Fill the buffers with the batch whose number the tensor holds; the host does not wait."""
    start_1 = index_1 * signed(GOLDEN * plan.steps.numel()) + signed(stream(plan.seed))
    words = finalise_torch_(plan.steps + start_1)
    ids_V, dense_N, labels_B = torch.split(words, [plan.capacity, plan.samples * plan.dense, plan.samples])
    torch.arange(0, plan.capacity + 1, plan.ids_per_bag, out=out.offsets_FB1)
    # Uniform on +-sqrt(3) has variance 1.
    out.dense_BD.copy_(_signed_unit(dense_N).mul_(math.sqrt(3.0)).view_as(out.dense_BD))
    out.values_V.copy_(_zipf(plan, ids_V) if plan.kind == "zipf" else _uniform(plan, ids_V))
    # A uniform number in [-1, 1) is below 2 p - 1 with probability p, and 2 sigmoid(x) - 1 is tanh(x / 2).
    threshold_B = planted_logits(plan, out.dense_BD, out.values_V).mul_(0.5).tanh_()
    out.labels_B.copy_(_signed_unit(labels_B) < threshold_B)


def planted_logits(plan: SharedSpacePlan, dense_BD: Tensor, values_V: Tensor) -> Tensor:
    """The log odds that labels are drawn from: what a perfect model would predict."""
    words_FV = values_V.view(plan.features, -1) + plan.score_keys_F1
    scores_FBI = _signed_unit(finalise_torch_(words_FV)).view(plan.features, dense_BD.shape[0], -1)
    return (dense_BD * plan.weights_D).sum(1) + scores_FBI.sum(2).sum(0) / math.sqrt(scores_FBI.shape[2])


def _uniform(plan: SharedSpacePlan, words_V: Tensor) -> Tensor:
    """Probabilities are off by a relative id_space / 2^53 at most; the rounded product stays below id_space."""
    return _top53(words_V).mul_(plan.id_space * 2.0**-53)


def _zipf(plan: SharedSpacePlan, words_V: Tensor) -> Tensor:
    """Draw ids by a power law, as `reference._zipf` describes, from 53-bit numbers."""
    slope, start = zipf_line(plan.id_space, plan.exponent)
    log_V, power = _top53(words_V).mul_(2.0**-53).mul_(slope).add_(start), 1.0 - plan.exponent
    if abs(power) >= NEARLY_ONE:
        log_V = log_V.log_().div_(power)
    rank_V = log_V.exp_().sub_(0.5).to(torch.int64).clamp_(max=plan.id_space - 1)
    return rank_V.mul_(scatter_factor(plan.id_space)).add_(plan.shift).remainder_(plan.id_space)


def _signed_unit(words: Tensor) -> Tensor:
    """The top 24 bits as a float32 in [-1, 1)."""
    return (words >> 40).to(torch.float32).mul_(2.0**-23)


def _top53(words: Tensor) -> Tensor:
    """The top 53 bits as a float64, which holds all of them."""
    return (words >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64)
