"""Fewer anchors to train on than a stream of windows has, which experiments train on. Histories stay whole.

Shapes: N anchors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from .windows import Users, WindowIndex, unit

SALT = 7


def with_fewer(index: WindowIndex, windows: Iterable[int], users: Users, *, share: float, recent: float) -> WindowIndex:
    """The index without some of the anchors of a part, which lie in these windows: `share` of them are drawn, of those
    in the latest share `recent`."""
    if share == recent == 1.0:
        return index
    store, since = index.store, index.t_min
    if recent < 1.0:
        if store.time_order != "time":
            raise ConfigError(f"{store.name} has no times", where={"field": "data.recent"}, fix="--data.recent 1")
        times_N = np.concatenate([store.times_E[index.anchors(window, users)] for window in windows])
        first = min(len(times_N) - 1, round((1 - recent) * len(times_N)))
        since = int(np.partition(times_N, first)[first])

    def left(positions_N: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions_N[(unit(positions_N, SALT) < share) & (store.times_E[positions_N] >= since)]

    return replace(index, fewer=(users, left), _counts={})
