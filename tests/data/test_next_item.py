"""Next-item data: which events train, which are targets, and which rows of a store count as taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data import next_item
from recperf.data.config import SplitOptions
from recperf.data.events.imports import import_events
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import EventStore, open_store
from recperf.data.next_item import NextItemData, Targets
from recperf.data.split.events import EventSplit
from recperf.errors import DataError


def store_of(folder: Path, content: str, **options: Any) -> EventStore:
    path = folder / "log.txt"
    path.write_text(content)
    return open_store(import_events(ImportOptions(events=path, **options), folder / "store"))


def by_time(store: EventStore, holdout: float) -> EventSplit:
    return EventSplit(store, SplitOptions(split="time", holdout=holdout))


def pairs(targets: Targets, data: NextItemData) -> list[tuple[int, list[int], int]]:
    """User, history and target."""
    return [
        (user, data.items_E[data.offsets_U1[user] : position].tolist(), int(data.items_E[position]))
        for user, position in zip(targets.users_N.tolist(), targets.positions_N.tolist())
    ]


def test_leave_one_out_holds_out_the_last_two_items_and_ignores_drawn_negatives(tmp_path: Path) -> None:
    data = NextItemData.from_store(store_of(tmp_path, "1 4 2 3 2\n2 1 5\n3 2 1 4\n", sequences=True))
    assert (data.items, data.users, data.times_E) == (5, 3, None)
    train = data.train()
    assert [data.items_E[b:e].tolist() for b, e in zip(train.begins_S, train.ends_S)] == [[4, 2], [1, 5], [2]]
    assert pairs(data.validation(), data) == [(0, [4, 2], 3), (2, [2], 1)]
    assert pairs(data.test(), data) == [(0, [4, 2, 3], 2), (2, [2, 1], 4)]
    with pytest.raises(DataError, match="it cannot be split by time"):
        NextItemData.from_store(data.store, by_time(data.store, 0.2)).train()  # type: ignore[arg-type]


LOG = "user,item,time,label\n1,7,10,1\n1,8,60,1\n1,9,85,0\n1,7,88,1\n1,9,95,1\n2,8,20,1\n2,9,30,1\n2,7,99,1\n3,7,97,1\n"


def test_a_split_by_time_predicts_the_first_item_after_a_moment_for_users_with_a_history(tmp_path: Path) -> None:
    store = store_of(tmp_path, LOG)
    data = NextItemData.from_store(store, by_time(store, 0.25))
    # The row with label 0 is no item that the user took.
    assert data.items_E.tolist() == [1, 2, 1, 3, 2, 3, 1, 1]
    assert data.split is not None
    assert data.split.moments == (95, 97)
    assert pairs(data.validation(), data) == [(0, [1, 2, 1], 3)]
    assert pairs(data.test(), data) == [(1, [2, 3], 1)]
    assert data.train().ends_S.tolist() == [3, 6]


@pytest.mark.parametrize("taken", [0.5, 1.0])
def test_taken_events_are_counted_in_parts(taken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(5)
    for part in (1, 3, 100):
        monkeypatch.setattr(next_item, "PART", part)
        for events in (1, 5, 21):
            taken_E, positions_N = draw.random(events) < taken, draw.integers(0, events + 1, 13)
            expected = np.append(0, np.cumsum(taken_E))[positions_N]
            assert next_item._before(taken_E, positions_N).tolist() == expected.tolist()
