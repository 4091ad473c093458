from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recperf.data.batch import ClickBatch
from recperf.data.config import RandomBagsConfig
from recperf.data.order import WHOLE, ClickOrder, RankShare, Samples, ShuffledOrder, cut_share, permutation
from recperf.data.random_bags import RandomBags
from recperf.data.tables import EMPTY, Rows, Split


def samples(count: int) -> Samples:
    ids = torch.arange(count)
    return Samples(
        keys=("a", "b"), dense_ND=ids[:, None].float(), ids_FN=torch.stack([ids, ids + 1000]), labels_N=ids.float()
    )


def test_every_sample_once_and_its_parts_stay_together() -> None:
    order = ShuffledOrder(samples=samples(23), batch_size=5, seed=1)
    batches = list(order.batches(0))
    assert len(batches) == len(order) == 5
    assert sorted(int(label) for batch in batches for label in batch.labels_B) == list(range(23))
    for batch in batches:
        assert torch.equal(batch.dense_BD[:, 0], batch.labels_B)
        for shift, key in ((0, "a"), (1000, "b")):
            assert torch.equal(batch.features[key][0], batch.labels_B.long() + shift)


def test_permutation_is_pinned() -> None:
    assert permutation(8, 42, 0).tolist() == [2, 6, 3, 7, 5, 1, 4, 0]
    assert permutation(8, 42, 1).tolist() == [3, 2, 4, 1, 0, 6, 7, 5]
    assert sorted(permutation(1000, 42, 1).tolist()) == list(range(1000))


class Store:
    """Rows with one or two ids of the second feature, each row's values made of its number."""

    keys, slots = ("a", "b"), (1, 2)

    def __init__(self, rows: int = 100) -> None:
        self.rows = rows

    def count(self, split: Split) -> int:
        return self.rows

    def rows_of(self, split: Split, first: int, last: int) -> Rows:
        return self.take(split, np.arange(first, min(last, self.rows)))

    def take(self, split: Split, places: NDArray[np.int64]) -> Rows:
        second = np.where(places % 3, places + 1000, EMPTY)
        ids_NS = np.stack([places, places + 500, second], 1).astype(np.int32)
        return Rows(places[:, None].astype(np.float32), ids_NS, (places % 2).astype(np.uint8))


def stored(**more: Any) -> ClickOrder:
    settings = {"batch_size": 32, "seed": 5, "block_rows": 16, "group_blocks": 4, **more}
    return ClickOrder(store=Store(settings.pop("rows", 330)), **settings)


def rows_in(batch: ClickBatch) -> list[int]:
    rows = batch.dense_BD[:, 0].to(torch.int64)
    assert torch.equal(batch.features["a"][0], rows)
    assert torch.equal(batch.labels_B, (rows % 2).float())
    return [int(row) for row in rows]


@pytest.mark.parametrize(("batch", "block", "group"), [(32, 16, 4), (7, 16, 4), (500, 16, 2), (1, 1, 1), (64, 1000, 3)])
def test_an_epoch_has_every_row_once(batch: int, block: int, group: int) -> None:
    made = stored(batch_size=batch, block_rows=block, group_blocks=group)
    batches = list(made.batches(0))
    assert len(batches) == len(made)
    assert {len(one) for one in batches[:-1]} <= {batch}
    seen = [row for one in batches for row in rows_in(one)]
    assert sorted(seen) == list(range(330)) != seen


def test_an_epoch_can_be_entered_at_any_batch() -> None:
    made = stored()
    whole = [rows_in(batch) for batch in made.batches(2)]
    for start in range(len(made) + 2):
        assert [rows_in(batch) for batch in made.batches(2, start)] == whole[start:]
    assert [rows_in(batch) for batch in made.batches(1)] != whole
    assert [rows_in(batch) for batch in stored(seed=6).batches(2)] != whole


def test_validation_rows_come_in_their_order() -> None:
    made = stored(split="valid", batch_size=7)
    assert [row for one in made.cut() for row in rows_in(one)] == list(range(330))
    assert [row for one in made.cut(start=1) for row in rows_in(one)] == list(range(7, 330))


def test_order_is_pinned() -> None:
    """A change of the order changes every training on imported clicks: it must be meant."""
    made = stored(rows=30, batch_size=10, block_rows=4, group_blocks=2)
    assert rows_in(next(made.batches(0))) == [8, 23, 10, 21, 9, 20, 11, 22, 13, 27]


def orders() -> dict[str, Any]:
    ids_FN = torch.arange(200).view(2, 100)
    samples = Samples(keys=("a", "b"), dense_ND=torch.rand(100, 3), ids_FN=ids_FN, labels_N=torch.rand(100))
    in_blocks = stored(rows=100, batch_size=14, block_rows=8, group_blocks=3)
    shuffled = ShuffledOrder(samples=samples, batch_size=14, seed=5)
    config = RandomBagsConfig(batches=8)
    drawn = RandomBags(keys=("a", "b"), rows=(9, 50), dense=2, batch_size=14, seed=5, config=config)
    return {
        "stored": lambda part=WHOLE: in_blocks.share(part).batches(1, 2),
        "stored, in turn": lambda part=WHOLE: in_blocks.share(part).cut(1),
        "shuffled": lambda part=WHOLE: shuffled.share(part).batches(1, 2),
        "in turn": lambda part=WHOLE: cut_share(samples, 14, part, 3),
        "drawn": lambda part=WHOLE: drawn.share(part).batches(1, 2),
        "held out": lambda part=WHOLE: drawn.share(part).held_out(2),
    }


@pytest.mark.parametrize("ranks", [2, 3, 20])
@pytest.mark.parametrize("name", orders())
def test_parts_have_the_bits_of_the_whole_batch(name: str, ranks: int) -> None:
    """The last batch has 2 samples, which is fewer than ranks; batches span groups of stored blocks."""
    make = orders()[name]
    whole = list(make())
    for rank in range(ranks):
        made = list(make(RankShare(rank, ranks)))
        assert len(made) == len(whole)
        for batch, part in zip(whole, made):
            these = list(range(rank, len(batch), ranks)) or [0]
            assert torch.equal(part.dense_BD, batch.dense_BD[these])
            assert torch.equal(part.labels_B, batch.labels_B[these])
            for key in batch.features.keys:
                (ids, edges), (own, own_edges) = batch.features[key], part.features[key]
                expected = [ids[edges[sample] : edges[sample + 1]].tolist() for sample in these]
                assert [own[first:last].tolist() for first, last in zip(own_edges, own_edges[1:])] == expected
