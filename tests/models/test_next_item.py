"""The softmax loss of the next-item model, and its gradients, against plain torch; and of a padded batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from recperf.data.next_item import NextItemData
from recperf.data.next_item_batches import EventsOnDevice, SequenceOrder, WindowBatch
from recperf.models.next_item import softmax
from recperf.models.next_item.config import NextItemConfig, step
from recperf.models.next_item.model import NextItemModel
from recperf.workloads.next_item import steps as hstu_batches
from recperf.workloads.next_item.steps import WindowFeed, WindowOrder

TEMPERATURE = 0.05


@pytest.mark.parametrize("loss", ["full", "blocks", "sampled"])
def test_loss_and_gradients_are_those_of_cross_entropy(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are scored in several parts; some drawn items are the target, which must not count twice."""
    monkeypatch.setitem(softmax.SCORES, "cpu", 100)
    if loss == "blocks":
        monkeypatch.setattr(softmax, "CHUNK", 100)
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=1)  # noqa: E731
    users_TD, items_ID = draw(37, 8).requires_grad_(), draw(19, 8).requires_grad_()
    targets_T = torch.randint(19, (37,), generator=generator)
    if loss != "sampled":
        scores = users_TD @ items_ID.T / TEMPERATURE
        ours = softmax.full_loss(users_TD, items_ID, targets_T, TEMPERATURE)
        expected = F.cross_entropy(scores, targets_T)
    else:
        drawn_K = torch.randint(19, (11,), generator=generator)
        same_TK = targets_T[:, None] == drawn_K
        assert same_TK.any()
        ours = softmax.sampled_loss(users_TD, items_ID[targets_T], items_ID[drawn_K], same_TK, TEMPERATURE)
        own = (users_TD * items_ID[targets_T]).sum(1, keepdim=True)
        drawn = (users_TD @ items_ID[drawn_K].T).masked_fill(same_TK, -torch.inf)
        zeros = torch.zeros(37, dtype=torch.int64)
        expected = F.cross_entropy(torch.cat([own, drawn], 1) / TEMPERATURE, zeros)
    gradients = torch.autograd.grad(ours * 3, [users_TD, items_ID])
    theirs = torch.autograd.grad(expected * 3, [users_TD, items_ID])
    torch.testing.assert_close([ours, *gradients], [expected, *theirs])


def test_the_work_of_the_full_loss_is_three_products_wherever_they_are_computed() -> None:
    config = NextItemConfig(items=1000, dim=8, blocks=1, heads=1, head_dim=8)
    for tokens, in_forward in ((1000, 6), (2000, 4)):
        full, drawn = (step(replace(config, loss=loss), tokens, 10, 10) for loss in ("full", "sampled"))  # type: ignore[arg-type]
        assert full["softmax"].flops == in_forward * tokens * 1000 * 8
        assert full["backward"].flops - drawn["backward"].flops == (6 - in_forward) * tokens * 1000 * 8
    kernel, drawn = (step(replace(config, loss=loss), 1000, 10, 10, gpu=True, low=True) for loss in ("full", "sampled"))  # type: ignore[arg-type]
    assert kernel["softmax"].flops == kernel["backward"].flops - drawn["backward"].flops == 4 * 1000 * 1000 * 8


@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_what_fills_a_batch_changes_neither_loss_nor_gradients(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph needs batches of one shape; those that do not fit are passed on as they are."""
    monkeypatch.setattr(hstu_batches, "MULTIPLE", 1)
    users, items, length, size, draw = 50, 40, 12, 16, np.random.default_rng(4)
    offsets_U1 = np.concatenate([[0], np.cumsum(draw.integers(5, 20, users))])
    data = NextItemData(
        name="drawn", items=items, users=users, offsets_U1=offsets_U1, times_E=np.arange(offsets_U1[-1]) * 7,
        items_E=draw.integers(1, items + 1, offsets_U1[-1], np.int32),
    )  # fmt: skip
    events, device = EventsOnDevice(data, torch.device("cpu")), torch.device("cpu")
    order = SequenceOrder.of(data, events, length=length, batch_size=size, seed=5, all_windows=False)
    config = NextItemConfig(
        items=items, dim=8, blocks=2, heads=2, head_dim=4, max_length=length, dropout=0.0, loss=loss, negatives=9,
        time_buckets=6,
    )  # fmt: skip
    model, feed, windows = (
        NextItemModel(config, seed=1, device=device),
        WindowFeed(order),
        WindowOrder(order).batches(2),
    )
    for expected in order.batches(2):
        uneven = feed.load(windows)
        if len(expected) < size:
            assert uneven is not None
            assert uneven.items_T.tolist() == expected.items_T.tolist()
            break
        assert uneven is None
        feed.draw()
        assert len(feed.batch) == size
        assert len(feed.batch.items_T) == feed.positions > len(expected.items_T)
        assert int(feed.batch.positions_T.max()) < feed.batch.longest
        both = []
        for batch in (expected, feed.batch):
            torch.manual_seed(3)
            model.forget_gradients()
            value = model.loss(batch)
            value.backward()
            both.append([value.detach(), *(parameter.grad for parameter in model.parameters())])
        for theirs, ours in zip(*both):
            assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm()) > 0
    longest = order.begins_S[order.lengths_S.argmax()].expand(size)
    crowded = WindowBatch(events, longest, torch.full((size,), feed.longest))
    assert len(feed.load(iter([crowded])).items_T) == size * length > feed.positions
