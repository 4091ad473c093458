"""Drawing a batch of synthetic samples: `reference` (plain torch, any device), `native` (C, CPU), `triton` (GPU).

implementation, why = choose("auto", device, plan.kind)
implementation.draw(plan, index_1, buffers)     # fills the buffers with the batch whose number `index_1` holds

C and Triton draw uniform and Zipf ids, which presets use; the reference draws the other kinds. `shared_space` draws ids
from one large space that all features share. `Plan` is the task, laid out once on the device where batches are made.

All random numbers are 32-bit words that depend on nothing but two 32-bit keys of the batch and a counter,

    word = mix(mix(counter ^ first key) + second key)

with `mix` a bijection of three xor-shifts (16, 15, 16) and two odd multipliers that Wellons' search found to have the
least bias of their kind. Hence no word is used twice in a batch, any word is computed without the others, and a loop
over counters vectorises. The keys are the halves of a 64-bit hash of the batch's number (ops/hashing.py).

The counters of a batch, in this order: ids (feature by feature, sample by sample, the maximum number each), dense
features (sample by sample), lengths (feature by feature) and labels.

Shapes: F features, B samples, I ids of the longest bag, D dense features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...config import require
from .. import choice
from ..choice import Name
from ..hashing import hash_int, signed, stream

Kind = Literal["uniform", "gaussian", "zipf"]
FAST_KINDS = ("uniform", "zipf")
"""Kinds that the C and Triton implementations draw."""

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
MAX_ROWS = 1 << 31
"""(2^32 - 1) * 2^31 is the largest product of its kind that an int64 holds."""
DENSE_SCALE = math.sqrt(3.0) * 2.0**-23
"""Scales the top 24 bits, signed, to a uniform number on +-sqrt(3), which has variance 1."""
NEARLY_ONE = 1e-6
"""Exponents closer to 1 than this count as 1, where the power law's integral is a logarithm."""

_BATCHES, _PLANTED = 1, 2
_GOLDEN_SHARE = (math.sqrt(5) - 1) / 2


