"""The mask of HSTU attention and the scale of its scores.

Shapes: B rows, M queries, N keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...config import require


@dataclass(frozen=True, eq=False)
class Mask:
    """A score is SiLU(alpha q.k) / length where the query sees the key, 0 elsewhere.

    Without options a token sees itself and what lies before it in its row. `reference` serves all options; no config
    asks for them, and the faster implementations leave masks with one to it.
    """

    alpha: float
    """The factor of q.k."""
    length: float
    """The divisor of the scores: the longest row of the batch, or a fixed length."""
    longest: int
    """The length of the longest row; the host cannot read lengths without waiting, and longer rows would be cut."""
    targets_B: Tensor | None = None
    """How many tokens at the end of each row do not see each other; with one a row, as without, all is causal."""
    window: int = 0
    """How far back a token sees, counted after the prefix; 0: to the beginning."""
    context: int = 0
    """How many tokens at the beginning of each row see all of it but the targets; 0: none."""

    def __post_init__(self) -> None:
        require(self.length > 0, "length", self.length, "above 0")
        require(self.longest >= 0, "longest", self.longest, "at least 0")
        require(self.window >= 0, "window", self.window, "at least 0")
        require(self.context >= 0, "context", self.context, "at least 0")

    @property
    def causal(self) -> bool:
        """Whether no option is set."""
        return self.targets_B is None and not self.window and not self.context

    def seen_MN(self, queries_M: Tensor, keys_N: Tensor, tokens: int, targets: int | None) -> Tensor:
        """Which query positions of a row with this many tokens see which keys."""
        shift = max(self.context - 1, 0)
        last = tokens - (targets or 0) - shift

        def places(positions: Tensor) -> Tensor:
            ids = (positions - shift).clamp(min=0)
            return ids if targets is None else ids.clamp(max=last)

        query_M1, key_1N = places(queries_M)[:, None], places(keys_N)[None, :]
        back = query_M1 - key_1N
        seen = back > 0
        if self.window:
            seen &= back <= self.window
        if self.context:
            seen |= (query_M1 == 0) & (key_1N < last)
        return seen | (queries_M[:, None] == keys_N[None, :])

    def keys(self, first: int, last: int, tokens: int, targets: int | None) -> tuple[int, int]:
        """The range of keys that queries first .. last - 1 can see."""
        if first < self.context:
            return 0, tokens
        if not self.window:
            return 0, last
        shift = max(self.context - 1, 0)
        place = first - shift
        if targets is not None:
            place = min(place, tokens - targets - shift)
        oldest = place - self.window
        return (oldest + shift if oldest > 0 else 0), last


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
