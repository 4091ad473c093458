"""Configs of histories and windows of listening events. Torch-free, for a fast `--help` and `show`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import within
from ..events.kinds import DAY_S

Strategy = Literal["interleaved", "last-n"]
Leftover = Literal["drop", "carry"]
"""What happens to the last anchors of a window that do not fill a batch."""


@dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    length: int = 4086
    """Maximum number of events in a history; interleaved takes at least one of each action."""
    strategy: Strategy = "interleaved"
    """Which events make a history. interleaved: the last length / 3 events each of listen-plus, like and skip, sorted
    by time. last-n: the last `length` events of any kind."""
    scan: int = 20_000
    """Number of events before the anchor that are scanned."""
    query_time: Literal["last-event", "candidate"] = "last-event"
    """The time of a query, from which its hour and the ages of its history are counted: that of the last event of the
    history, as published, or that of the candidate."""

    def __post_init__(self) -> None:
        within(1, self.length, 1 << 20, "history.length")
        within(1, self.scan, 1 << 24, "history.scan")

    @property
    def events_per_action(self) -> int:
        """Events that interleaved takes of each action."""
        return max(1, self.length // 3)

    @property
    def longest(self) -> int:
        """The maximum length of a history."""
        return 3 * self.events_per_action if self.strategy == "interleaved" else self.length


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    seconds: int = DAY_S
    """Length of a window in seconds."""
    min_history: int = 4086
    """Minimum number of a user's events before an anchor."""
    train_share: float = 1.0
    """Share of training users, chosen by a hash of their ids; the others are used for evaluation only."""
    split_salt: int = 0
    """Salt of that hash; another salt chooses other users."""
    shuffle: float = 0.0
    """Anchors are shuffled within blocks of this share of the window: 0 sorts them by user, 1 shuffles all of them."""
    shuffle_seed: int = 0
    """Seed of the shuffle."""

    def __post_init__(self) -> None:
        within(1, self.seconds, 1 << 40, "window.seconds")
        within(0, self.min_history, 1 << 40, "window.min_history")
        within(0.0, self.train_share, 1.0, "window.train_share")
        within(0, self.split_salt, (1 << 63) - 1, "window.split_salt")
        within(0.0, self.shuffle, 1.0, "window.shuffle")
        within(0, self.shuffle_seed, 1 << 53, "window.shuffle_seed")
