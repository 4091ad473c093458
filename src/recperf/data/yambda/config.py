"""What a user may choose about listening events. Torch-free, so that help and `show` answer at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import within
from .schema import DAY_S

Strategy = Literal["interleaved", "last-n", "last_n"]
"""The last two are one; a config holds the first spelling of it."""
Leftover = Literal["drop", "keep", "carry"]
"""What becomes of a window's last anchors that fill no batch."""


@dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    length: int = 4086
    """Events a history has at most; interleaved takes at least one of each pool."""
    strategy: Strategy = "interleaved"
    """Which events: the last third of the length each of listen-plus, like and skip, in the order of time, or the last
    ones whatever they are."""
    scan: int = 20_000
    """Events before the anchor that are looked through."""
    most: int | None = None
    """Events kept, the newest; none means all that the strategy takes. The reference keeps what its longest sequence
    leaves after the candidate and 8 context tokens: that length less 9."""

    def __post_init__(self) -> None:
        if self.strategy == "last_n":
            object.__setattr__(self, "strategy", "last-n")
        within(1, self.length, 1 << 20, "history.length")
        within(1, self.scan, 1 << 24, "history.scan")
        if self.most is not None:
            within(1, self.most, 1 << 20, "history.most")

    @property
    def pool_length(self) -> int:
        """Events interleaved takes from each pool."""
        return max(1, self.length // 3)

    @property
    def longest(self) -> int:
        """Events no history has more of."""
        taken = 3 * self.pool_length if self.strategy == "interleaved" else self.length
        return taken if self.most is None else min(taken, self.most)


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    seconds: int = DAY_S
    """Length of a window."""
    min_history: int = 4086
    """Events a user must have before an anchor."""
    train_share: float = 1.0
    """Share of the users that train, by a hash of their ids; the others are only scored."""
    split_salt: int = 0
    """Another salt draws other users."""
    shuffle: float = 0.0
    """Share of a window within which its anchors are shuffled: 0 keeps them user by user, 1 shuffles it whole."""
    shuffle_seed: int = 0
    """Seed of the shuffle."""

    def __post_init__(self) -> None:
        within(1, self.seconds, 1 << 40, "window.seconds")
        within(0, self.min_history, 1 << 40, "window.min_history")
        within(0.0, self.train_share, 1.0, "window.train_share")
        within(0, self.split_salt, (1 << 63) - 1, "window.split_salt")
        within(0.0, self.shuffle, 1.0, "window.shuffle")
        within(0, self.shuffle_seed, 1 << 53, "window.shuffle_seed")
