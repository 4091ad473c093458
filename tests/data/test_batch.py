from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recperf.data.batch import ClickBatch, JaggedFeatures

BAGS = st.integers(1, 3).flatmap(
    lambda features: st.integers(0, 5).flatmap(
        lambda batch: st.lists(
            st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=batch, max_size=batch),
            min_size=features,
            max_size=features,
        )
    )
)


def as_lists(features: JaggedFeatures) -> list[list[list[int]]]:
    found = []
    for key in features.keys:
        ids, offsets = features[key]
        found.append([ids[a:b].tolist() for a, b in zip(offsets.tolist(), offsets.tolist()[1:])])
    return found


def keys(count: int) -> tuple[str, ...]:
    return tuple(f"f{i}" for i in range(count))


@given(BAGS, st.integers(0, 6), st.integers(0, 6))
def test_slice_takes_the_same_samples_of_every_feature(bags: list[list[list[int]]], start: int, stop: int) -> None:
    features = JaggedFeatures.from_bags(keys(len(bags)), bags)
    assert as_lists(features.slice(start, stop)) == [feature[start : max(start, stop)] for feature in bags]


def test_slice_of_single_ids_keeps_the_promise() -> None:
    features = JaggedFeatures.from_ids(("a", "b"), torch.arange(10).view(2, 5))
    part = features.slice(1, 4)
    assert part.one_id_a_bag
    assert as_lists(part) == [[[1], [2], [3]], [[6], [7], [8]]]


def test_layout_is_feature_major() -> None:
    features = JaggedFeatures.from_bags(("a", "b"), [[[1], [2, 3]], [[], [4]]])
    assert features.values_V.tolist() == [1, 2, 3, 4]
    assert features.offsets_FB1.tolist() == [0, 1, 3, 3, 4]


def test_uneven_bags_are_refused() -> None:
    with pytest.raises(ValueError, match="3 bags cannot be divided evenly among 2 features"):
        JaggedFeatures(("a", "b"), torch.arange(3), torch.arange(4))


def test_a_batch_counts_its_bytes_and_moves() -> None:
    batch = ClickBatch(torch.zeros(4, 2), JaggedFeatures.from_ids(("a",), torch.zeros(1, 4).long()), torch.zeros(4))
    assert batch.nbytes == 4 * 2 * 4 + (4 + 5) * 8 + 4 * 4
    assert len(batch.slice(1, 3)) == 2
    assert batch.to("meta").features.values_V.device.type == "meta"
