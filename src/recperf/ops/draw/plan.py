"""What every implementation of the draw is given: the task, laid out once on the device where batches are made.

All random numbers are 32-bit words that depend on nothing but two 32-bit keys of the window and a counter,

    word = mix(mix(counter ^ first key) + second key)

with `mix` a bijection of three xor-shifts (16, 15, 16) and two odd multipliers that Wellons' search found to have the
least bias of their kind. Hence no word serves twice in a window, any word is computed without the others, and a loop
over counters vectorises. The keys are the halves of the window's 64-bit hash (ops/hashing.py).

The counters of a window, in this order: ids (feature by feature, sample by sample, most ids each), dense features
(sample by sample), lengths (feature by feature) and labels.

Shapes: F features, B samples, I most ids of a bag, D dense features, K ids of a profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...config import require
from ..hashing import hash_int, signed, stream

Kind = Literal["uniform", "gaussian", "zipf", "replay"]

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
MOST_ROWS = 1 << 31
"""(2^32 - 1) * 2^31 is the largest product of its kind that a signed word holds."""
DENSE_SCALE = math.sqrt(3.0) * 2.0**-23
"""The top 24 bits, signed, become a uniform number on +-sqrt(3), which has variance 1."""
NEARLY_ONE = 1e-6
"""Exponents closer to 1 than this are taken for 1, where the power law's integral is a logarithm."""

_WINDOWS, _PLANTED = 1, 2
_GOLDEN_SHARE = (math.sqrt(5) - 1) / 2


