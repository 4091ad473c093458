from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from recperf.data.batch import ClickBatch
from recperf.data.click_store.order import ClickOrder
from recperf.data.criteo import synthesize
from recperf.data.criteo.config import KEYS, CriteoConfig
from recperf.data.criteo.store import CriteoStore
from recperf.data.order import RankPart


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CriteoStore:
    folder = tmp_path_factory.mktemp("days")
    for day, count in enumerate((130, 200, 90)):
        synthesize.write(folder / f"day_{day}", lines=count, day=day)
    return CriteoStore.open(CriteoConfig(path=folder, cache=folder / "cache", rows=(1 << 20,)))


def order(store: CriteoStore, **more: object) -> ClickOrder:
    settings = {"batch_size": 32, "seed": 5, "block_rows": 16, "group_blocks": 4, **more}
    return ClickOrder(store=store, **settings)  # type: ignore[arg-type]


def rows_of(batch: ClickBatch) -> list[bytes]:
    """Each sample as bytes that tell it from every other."""
    ids = batch.features.values_V.view(len(KEYS), -1).t().to(torch.int32).contiguous().numpy()
    dense = batch.dense_BD.numpy()
    return [d.tobytes() + i.tobytes() + bytes([int(y)]) for d, i, y in zip(dense, ids, batch.labels_B)]


def stored(store: CriteoStore, first: int, last: int) -> list[bytes]:
    rows = store.read(first, last)
    return [d.tobytes() + i.tobytes() + bytes([y]) for d, i, y in zip(rows.dense_ND, rows.ids_NS, rows.labels_N)]


@pytest.mark.parametrize(("batch", "block", "group"), [(32, 16, 4), (7, 16, 4), (500, 16, 2), (1, 1, 1), (64, 1000, 3)])
def test_an_epoch_has_every_row_once(store: CriteoStore, batch: int, block: int, group: int) -> None:
    made = order(store, batch_size=batch, block_rows=block, group_blocks=group)
    batches = list(made.batches(0))
    assert len(batches) == len(made)
    assert {len(one) for one in batches[:-1]} <= {batch}
    seen = [row for one in batches for row in rows_of(one)]
    assert sorted(seen) == sorted(stored(store, 0, 330))
    assert seen != stored(store, 0, 330)


def test_an_epoch_can_be_entered_at_any_batch(store: CriteoStore) -> None:
    made = order(store)
    whole = [rows_of(batch) for batch in made.batches(2)]
    for start in range(len(made) + 2):
        assert [rows_of(batch) for batch in made.batches(2, start)] == whole[start:]


def test_parts_have_the_rows_of_the_whole_batch(store: CriteoStore) -> None:
    """Training rows lie in two files, which single rows are read from."""
    whole = [rows_of(batch) for batch in order(store).batches(2, 1)]
    parts = [[rows_of(batch) for batch in order(store, part=RankPart(rank, 3)).batches(2, 1)] for rank in range(3)]
    for number, rows in enumerate(whole):
        assert [part[number] for part in parts] == [rows[rank::3] for rank in range(3)]


def test_a_part_may_have_no_row_of_the_last_group(tmp_path: Path) -> None:
    """65 rows in groups of 8: the last group has one row, which one of four ranks reads."""
    for day, count in enumerate((65, 20)):
        synthesize.write(tmp_path / f"day_{day}", lines=count, day=day)
    made = CriteoStore.open(CriteoConfig(path=tmp_path, cache=tmp_path / "cache", rows=(1 << 20,)))
    sizes = {"batch_size": 10, "block_rows": 8, "group_blocks": 1}
    whole = [rows_of(batch) for batch in order(made, **sizes).batches(0)]
    for rank in range(4):
        part = [rows_of(batch) for batch in order(made, **sizes, part=RankPart(rank, 4)).batches(0)]
        assert part == [rows[rank::4] for rows in whole]
    nothing, one = (made.take("train", np.arange(count)) for count in (0, 1))
    for empty, column in zip(vars(nothing).values(), vars(one).values()):
        assert (len(empty), empty.dtype, empty.shape[1:]) == (0, column.dtype, column.shape[1:])


def test_order_depends_on_seed_and_epoch_only(store: CriteoStore) -> None:
    first = [rows_of(batch) for batch in order(store).batches(1)]
    torch.manual_seed(99)
    assert [rows_of(batch) for batch in order(store).batches(1)] == first
    assert [rows_of(batch) for batch in order(store).batches(0)] != first
    assert [rows_of(batch) for batch in order(store, seed=6).batches(1)] != first


def test_rows_of_one_group_come_from_few_blocks(store: CriteoStore) -> None:
    place = {row: number for number, row in enumerate(stored(store, 0, 330))}
    first = [place[row] for batch in list(order(store).batches(0))[:2] for row in rows_of(batch)]
    assert len({number // 16 for number in first}) == 4
    assert first != sorted(first)
    neighbours = np.abs(np.diff(first)) == 1
    assert neighbours.mean() < 0.2


@pytest.mark.parametrize("batch", [32, 7, 500])
def test_validation_rows_come_in_their_order(store: CriteoStore, batch: int) -> None:
    made = order(store, split="valid", batch_size=batch)
    assert len(made) == -(-90 // batch)
    whole = [row for one in made.cut() for row in rows_of(one)]
    assert whole == stored(store, 330, 420)
    assert [row for one in made.cut(start=1) for row in rows_of(one)] == whole[batch:]
    labels = torch.cat([one.labels_B for one in made.cut()])
    assert torch.equal(labels, torch.from_numpy(store.read(*store.bounds("valid")).labels_N).float())


def test_batches_are_what_models_read(store: CriteoStore) -> None:
    batch = next(order(store).batches(0))
    assert batch.dense_BD.shape == (32, 13)
    assert (batch.dense_BD.dtype, batch.labels_B.dtype) == (torch.float32, torch.float32)
    assert batch.features.keys == KEYS
    assert batch.features.values_V.dtype == torch.int64
    assert batch.features.one_id_a_bag
    assert torch.equal(batch.features.offsets_FB1, torch.arange(26 * 32 + 1))
    ids, offsets = batch.features["c3"]
    assert torch.equal(offsets, torch.arange(33))
    assert rows_of(batch)[0][13 * 4 :][2 * 4 : 3 * 4] == int(ids[0]).to_bytes(4, "little")


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    synthesize.write(tmp_path / "train.txt", lines=12_000)
    store = CriteoStore.open(CriteoConfig(path=tmp_path, cache=tmp_path / "cache"))
    made = order(store, block_rows=64, group_blocks=8)
    group = 512 * 157
    for iterate in (lambda: made.batches(0), made.cut):
        tracemalloc.start()
        assert sum(len(batch) for batch in iterate()) == made.rows > 20 * 512
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5 * group


def test_order_is_pinned(tmp_path: Path) -> None:
    """A change of the order changes every training on a log: it must be meant."""
    synthesize.write(tmp_path / "train.txt", lines=40)
    store = CriteoStore.open(CriteoConfig(path=tmp_path, cache=tmp_path / "cache", rows=(1 << 30,), holdout=0.25))
    place = {row: number for number, row in enumerate(stored(store, 0, 40))}
    made = order(store, batch_size=10, block_rows=4, group_blocks=2)
    first = [place[row] for row in rows_of(next(made.batches(0)))]
    assert first == [8, 23, 10, 21, 9, 20, 11, 22, 13, 27]
