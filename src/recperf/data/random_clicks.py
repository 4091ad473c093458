"""Made-up clicks with ids from a space as large as asked for: fresh ids every step, so that no cache learns them.

All random numbers of a stream are one splitmix64 sequence, and batch n is its n-th window: any batch is computed
without those before it, and no number is ever used by two batches. Held-out batches are the windows before the start.
Uniform ids and dense features are the same bits on every device; Zipf ids and labels go through exp and log, whose last
digit is the device's own.

Shapes: B samples, F sparse features, D dense features, I ids a bag, V = F * B * I ids in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ..config import require
from ..ops.hashing import finalise_torch_, hash_int, signed, stream
from ..ops.splitmix import GOLDEN
from .batch import ClickBatch, JaggedFeatures

MOST_IDS = 1 << 40
GOLDEN_SHARE = (math.sqrt(5) - 1) / 2
NEARLY_ONE = 1e-6
"""Exponents closer to 1 than this are taken for 1, where the power law's integral is a logarithm."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomClicks:
    """An endless click task with a planted answer, cut into epochs; a batch is a function of (seed, epoch, step)."""

    keys: tuple[str, ...]
    """Names of the sparse features; all draw from the same id space, each with scores of its own."""
    dense: int
    """Dense features, uniform with mean 0 and variance 1."""
    batch_size: int
    batches_per_epoch: int
    seed: int
    """Decides the batches and the planted answer."""
    ids: Literal["zipf", "uniform"]
    """How ids are drawn: by a power law of their popularity, or all alike."""
    id_space: int
    """Ids are 0 to this, exclusive."""
    exponent: float = 1.05
    """Of the power law: the k-th most popular id has a share proportional to k to the minus this."""
    ids_per_bag: int = 1
    device: str = "cpu"
    """Where batches are made and stay."""
    span: int | None = None
    """Draw uniform ids from the first so many of the space only: equal shapes, a small working set."""

    def __post_init__(self) -> None:
        require(len(self.keys) >= 1, "keys", self.keys, "at least one name")
        for name in ("dense", "batch_size", "batches_per_epoch", "ids_per_bag"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.ids in ("zipf", "uniform"), "ids", self.ids, "zipf or uniform")
        require(1 <= self.id_space <= MOST_IDS, "id_space", self.id_space, f"1 to {MOST_IDS}")
        require(0.0 < self.exponent < 100.0, "exponent", self.exponent, "above 0 and below 100")
        if self.span is not None:
            require(self.ids == "uniform", "span", self.span, "none unless ids is uniform")
            require(1 <= self.span <= self.id_space, "span", self.span, f"1 to id_space, {self.id_space}")

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.batches_per_epoch

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        """The batches of an epoch from the given one on."""
        return (self.batch(epoch, step) for step in range(start, self.batches_per_epoch))

    def batch(self, epoch: int, step: int) -> ClickBatch:
        if epoch < 0 or not 0 <= step < self.batches_per_epoch:
            raise IndexError(f"no batch {step} in epoch {epoch}; an epoch has {self.batches_per_epoch}")
        return self._window(epoch * self.batches_per_epoch + step)

    def held_out(self, count_batches: int) -> Iterator[ClickBatch]:
        """Batches of the same task that training never sees; the same ones whenever asked."""
        return (self._window(-1 - index) for index in range(count_batches))

    def planted_logits(self, dense_BD: Tensor, values_V: Tensor) -> Tensor:
        """The log odds labels are drawn from: what a perfect model would answer."""
        words_FV = values_V.view(len(self.keys), -1) + self._score_keys_F1
        scores_FBI = _signed_unit(finalise_torch_(words_FV)).view(len(self.keys), dense_BD.shape[0], -1)
        return (dense_BD * self._weights_D).sum(1) + scores_FBI.sum(2).sum(0) / math.sqrt(scores_FBI.shape[2])

    def _window(self, index: int) -> ClickBatch:
        steps = self._steps
        words = finalise_torch_(steps + signed(stream(self.seed) + GOLDEN * index * steps.numel()))
        samples, for_labels = self.batch_size, words[-self.batch_size :]
        for_dense, for_ids = words[-samples * (self.dense + 1) : -samples], words[: -samples * (self.dense + 1)]
        # Uniform on +-sqrt(3) has variance 1.
        dense_BD = _signed_unit(for_dense).mul_(math.sqrt(3.0)).view(samples, self.dense)
        values_V = self._zipf(for_ids) if self.ids == "zipf" else self._uniform(for_ids)
        # A uniform number in [-1, 1) is below 2 p - 1 with chance p, and 2 sigmoid(x) - 1 is tanh(x / 2).
        chances_B = self.planted_logits(dense_BD, values_V).mul_(0.5).tanh_()
        labels_B = (_signed_unit(for_labels) < chances_B).float()
        features = JaggedFeatures(self.keys, values_V, self._offsets_FB1, self.ids_per_bag == 1)
        return ClickBatch(dense_BD, features, labels_B)

    def _uniform(self, words_V: Tensor) -> Tensor:
        """Chances are off by a relative span / 2^53 at most; the product stays below span, its rounding included."""
        return _top53(words_V).mul_((self.span or self.id_space) * 2.0**-53).to(torch.int64)

    def _zipf(self, words_V: Tensor) -> Tensor:
        """Inverse of the integral of x^-exponent over [1/2, id_space + 1/2); rounding x gives a rank from 1 on.

        The cell of rank k approximates k^-exponent by the midpoint rule: for exponents near 1 about 12 % too much for
        the first rank, 6 % for the second and ever closer after that.
        """
        share_V = _top53(words_V).mul_(2.0**-53)
        first, last, power = 0.5, self.id_space + 0.5, 1.0 - self.exponent
        if abs(power) < NEARLY_ONE:
            log_V = share_V.mul_(math.log(last / first)).add_(math.log(first))
        else:
            log_V = share_V.mul_(last**power - first**power).add_(first**power).log_().div_(power)
        rank_V = log_V.exp_().sub_(0.5).to(torch.int64).clamp_(max=self.id_space - 1)
        multiplier, offset = self._scatter
        return rank_V.mul_(multiplier).add_(offset).remainder_(self.id_space)

    @cached_property
    def _scatter(self) -> tuple[int, int]:
        """Multiplier and offset of the bijection from ranks to ids that takes neighbouring ranks far apart.

        The multiplier is coprime to the space and small enough for a signed word to hold the product.
        """
        multiplier = max(1, min(int(self.id_space * GOLDEN_SHARE), (1 << 62) // self.id_space))
        while math.gcd(multiplier, self.id_space) != 1:
            multiplier -= 1
        return multiplier, hash_int(0, self.seed) % self.id_space

    @cached_property
    def _steps(self) -> Tensor:
        """How far each number of a window is from the window's start, in the words of splitmix64."""
        count = self.batch_size * (len(self.keys) * self.ids_per_bag + self.dense + 1)
        return torch.arange(1, count + 1, device=self.device).mul_(signed(GOLDEN))

    @cached_property
    def _offsets_FB1(self) -> Tensor:
        ids = len(self.keys) * self.batch_size * self.ids_per_bag
        return torch.arange(0, ids + 1, self.ids_per_bag, device=self.device)

    @cached_property
    def _score_keys_F1(self) -> Tensor:
        """Random words: ids of 40 bits added to two of them practically never meet, so features share no scores."""
        keys = [signed(hash_int(1 + index, self.seed)) for index in range(len(self.keys))]
        return torch.tensor(keys, device=self.device).view(-1, 1)

    @cached_property
    def _weights_D(self) -> Tensor:
        """Of unit length, so that the dense part of a logit has variance 1 whatever the width."""
        drawn = [hash_int(-1 - index, self.seed) * 2.0**-63 - 1.0 for index in range(self.dense)]
        length = math.hypot(*drawn)
        return torch.tensor([value / length for value in drawn], dtype=torch.float32, device=self.device)


def _signed_unit(words: Tensor) -> Tensor:
    """The top 24 bits as a float32 in [-1, 1)."""
    return (words >> 40).to(torch.float32).mul_(2.0**-23)


def _top53(words: Tensor) -> Tensor:
    """The top 53 bits as a float64, which holds all of them."""
    return (words >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64)
