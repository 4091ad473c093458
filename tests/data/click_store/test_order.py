"""Batches of stored click rows: every row once, in an order that depends on (seed, epoch, position) only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recperf.data.batch import ClickBatch
from recperf.data.click_store.columns import Rows, Split
from recperf.data.click_store.order import ClickOrder


class Numbered:
    """Rows whose first number is their position; validation rows come after the training rows."""

    keys, slots = ("a", "b", "c"), (1, 1, 1)

    def __init__(self, train: int = 330, valid: int = 90) -> None:
        self.sizes = {"train": train, "valid": valid}

    def count(self, split: Split) -> int:
        return self.sizes[split]

    def take(self, split: Split, places: NDArray[np.int64]) -> Rows:
        rows_N = places + (self.sizes["train"] if split == "valid" else 0)
        ids_NS = np.stack([rows_N, rows_N % 7, rows_N % 5], 1).astype(np.int32)
        return Rows(np.stack([rows_N, -rows_N], 1).astype(np.float32), ids_NS, (rows_N % 2).astype(np.uint8))

    def rows_of(self, split: Split, first: int, last: int) -> Rows:
        return self.take(split, np.arange(first, last))


def order(store: Numbered, **more: object) -> ClickOrder:
    settings = {"batch_size": 32, "seed": 5, "block_rows": 16, "group_blocks": 4, **more}
    return ClickOrder(store=store, **settings)  # type: ignore[arg-type]


def rows_of(batch: ClickBatch) -> list[int]:
    rows = batch.dense_BD[:, 0].to(torch.int64)
    assert torch.equal(batch.features["a"][0], rows)
    assert torch.equal(batch.features["c"][0], rows % 5)
    assert torch.equal(batch.labels_B, (rows % 2).float())
    return [int(row) for row in rows]


@pytest.mark.parametrize(("batch", "block", "group"), [(32, 16, 4), (7, 16, 4), (500, 16, 2), (1, 1, 1), (64, 1000, 3)])
def test_an_epoch_has_every_row_once(batch: int, block: int, group: int) -> None:
    made = order(Numbered(), batch_size=batch, block_rows=block, group_blocks=group)
    batches = list(made.batches(0))
    assert len(batches) == len(made)
    assert {len(one) for one in batches[:-1]} <= {batch}
    seen = [row for one in batches for row in rows_of(one)]
    assert sorted(seen) == list(range(330)) != seen


def test_an_epoch_can_be_entered_at_any_batch() -> None:
    made = order(Numbered())
    whole = [rows_of(batch) for batch in made.batches(2)]
    for start in range(len(made) + 2):
        assert [rows_of(batch) for batch in made.batches(2, start)] == whole[start:]
    assert [rows_of(batch) for batch in made.batches(1)] != whole
    assert [rows_of(batch) for batch in order(Numbered(), seed=6).batches(2)] != whole


@pytest.mark.parametrize("batch", [32, 7, 500])
def test_validation_rows_come_in_their_order(batch: int) -> None:
    made = order(Numbered(), split="valid", batch_size=batch)
    assert len(made) == -(-90 // batch)
    assert [row for one in made.cut() for row in rows_of(one)] == list(range(330, 420))
    assert [row for one in made.cut(start=1) for row in rows_of(one)] == list(range(330 + batch, 420))


def test_order_is_pinned() -> None:
    """A change of the order changes every training on imported clicks: it must be meant."""
    made = order(Numbered(30), batch_size=10, block_rows=4, group_blocks=2)
    assert rows_of(next(made.batches(0))) == [8, 23, 10, 21, 9, 20, 11, 22, 13, 27]
