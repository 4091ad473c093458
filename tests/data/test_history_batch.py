"""The batch of histories: parts of it, where it lies and how large it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recperf.data.batch import HistoryBatch, JaggedFeatures


def batch_of(lengths: list[int]) -> HistoryBatch:
    """Samples with so many events; every number says whose it is."""
    histories = [[100 * sample + event for event in range(length)] for sample, length in enumerate(lengths)]
    flat = [number for history in histories for number in history]
    users = [[sample] for sample in range(len(lengths))]
    bags = JaggedFeatures.from_bags(("uid", "item_id", "candidate"), [users, histories, users])
    features = JaggedFeatures(bags.keys, bags.values_V.int(), bags.offsets_FB1)
    return HistoryBatch(
        features,
        torch.tensor([0, *lengths]).cumsum(0),
        torch.tensor(flat, dtype=torch.int64).remainder(5).to(torch.uint8),
        torch.tensor(flat, dtype=torch.int64),
        torch.arange(len(lengths)),
        torch.arange(len(lengths)).float(),
    )


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 7), st.integers(0, 7))
def test_a_slice_holds_its_samples_and_no_others(lengths: list[int], start: int, stop: int) -> None:
    part = batch_of(lengths).slice(start, stop)
    which = list(range(len(lengths)))[start:stop]
    expected = [[100 * sample + event for event in range(lengths[sample])] for sample in which]
    flat = [number for history in expected for number in history]
    offsets = part.history_offsets_B1.tolist()
    assert len(part) == len(which)
    assert offsets[0] == 0
    assert [part.times_T[a:b].tolist() for a, b in zip(offsets, offsets[1:])] == expected
    assert part.actions_T.tolist() == [number % 5 for number in flat]
    assert part.query_times_B.tolist() == part.labels_B.tolist() == which
    assert part.features["item_id"][0].tolist() == flat
    assert part.features["item_id"][1].tolist() == offsets
    assert part.features["uid"][0].tolist() == part.features["candidate"][0].tolist() == which
    assert part.features.values_V.dtype == torch.int32


def test_every_byte_is_counted() -> None:
    batch = batch_of([2, 0, 3])
    ids, bags = 3 + 5 + 3, 9
    assert batch.nbytes == ids * 4 + (bags + 1) * 8 + 4 * 8 + 5 * 1 + 5 * 8 + 3 * 8 + 3 * 4


def test_every_part_moves_and_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, pinned = batch_of([1, 2]), []
    moved = batch.to("meta", non_blocking=True)
    tensors = [moved.history_offsets_B1, moved.actions_T, moved.times_T, moved.query_times_B, moved.labels_B]
    tensors += [moved.features.values_V, moved.features.offsets_FB1]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    # Torch refuses to pin where there is no GPU.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    batch.pin_memory()
    assert len(pinned) == len(tensors)