class Buffers(NamedTuple):
    """The tensors that a draw fills; ids beyond the last offset are unspecified."""

    dense_BD: Tensor
    values_V: Tensor
    offsets_FB1: Tensor
    labels_B: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawPlan:
    """The task of a `RandomBags` with a table per feature."""

    samples: int
    dense: int
    kind: Kind
    rows: tuple[int, ...]
    """Rows of the table of each feature."""
    max_ids: tuple[int, ...]
    """Maximum number of ids in a bag of each feature."""
    fixed: bool
    distinct: bool
    seed: int
    device: str
    exponent: float = 1.0
    mean: float = 0.5
    deviation: float = 0.15
    whole: int = 0
    """Samples of the whole batch, where only some of them are drawn: from `begin` on every `step`-th. 0: all are."""
    begin: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        for rows in self.rows:
            require(1 <= rows <= MAX_ROWS, "rows", rows, f"1 to {MAX_ROWS}")
        require(
            self.words < 1 << 32,
            "batch_size",
            self.samples,
            f"a batch of fewer than 2^32 random numbers; this one needs {self.words}",
        )

    @property
    def features(self) -> int:
        return len(self.rows)

    @property
    def capacity(self) -> int:
        """Maximum number of ids that are drawn."""
        return self.samples * sum(self.max_ids)

    @property
    def exact(self) -> bool:
        """Whether every batch fills its capacity."""
        return max(self.max_ids) == 1 or (self.fixed and not self.distinct)

    @property
    def whole_samples(self) -> int:
        """Samples of the whole batch: counters do not depend on which of them are drawn."""
        return self.whole or self.samples

    @property
    def first_dense(self) -> int:
        return self.whole_samples * sum(self.max_ids)

    @property
    def first_length(self) -> int:
        return self.first_dense + self.whole_samples * self.dense

    @property
    def first_label(self) -> int:
        return self.first_length + self.whole_samples * self.features

    @property
    def words(self) -> int:
        return self.first_label + self.whole_samples

    @cached_property
    def batch_seed(self) -> int:
        """Seed of the hash that gives a batch its keys; differs from the planted model's, so they share no numbers."""
        return hash_int(_BATCHES, self.seed)

    @cached_property
    def numbers_B(self) -> Tensor:
        """The place of each sample in the whole batch."""
        return torch.arange(self.begin, self.begin + self.samples * self.step, self.step, device=self.device)

    def keys(self, index: int) -> tuple[int, int]:
        word = hash_int(index, self.batch_seed)
        return word & 0xFFFFFFFF, word >> 32

    @property
    def power(self) -> float:
        """One over the power in the inverse of the Zipf integral; 0 where the integral is a logarithm."""
        return 0.0 if abs(1.0 - self.exponent) < NEARLY_ONE else 1.0 / (1.0 - self.exponent)

    @cached_property
    def power_1(self) -> Tensor:
        """A tensor, because a kernel would receive a Python number as float32."""
        return torch.tensor([self.power], dtype=torch.float64, device=self.device)

    @cached_property
    def stream_1(self) -> Tensor:
        return torch.tensor([signed(stream(self.batch_seed))], device=self.device)

    @cached_property
    def rows_F(self) -> Tensor:
        return torch.tensor(self.rows, device=self.device)

    @cached_property
    def max_ids_F(self) -> Tensor:
        return torch.tensor(self.max_ids, device=self.device)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The counter of each feature's first id."""
        return tuple(self.whole_samples * sum(self.max_ids[:index]) for index in range(self.features))

    @cached_property
    def first_F(self) -> Tensor:
        return torch.tensor(self.firsts, device=self.device)

    @cached_property
    def slope_F(self) -> Tensor:
        """With `start_F`, the linear function in Gaussian and Zipf draws."""
        return self._line[0]

    @cached_property
    def start_F(self) -> Tensor:
        return self._line[1]

    @cached_property
    def _line(self) -> tuple[Tensor, Tensor]:
        if self.kind == "gaussian":
            pairs = [(rows * self.deviation, rows * self.mean) for rows in self.rows]
        else:
            pairs = [zipf_line(rows, self.exponent) for rows in self.rows]
        line_2F = torch.tensor(pairs, dtype=torch.float64, device=self.device).t().contiguous()
        return line_2F[0], line_2F[1]

    @cached_property
    def factor_F(self) -> Tensor:
        """Multipliers of the bijections from popularity ranks to ids."""
        return torch.tensor([scatter_factor(rows) for rows in self.rows], device=self.device)

    @cached_property
    def shift_F(self) -> Tensor:
        """Offsets of those bijections; they make features and seeds differ in their most popular id."""
        shifts = [self._planted(1, index) % rows for index, rows in enumerate(self.rows)]
        return torch.tensor(shifts, device=self.device)

    @cached_property
    def score_keys_F2(self) -> Tensor:
        """Keys under which an id of a feature is mixed to its planted score."""
        pairs = [(word & 0xFFFFFFFF, word >> 32) for word in (self._planted(2, f) for f in range(self.features))]
        return torch.tensor(pairs, device=self.device).to(torch.int32)

    @cached_property
    def weights_D(self) -> Tensor:
        return planted_weights([self._planted(3, index) for index in range(self.dense)], self.device)

    def _planted(self, use: int, index: int) -> int:
        return hash_int((use << 32) + index, hash_int(_PLANTED, self.seed))


def planted_weights(words: list[int], device: str) -> Tensor:
    """Weights of the dense features from 64-bit words: of unit length, so that their part of a logit has variance 1."""
    drawn = [word * 2.0**-63 - 1.0 for word in words]
    length = math.hypot(*drawn)
    return torch.tensor([value / length for value in drawn], dtype=torch.float32, device=device)


def zipf_line(rows: int, exponent: float) -> tuple[float, float]:
    """Slope and start that map [0, 1) to the integral of x^-exponent from 1/2 to rows + 1/2, or to its logarithm."""
    power = 1.0 - exponent
    if abs(power) < NEARLY_ONE:
        return math.log((rows + 0.5) / 0.5), math.log(0.5)
    return (rows + 0.5) ** power - 0.5**power, 0.5**power


def scatter_factor(rows: int) -> int:
    """A multiplier coprime to the rows that takes neighbouring ranks far apart; int64 holds its product with a rank."""
    factor = max(1, min(int(rows * _GOLDEN_SHARE), (1 << 62) // rows))
    while math.gcd(factor, rows) != 1:
        factor -= 1
    return factor


def choose(name: Name, device: str, kind: Kind) -> tuple[ModuleType, str]:
    """Return the implementation and the reason; an explicit request that cannot be met raises."""
    problem = None if kind in FAST_KINDS else f"it does not draw {kind} ids"
    return choice.choose(__name__, name, torch.device(device), fix="draw with reference", problem=problem)
