"""Streams of batches equal a plain list of all anchors that is cut into batches."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recperf.data.yambda.config import Leftover
from recperf.data.yambda.order import StreamOrder
from recperf.data.yambda.windows import WindowIndex

LEFTOVERS: tuple[Leftover, ...] = ("drop", "carry")


class FakeIndex:
    """Windows of given sizes whose anchors are numbered through, and a list of those that were asked for."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.windows = sizes, len(sizes)
        self.lookups: list[int] = []

    def counts(self, users: str) -> NDArray[np.int64]:
        return np.array(self.sizes, np.int64)

    def order(self, window: int, users: str) -> NDArray[np.int64]:
        self.lookups.append(window)
        return np.arange(self.sizes[window]) + 1000 * window


def stream(sizes: list[int], windows: Any = None, **how: Any) -> tuple[StreamOrder, FakeIndex]:
    index = FakeIndex(sizes)
    windows = range(len(sizes)) if windows is None else windows
    return StreamOrder(cast(WindowIndex, index), windows=windows, **how), index


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
    order, _ = stream(sizes, windows, batch_size=batch_size, leftover=leftover)
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
        place = order.last_place(number)
        assert windows[place] == expected[number][-1] // 1000
        # The next window any batch needs is where the first later batch with another window's anchors is.
        later = [anchor // 1000 for batch in expected[number:] for anchor in batch]
        upcoming = order.next_place(place)
        if len(set(windows)) == len(windows):
            rest = later[later.index(windows[place]) :]
            others = [window for window in rest if windows.index(window) > place]
            assert (None if upcoming is None else windows[upcoming]) == (others[0] if others else None)


def test_leftovers_are_counted() -> None:
    sizes = [5, 0, 7, 3]
    assert stream(sizes, batch_size=4, leftover="drop")[0].leftovers_S.tolist() == [1, 0, 3, 3]
    assert stream(sizes, batch_size=4, leftover="carry")[0].leftovers_S.tolist() == [1, 1, 0, 3]
    assert [len(stream(sizes, batch_size=4, leftover=how)[0]) for how in LEFTOVERS] == [2, 4]
    assert [stream(sizes, batch_size=4, leftover=how)[0].samples for how in LEFTOVERS] == [8, 15]


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_a_late_batch_asks_for_its_own_windows_only(leftover: Leftover) -> None:
    order, index = stream([10] * 50, batch_size=4, leftover=leftover)
    assert index.lookups == []
    number = len(order) - 3
    touched = sorted({position // 1000 for position in order.batch(number).tolist()})
    assert index.lookups == touched
    assert 1 <= len(touched) <= 2
