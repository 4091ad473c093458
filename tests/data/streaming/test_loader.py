"""Streams of batches equal a plain list of anchors that is cut up; the loader keeps their order and no thread."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recperf.data.batch import HistoryBatch, JaggedFeatures
from recperf.data.events.store import open_store
from recperf.data.known.yambda.synthesize import write_store
from recperf.data.known.yambda.yambda_like import YambdaLike
from recperf.data.streaming.config import HistoryConfig, Leftover, WindowConfig
from recperf.data.streaming.history import Histories
from recperf.data.streaming.loader import StreamOrder, load
from recperf.data.streaming.windows import WindowIndex
from recperf.errors import ConfigError, MachineError

Positions = NDArray[np.int64]
LEFTOVERS: tuple[Leftover, ...] = ("drop", "carry")


class FakeIndex:
    """Windows of given sizes whose anchors are numbered through, and a list of those that were asked for."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.windows = sizes, len(sizes)
        self.lookups: list[int] = []

    def counts(self, users: str) -> Positions:
        return np.array(self.sizes, np.int64)

    def order(self, window: int, users: str) -> Positions:
        self.lookups.append(window)
        return np.arange(self.sizes[window]) + 1000 * window


class FakeHistories:
    """Batches whose query times are the positions; `meanwhile` is called first and may wait or fail."""

    def __init__(self, meanwhile: Callable[[Positions], None] = lambda positions: None) -> None:
        self.meanwhile = meanwhile

    def __call__(self, positions_B: Positions) -> HistoryBatch:
        self.meanwhile(positions_B)
        ids = torch.from_numpy(positions_B)
        none = torch.zeros(0, dtype=torch.int64)
        offsets = torch.zeros(len(ids) + 1, dtype=torch.int64)
        features = JaggedFeatures.from_ids(("uid",), ids[None])
        return HistoryBatch(features, offsets, none, none, ids, torch.zeros(len(ids)))


def order_of(sizes: list[int], windows: Any = None, batch_size: int = 4, leftover: Leftover = "carry") -> StreamOrder:
    index, windows = cast(WindowIndex, FakeIndex(sizes)), range(len(sizes)) if windows is None else windows
    return StreamOrder(index, windows=windows, batch_size=batch_size, leftover=leftover)


def positions_of(batch: HistoryBatch) -> list[int]:
    return batch.query_times_B.tolist()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("recperf-loader")}


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    assert not threads()
    yield
    # What an error's traceback still holds is let go of here.
    gc.collect()
    for thread in threads():
        thread.join(300)
    assert not threads()


