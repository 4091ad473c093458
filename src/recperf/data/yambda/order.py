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

    `leftover` decides about anchors that do not fill a batch at the end of a window: "drop" omits them, "carry" fills
    the batch from the next window, so that only the last batch of the stream is short.
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
        require(leftover in ("drop", "carry"), "leftover", leftover, "drop, carry")
        for window in (min(windows, default=0), max(windows, default=0)):
            within(0, window, index.windows - 1, "windows")
        self.index, self.windows, self.users = index, windows, users
        self.batch_size, self.leftover = batch_size, leftover
        self.counts_S = index.counts(users)[np.asarray(windows, dtype=np.int64)]
        """Number of anchors of each window of the stream."""
        used_S = self.counts_S // batch_size * batch_size if leftover == "drop" else self.counts_S
        self._before_S1 = np.concatenate([[0], np.cumsum(used_S)])
        """Number of anchors before each window, those that are dropped left out."""
        self._cached: OrderedDict[int, _Window] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of batches of the stream."""
        return -(-self.samples // self.batch_size)

    @property
    def samples(self) -> int:
        """Number of anchors in all batches."""
        return int(self._before_S1[-1])

    @property
    def leftovers_S(self) -> NDArray[np.int64]:
        """Number of anchors that do not fill a batch at the end of each window."""
        ends_S = self._before_S1[1:] if self.leftover == "carry" else self.counts_S
        return np.asarray(ends_S % self.batch_size)

    @property
    def seams_S(self) -> NDArray[np.int64]:
        """For each window, the number of batches that have no anchor of a later window."""
        ends_S = self._before_S1[1:]
        # The last anchors of the stream may make a short batch.
        return np.where(ends_S == self.samples, len(self), ends_S // self.batch_size)

    def samples_until(self, number: int) -> int:
        """Number of anchors in the batches before this one."""
        return self._span(number)[0] if number < len(self) else self.samples

    def batch(self, number: int) -> NDArray[np.int64]:
        """Positions of one batch's anchors; only its own windows are read."""
        start, stop = self._span(number)
        parts = []
        for place in range(self._place(start), self._place(stop - 1) + 1):
            begin, end = int(self._before_S1[place]), int(self._before_S1[place + 1])
            if begin < end:
                parts.append(self.anchors(place)[max(0, start - begin) : min(stop, end) - begin])
        return np.concatenate(parts)

    def last_place(self, number: int) -> int:
        """The index, within the stream, of the window in which a batch ends."""
        return self._place(self._span(number)[1] - 1)

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

    def _span(self, number: int) -> tuple[int, int]:
        """The first anchor of a batch and the one after its last, counted from the start of the stream."""
        if not 0 <= number < len(self):
            raise IndexError(f"there is no batch {number}: the stream has {len(self)}")
        start = number * self.batch_size
        return start, min(start + self.batch_size, self.samples)

    def _place(self, anchor: int) -> int:
        """The window of an anchor of the stream."""
        return int(np.searchsorted(self._before_S1, anchor, side="right")) - 1
