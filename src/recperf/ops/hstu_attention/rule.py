"""The mask of HSTU attention, the scale of its scores, and its counted work."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...config import require


@dataclass(frozen=True)
class Mask:
    """A score is SiLU(alpha q.k) / length where a token sees another: itself and what lies before it in its row."""

    alpha: float
    """The factor of q.k."""
    length: float
    """The divisor of the scores: the longest row of the batch, or a fixed length."""
    longest: int
    """The length of the longest row; the host cannot read lengths without waiting, and longer rows would be cut."""

    def __post_init__(self) -> None:
        require(self.length > 0, "length", self.length, "above 0")
        require(self.longest >= 0, "longest", self.longest, "at least 0")


def activations(offsets_B1: Tensor, k_THA: Tensor, *, last_only: bool = False) -> int:
    """Evaluations of SiLU: one for every pair of tokens that see each other, and head."""
    lengths_B = offsets_B1.diff().double()
    pairs = float((lengths_B if last_only else lengths_B.square() / 2).sum())
    return round(pairs * k_THA.shape[1])


def flops(offsets_B1: Tensor, k_THA: Tensor, v_THV: Tensor, *, backward: bool = False, last_only: bool = False) -> int:
    """Of the attention of all rows; a token sees itself and what lies before it, or only the last one sees."""
    lengths_B = offsets_B1.diff().double()
    twice_pairs = float((2 * lengths_B if last_only else lengths_B.square()).sum())
    heads, qk, width = k_THA.shape[1], k_THA.shape[2], v_THV.shape[2]
    return round(twice_pairs * heads * (3 * qk + 2 * width if backward else qk + width))