def late_ones_first(positions_B: Positions) -> None:
    time.sleep(0.004 if positions_B[0] // 4 % 3 == 0 else 0)


@pytest.mark.parametrize(("workers", "prefetch", "start"), [(1, 1, 0), (2, 3, 5), (7, 20, 0), (2, 4, 11)])
def test_the_order_is_exact_for_any_number_of_threads_from_any_batch(workers: int, prefetch: int, start: int) -> None:
    order = order_of([9, 0, 4, 30, 1])
    expected = [order.batch(number).tolist() for number in range(len(order))]
    loader = load(order, FakeHistories(late_ones_first), workers=workers, prefetch=prefetch, start=start)
    assert [positions_of(batch) for batch in loader] == expected[start:]
    assert not threads()
    with pytest.raises(ConfigError, match="start is 12"):
        next(load(order, FakeHistories(), start=len(order) + 1))


def fails_at(first: int, error: BaseException) -> Callable[[Positions], None]:
    def meanwhile(positions: Positions) -> None:
        if positions[0] == first:
            raise error

    return meanwhile


@pytest.mark.parametrize("error", [ValueError("the moon"), SystemExit(3)])
def test_a_failed_batch_is_reported_at_its_place(error: BaseException) -> None:
    stream = load(order_of([40]), FakeHistories(fails_at(12, error)), workers=3, prefetch=6)
    assert [positions_of(next(stream))[0] for _ in range(3)] == [0, 4, 8]
    with pytest.raises(MachineError, match=f"batch 3 could not be made: {type(error).__name__}") as failure:
        next(stream)
    assert failure.value.__cause__ is error
    assert failure.value.where == {"batch": "3"}
    assert not threads()
    assert [*stream] == []


def test_real_histories_by_threads_equal_sequential_ones(tmp_path: Path) -> None:
    store = open_store(write_store(YambdaLike(users=6, events_per_user=200, items=30), tmp_path / "store"))
    index = WindowIndex.open(store, WindowConfig(seconds=30 * 86_400, min_history=20, shuffle=0.5))
    order = StreamOrder(index, windows=range(index.windows), batch_size=16, leftover="carry")
    histories = Histories(store, HistoryConfig(length=30, scan=100), impl="reference")
    seen = 0
    for number, batch in enumerate(load(order, histories.batch, workers=3, prefetch=4, start=5), start=5):
        alone = histories.batch(order.batch(number))
        assert torch.equal(batch.features.values_V, alone.features.values_V)
        for name in ("history_offsets_B1", "actions_T", "times_T", "query_times_B", "labels_B"):
            assert torch.equal(getattr(batch, name), getattr(alone, name))
        seen += len(batch)
    assert seen == order.samples - 5 * 16 > 0


def plain(sizes: list[int], windows: list[int], batch_size: int, leftover: Leftover) -> list[list[int]]:
    lists = [[1000 * window + number for number in range(sizes[window])] for window in windows]
    if leftover == "carry":
        lists = [[anchor for part in lists for anchor in part]]
    batches = [part[start : start + batch_size] for part in lists for start in range(0, len(part), batch_size)]
    return [batch for batch in batches if leftover != "drop" or len(batch) == batch_size]


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    data=st.data(),
    batch_size=st.integers(1, 9),
    leftover=st.sampled_from(LEFTOVERS),
)
def test_every_batch_is_that_of_a_plain_loop(
    sizes: list[int], data: st.DataObject, batch_size: int, leftover: Leftover
) -> None:
    windows = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))
    expected = plain(sizes, windows, batch_size, leftover)
    order = order_of(sizes, windows, batch_size, leftover)
    assert len(order) == len(expected)
    assert order.samples == sum(len(batch) for batch in expected)
    assert [order.samples_until(number) for number in range(len(expected) + 1)] == [
        sum(map(len, expected[:number])) for number in range(len(expected) + 1)
    ]
    if len(set(windows)) == len(windows):
        for place, seam in enumerate(order.seams_S.tolist()):
            later = {window for window in windows[place + 1 :] if sizes[window]}
            inside = [{anchor // 1000 for anchor in batch} for batch in expected]
            assert not any(later & batch for batch in inside[:seam])
            assert seam == len(expected) or later & inside[seam]
    for number in reversed(range(len(expected))):
        assert order.batch(number).tolist() == expected[number]
        assert windows[order.last_window_index(number)] == expected[number][-1] // 1000


def test_leftovers_are_counted() -> None:
    sizes = [5, 0, 7, 3]
    assert order_of(sizes, leftover="drop").leftovers_S.tolist() == [1, 0, 3, 3]
    assert order_of(sizes, leftover="carry").leftovers_S.tolist() == [1, 1, 0, 3]
    assert [len(order_of(sizes, leftover=how)) for how in LEFTOVERS] == [2, 4]
    assert [order_of(sizes, leftover=how).samples for how in LEFTOVERS] == [8, 15]


def test_a_late_batch_asks_for_its_own_windows_only() -> None:
    order = order_of([10] * 50)
    touched = sorted({position // 1000 for position in order.batch(len(order) - 3).tolist()})
    assert cast(FakeIndex, order.index).lookups == touched
    assert 1 <= len(touched) <= 2
