"""Batches of histories for a GPU: page-locked where they are gathered, the same on the device."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from recperf.data.batch import HistoryBatch
from recperf.data.yambda.config import HistoryConfig, WindowConfig
from recperf.data.yambda.history import Histories
from recperf.data.yambda.loader import Loader
from recperf.data.yambda.order import StreamOrder
from recperf.data.yambda.store import EventStore, open_store
from recperf.data.yambda.synthesize import of_size, write_store
from recperf.data.yambda.windows import WindowIndex

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

HISTORY = HistoryConfig(length=60, scan=300)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> EventStore:
    return open_store(write_store(of_size(40_000), tmp_path_factory.mktemp("events") / "store"))


def tensors(batch: HistoryBatch) -> dict[str, torch.Tensor]:
    """All parts that the batch has: rates are only there where a model asks for them."""
    by_name = {"values": batch.features.values_V, "offsets": batch.features.offsets_FB1}
    others = {one.name: getattr(batch, one.name) for one in fields(batch) if one.name != "features"}
    return by_name | {name: part for name, part in others.items() if part is not None}


def test_every_part_of_a_batch_is_pinned_and_the_same(store: EventStore) -> None:
    positions = WindowIndex.open(store, WindowConfig(min_history=20)).anchors(100)[:64]
    plain = tensors(Histories(store, HISTORY).batch(positions))
    pinned = tensors(Histories(store, HISTORY, pin=True).batch(positions))
    for name, tensor in pinned.items():
        assert tensor.is_pinned(), name
        assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("workers", [1, 3])
def test_the_loader_brings_the_same_batches_to_the_gpu(store: EventStore, workers: int, tmp_path: Path) -> None:
    index = WindowIndex.open(store, WindowConfig(min_history=20), cache=tmp_path)
    order = StreamOrder(index, windows=range(100, 110), batch_size=32, leftover="carry")
    histories = Histories(store, HISTORY, pin=True)
    with Loader(order, histories, workers=workers, device="cuda") as loader:
        batches = list(loader)
    assert len(batches) == len(order)
    for number, batch in enumerate(batches):
        expected = tensors(Histories(store, HISTORY).batch(order.batch(number)))
        for name, tensor in tensors(batch).items():
            assert tensor.is_cuda, name
            assert torch.equal(tensor.cpu(), expected[name]), (number, name)
