"""The anchors of batch i of a stream of windows: a pure function, so that training can resume at any batch.

Shapes: B anchors a batch, N anchors of a window, S windows of the stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ...config import require, within
from .config import Leftover
from .windows import Users, WindowIndex

_MIN_CACHED = 3
"""Minimum number of cached windows: the previous, the current and the next."""
_MAX_CACHED = 64
_SMALL = 1 << 20
"""Number of anchors up to which more windows are cached."""


@dataclass(eq=False)
class _Window:
    """The anchors of a window, looked up once even if several threads request them."""

    size: int
    lock: Lock = field(default_factory=Lock)
    positions_N: NDArray[np.int64] | None = None


class StreamOrder:
    """Batches of anchors, window after window.

    `leftover` decides about anchors that do not fill a batch at the end of a window: "drop" omits them, "keep" makes a
    short batch, "carry" fills the batch from the next window, so that only the last batch of the stream is short.
    """

    def __init__(
        self,
        index: WindowIndex,
        *,
        windows: Sequence[int],
        batch_size: int,
        leftover: Leftover = "drop",
        users: Users = "train",
    ) -> None:
        within(1, batch_size, 1 << 24, "batch_size")
        require(leftover in ("drop", "keep", "carry"), "leftover", leftover, "drop, keep, carry")
        for window in (min(windows, default=0), max(windows, default=0)):
            within(0, window, index.windows - 1, "windows")
        self.index, self.windows, self.users = index, windows, users
        self.batch_size, self.leftover = batch_size, leftover
        self.counts_S = index.counts(users)[np.asarray(windows, dtype=np.int64)]
        """Number of anchors of each window of the stream."""
        full_S = -(-self.counts_S // batch_size) if leftover == "keep" else self.counts_S // batch_size
        # Counts before each window: of anchors if batches cross windows, else of batches.
        self._before_S1 = np.concatenate([[0], np.cumsum(self.counts_S if leftover == "carry" else full_S)])
        self._cached: OrderedDict[int, _Window] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of batches of the stream."""
        total = int(self._before_S1[-1])
        return -(-total // self.batch_size) if self.leftover == "carry" else total

    @property
    def samples(self) -> int:
        """Number of anchors in all batches."""
        dropped = int(self.leftovers_S.sum()) if self.leftover == "drop" else 0
        return int(self.counts_S.sum()) - dropped

    @property
    def leftovers_S(self) -> NDArray[np.int64]:
        """Number of anchors that do not fill a batch at the end of each window."""
        ends_S = self._before_S1[1:] if self.leftover == "carry" else self.counts_S
        return np.asarray(ends_S % self.batch_size)

    @property
    def seams_S(self) -> NDArray[np.int64]:
        """For each window, the number of batches that have no anchor of a later window."""
        ends_S = self._before_S1[1:]
        if self.leftover != "carry":
            return ends_S
        seams_S = ends_S // self.batch_size
        # The last anchors of the stream make a short batch.
        seams_S[ends_S == self._before_S1[-1]] = len(self)
        return np.asarray(seams_S)

    def samples_until(self, number: int) -> int:
        """Number of anchors in the batches before this one."""
        if self.leftover != "keep":
            return min(number * self.batch_size, self.samples)
        if number >= len(self):
            return self.samples
        place = self._place(number)
        inside = number - int(self._before_S1[place])
        return int(self.counts_S[:place].sum()) + inside * self.batch_size

    def batch(self, number: int) -> NDArray[np.int64]:
        """Positions of one batch's anchors; only its own windows are read."""
        self._check(number)
        if self.leftover != "carry":
            place = self._place(number)
            start = (number - int(self._before_S1[place])) * self.batch_size
            return self.anchors(place)[start : start + self.batch_size].copy()
        start = number * self.batch_size
        stop = min(start + self.batch_size, int(self._before_S1[-1]))
        parts = []
        for place in range(self._place(start), self._place(stop - 1) + 1):
            begin, end = int(self._before_S1[place]), int(self._before_S1[place + 1])
            if begin < end:
                parts.append(self.anchors(place)[max(0, start - begin) : min(stop, end) - begin])
        return np.concatenate(parts)

    def last_place(self, number: int) -> int:
        """The index, within the stream, of the window in which a batch ends."""
        self._check(number)
        if self.leftover != "carry":
            return self._place(number)
        return self._place(min((number + 1) * self.batch_size, int(self._before_S1[-1])) - 1)

    def next_place(self, place: int) -> int | None:
        """The index of the next window with batches, or None."""
        end = int(self._before_S1[place + 1])
        return self._place(end) if end < self._before_S1[-1] else None

    def anchors(self, place: int) -> NDArray[np.int64]:
        """The anchors of a window of the stream in training order, cached."""
        entry = self._entry(place)
        with entry.lock:
            if entry.positions_N is None:
                entry.positions_N = self.index.order(self.windows[place], self.users)
            return entry.positions_N

    def _entry(self, place: int) -> _Window:
        with self._lock:
            entry = self._cached.setdefault(place, _Window(int(self.counts_S[place])))
            self._cached.move_to_end(place)
            size = sum(window.size for window in self._cached.values())
            while len(self._cached) > _MIN_CACHED and (size > _SMALL or len(self._cached) > _MAX_CACHED):
                size -= self._cached.popitem(last=False)[1].size
            return entry

    def _place(self, count: int) -> int:
        return int(np.searchsorted(self._before_S1, count, side="right")) - 1

    def _check(self, number: int) -> None:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no batch {number}: the stream has {len(self)}")
