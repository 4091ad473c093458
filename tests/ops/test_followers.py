"""What follows items, counted in C and in numpy, has the same bits and is what a few lines of Python count."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from recperf.errors import ArgumentError
from recperf.ops.followers import Followed, native, reference

BODIES = [pytest.param(reference, id="reference"), pytest.param(native, id="native")]
ITEMS, WEIGHTS = 70_000, np.array([1.0, 0.7, 0.3])


def drawn(lengths: list[int], seed: int) -> tuple[Followed, np.ndarray]:
    """Sequences with few items, some of them far up the catalogue, and where the events of each item begin."""
    draw, events = np.random.default_rng(seed), sum(lengths)
    items_E = (draw.integers(1, 9, events) ** 5 + 1).astype(np.int32)
    after_E = np.concatenate([np.arange(length)[::-1] for length in lengths]).clip(max=9).astype(np.uint8)
    events_P = np.flatnonzero(after_E).astype(np.int32)
    offsets_I1 = np.cumsum(np.bincount(items_E[events_P], minlength=ITEMS + 1))
    return Followed(ITEMS, items_E, after_E, events_P[np.argsort(items_E[events_P], kind="stable")]), offsets_I1


@pytest.fixture(autouse=True)
def _compiled(native_code: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.parametrize("pairs", [1, 50, 1 << 20])
@pytest.mark.parametrize("body", BODIES)
def test_counts_are_those_of_plain_python_and_have_the_same_bits(body: Any, pairs: int) -> None:
    events, offsets_I1 = drawn([1, 2, 40, 3, 90, 1, 64], seed=pairs)
    for chosen in (np.unique(events.items_E), np.array([ITEMS // 2]), events.items_E[3:4], np.zeros(0, np.int64)):
        begins_R, ends_R = offsets_I1[chosen - 1], offsets_I1[chosen]
        rows_W, columns_W, sums_W = body.count(events, begins_R, ends_R, WEIGHTS, pairs=pairs)
        expected: dict[tuple[int, int], float] = defaultdict(float)
        for row, (begin, end) in enumerate(zip(begins_R, ends_R)):
            for distance, weight in enumerate(WEIGHTS.tolist(), 1):
                for event in events.events_P[begin:end].tolist():
                    if events.after_E[event] >= distance:
                        expected[row, int(events.items_E[event + distance]) - 1] += weight
        assert list(zip(rows_W.tolist(), columns_W.tolist())) == sorted(expected)
        assert sums_W.tolist() == [expected[one] for one in sorted(expected)]


def test_events_and_items_outside_are_refused() -> None:
    events, offsets_I1 = drawn([5, 5], seed=1)
    item = int(events.items_E[0])
    place = offsets_I1[item - 1 : item], offsets_I1[item : item + 1]
    for name, at, value in (("items_E", 1, ITEMS + 1), ("items_E", 1, 0), ("events_P", int(place[0][0]), 10)):
        array = getattr(events, name)
        before, array[at] = int(array[at]), value
        with pytest.raises(ArgumentError, match="outside"):
            native.count(events, *place, WEIGHTS, pairs=10)
        array[at] = before
    native.count(events, *place, WEIGHTS, pairs=10)


def test_rows_are_added_with_the_bits_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SMALL", 1)
    draw, items = torch.Generator().manual_seed(2), 50
    lengths_I = torch.randint(0, 20, (items,), generator=draw)
    offsets_I1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_I.cumsum(0)])
    columns_W = torch.cat([torch.randperm(items, generator=draw)[:length] for length in lengths_I.tolist()]).int()
    values_W, weights_L = torch.rand(len(columns_W), generator=draw), 0.7 ** torch.arange(4.0)
    history_BL = torch.randint(0, items + 1, (7, 9), generator=draw)[:, :4]
    both = [one.add_rows(offsets_I1, columns_W, values_W, history_BL, weights_L, items) for one in (native, reference)]
    assert torch.equal(*both)
    assert both[0].any()
    item, wrong_W = int(history_BL[history_BL > 0][0]), columns_W.clone()
    wrong_W[offsets_I1[item - 1] : offsets_I1[item]] = items
    if lengths_I[item - 1]:
        with pytest.raises(ArgumentError, match="counts of item"):
            native.add_rows(offsets_I1, wrong_W, values_W, history_BL, weights_L, items)
    for outside in (-1, items + 1):
        history_BL[3, 2] = outside
        with pytest.raises(ArgumentError, match="history_BL"):
            native.add_rows(offsets_I1, columns_W, values_W, history_BL, weights_L, items)