class Buffers(NamedTuple):
    """The tensors that a draw fills, with room for the largest batch: V is `Plan.capacity`."""

    offsets_FB1: Tensor
    values_V: Tensor
    dense_BD: Tensor
    labels_B: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The task of a `RandomBags`, ready to be drawn from."""

    samples: int
    dense: int
    kind: Kind
    rows: tuple[int, ...]
    """Of the table of each feature."""
    most: tuple[int, ...]
    """The most ids of a bag of each feature."""
    fixed: bool
    distinct: bool
    seed: int
    device: str
    exponent: float = 1.0
    mean: float = 0.5
    deviation: float = 0.15
    counts: tuple[Mapping[int, int], ...] = ()
    """With kind replay, how often each id of each feature occurs."""

    def __post_init__(self) -> None:
        for rows in self.rows:
            require(1 <= rows <= MOST_ROWS, "rows", rows, f"1 to {MOST_ROWS}")
        require(
            self.words < 1 << 32, "batch_size", self.samples, f"fewer than 2^32 numbers a batch; {self.words} asked"
        )

    @property
    def features(self) -> int:
        return len(self.rows)

    @property
    def capacity(self) -> int:
        """The most ids a batch has."""
        return self.samples * sum(self.most)

    @property
    def exact(self) -> bool:
        """Every batch has as many ids as there is room for."""
        return max(self.most) == 1 or (self.fixed and not self.distinct)

    @property
    def first_dense(self) -> int:
        return self.capacity

    @property
    def first_length(self) -> int:
        return self.first_dense + self.samples * self.dense

    @property
    def first_label(self) -> int:
        return self.first_length + self.samples * self.features

    @property
    def words(self) -> int:
        return self.first_label + self.samples

    @cached_property
    def window_seed(self) -> int:
        """Of the hash that gives a window its keys; apart from the planted answer's, so that they share no numbers."""
        return hash_int(_WINDOWS, self.seed)

    def keys(self, window: int) -> tuple[int, int]:
        word = hash_int(window, self.window_seed)
        return word & 0xFFFFFFFF, word >> 32

    @property
    def power(self) -> float:
        """One over the power the inverse of the Zipf integral ends with; 0 where it is a logarithm."""
        return 0.0 if abs(1.0 - self.exponent) < NEARLY_ONE else 1.0 / (1.0 - self.exponent)

    @cached_property
    def power_1(self) -> Tensor:
        """As a tensor: a kernel would be given a number as a float32."""
        return torch.tensor([self.power], dtype=torch.float64, device=self.device)

    @cached_property
    def stream_1(self) -> Tensor:
        return torch.tensor([signed(stream(self.window_seed))], device=self.device)

    @cached_property
    def rows_F(self) -> Tensor:
        return torch.tensor(self.rows, device=self.device)

    @cached_property
    def most_F(self) -> Tensor:
        return torch.tensor(self.most, device=self.device)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The counter of each feature's first id."""
        return tuple(self.samples * sum(self.most[:index]) for index in range(self.features))

    @cached_property
    def first_F(self) -> Tensor:
        return torch.tensor(self.firsts, device=self.device)

    @cached_property
    def slope_F(self) -> Tensor:
        """With `start_F`, the straight line that Gaussian and Zipf draws begin or end with."""
        return self._line[0]

    @cached_property
    def start_F(self) -> Tensor:
        return self._line[1]

    @cached_property
    def _line(self) -> tuple[Tensor, Tensor]:
        if self.kind == "gaussian":
            pairs = [(rows * self.deviation, rows * self.mean) for rows in self.rows]
        elif self.power == 0.0:
            pairs = [(math.log((rows + 0.5) / 0.5), math.log(0.5)) for rows in self.rows]
        else:
            power = 1.0 - self.exponent
            pairs = [((rows + 0.5) ** power - 0.5**power, 0.5**power) for rows in self.rows]
        line_2F = torch.tensor(pairs, dtype=torch.float64, device=self.device).t().contiguous()
        return line_2F[0], line_2F[1]

    @cached_property
    def factor_F(self) -> Tensor:
        """Multipliers of the bijections from ranks to ids that take neighbouring ranks far apart."""
        factors = []
        for rows in self.rows:
            factor = max(1, int(rows * _GOLDEN_SHARE))
            while math.gcd(factor, rows) != 1:
                factor -= 1
            factors.append(factor)
        return torch.tensor(factors, device=self.device)

    @cached_property
    def shift_F(self) -> Tensor:
        """What those bijections add, so that features and seeds differ in their most popular id."""
        shifts = [self._planted(1, index) % rows for index, rows in enumerate(self.rows)]
        return torch.tensor(shifts, device=self.device)

    @cached_property
    def edges_K(self) -> Tensor:
        """Of a profile: the words below each edge, and not below the one before, draw that id; feature f adds f 2^32.

        Rounding moves an edge by less than one word in 2^32, and the same words draw the same ids everywhere.
        """
        edges = []
        for index, counts in enumerate(self.counts):
            total, so_far = sum(counts.values()), 0
            for count in counts.values():
                so_far += count
                edges.append((index << 32) + (so_far << 32) // total)
        return torch.tensor(edges, dtype=torch.int64, device=self.device)

    @cached_property
    def known_K(self) -> Tensor:
        """The ids of a profile, in the order of its edges."""
        return torch.tensor(
            [index for counts in self.counts for index in counts], dtype=torch.int64, device=self.device
        )

    @cached_property
    def part_F1(self) -> Tensor:
        """Where the ids of each feature begin among those of a profile."""
        sizes = [len(counts) for counts in self.counts] or [0] * self.features
        return torch.tensor([0, *sizes], device=self.device).cumsum(0)

    @cached_property
    def score_keys_F2(self) -> Tensor:
        """Keys under which an id of a feature is mixed to its planted score."""
        pairs = [(word & 0xFFFFFFFF, word >> 32) for word in (self._planted(2, f) for f in range(self.features))]
        return torch.tensor(pairs, device=self.device).to(torch.int32)

    @cached_property
    def weights_D(self) -> Tensor:
        """Of unit length, so that the dense part of a logit has variance 1 whatever the width."""
        drawn = [self._planted(3, index) * 2.0**-63 - 1.0 for index in range(self.dense)]
        length = math.hypot(*drawn)
        return torch.tensor([value / length for value in drawn], dtype=torch.float32, device=self.device)

    def _planted(self, use: int, index: int) -> int:
        return hash_int((use << 32) + index, hash_int(_PLANTED, self.seed))
