from __future__ import annotations

import torch

from recperf.data.order import Samples, ShuffledOrder, cut, permutation


def samples(count: int) -> Samples:
    ids = torch.arange(count)
    return Samples(
        keys=("a", "b"), dense_ND=ids[:, None].float(), ids_FN=torch.stack([ids, ids + 1000]), labels_N=ids.float()
    )


def rows(order: ShuffledOrder, epoch: int, start: int = 0) -> list[list[int]]:
    return [batch.labels_B.int().tolist() for batch in order.batches(epoch, start)]


def test_every_sample_once_and_its_parts_stay_together() -> None:
    order = ShuffledOrder(samples=samples(23), batch_size=5, seed=1)
    batches = list(order.batches(0))
    assert len(batches) == len(order) == 5
    assert sorted(int(label) for batch in batches for label in batch.labels_B) == list(range(23))
    for batch in batches:
        assert torch.equal(batch.dense_BD[:, 0], batch.labels_B)
        for shift, key in ((0, "a"), (1000, "b")):
            assert torch.equal(batch.features[key][0], batch.labels_B.long() + shift)


def test_order_depends_on_seed_and_epoch_only() -> None:
    order = ShuffledOrder(samples=samples(50), batch_size=8, seed=3)
    first = rows(order, 2)
    torch.manual_seed(99)
    torch.rand(7)
    assert rows(ShuffledOrder(samples=samples(50), batch_size=8, seed=3), 2) == first
    assert rows(order, 1) != first
    assert rows(ShuffledOrder(samples=samples(50), batch_size=8, seed=4), 2) != first


def test_an_epoch_can_be_entered_at_any_batch() -> None:
    order = ShuffledOrder(samples=samples(23), batch_size=5, seed=1)
    whole = rows(order, 0)
    for start in range(len(whole) + 1):
        assert rows(order, 0, start) == whole[start:]


def test_permutation_is_pinned() -> None:
    assert permutation(8, 42, 0).tolist() == [2, 6, 3, 7, 5, 1, 4, 0]
    assert permutation(8, 42, 1).tolist() == [3, 2, 4, 1, 0, 6, 7, 5]
    assert sorted(permutation(1000, 42, 1).tolist()) == list(range(1000))


def test_full_batches_are_views() -> None:
    data = samples(16)
    batch = next(cut(data, 8))
    assert batch.dense_BD.data_ptr() == data.dense_ND.data_ptr()
