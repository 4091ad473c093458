"""Statistics of small stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data.yambda.config import HistoryConfig, WindowConfig
from recperf.data.yambda.describe import describe
from recperf.data.yambda.store import EventStore, kinds_of, open_store
from recperf.data.yambda.writer import StoreWriter

DAY = 86_400
Make = Callable[..., EventStore]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(times: list[list[int]], items: int = 5) -> EventStore:
        """A store of users who listen at these times, to items 0, 1, ... in turn."""
        with StoreWriter(tmp_path / f"store{len(list(tmp_path.iterdir()))}", identity={}) as writer:
            for uid, own in enumerate(times, 1):
                count = len(own)
                full = np.full(count, 100, np.uint16)
                writer.append(
                    uids=np.full(count, uid),
                    items=np.arange(count) % items,
                    times=np.array(own),
                    kinds=kinds_of(np.zeros(count, np.uint8), full, np.ones(count, np.uint8)),
                )
            catalogue_I2 = np.ones((items, 2), np.uint32)
            return open_store(writer.finish(catalogue_I2, {"name": "own", "synthetic": False, "licence": "none"}))

    return made


def described(store: EventStore, least: int = 2) -> dict[str, Any]:
    return describe(store, WindowConfig(min_history=least), HistoryConfig(length=4))


def test_a_store_too_small_for_anchors_is_described_without(make: Make) -> None:
    statistics = described(make([[0, 5, 2 * DAY], [7]]), least=100)
    assert (statistics["events"], statistics["users"], statistics["days"]) == (4, 2, 2.0)
    assert statistics["windows"] == {"seconds": DAY, "count": 0, "first_anchor": None, "last_anchor": None}
    assert statistics["anchors"] == {
        "min_history": 100,
        "total": 0,
        "in_the_last_window": 0,
        "a_window": None,
        "users_with_enough": 0,
    }
    assert statistics["history"] is None
