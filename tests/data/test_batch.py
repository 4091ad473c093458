from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from recperf.data.batch import ClickBatch, HistoryBatch, JaggedFeatures

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


def test_a_batch_counts_its_bytes_and_moves() -> None:
    batch = ClickBatch(torch.zeros(4, 2), JaggedFeatures.from_ids(("a",), torch.zeros(1, 4).long()), torch.zeros(4))
    assert batch.nbytes == 4 * 2 * 4 + (4 + 5) * 8 + 4 * 4
    assert (len(batch.slice(1, 3)), batch.slice(1, 3).features.one_id_a_bag) == (2, True)
    assert batch.to("meta").features.values_V.device.type == "meta"
    histories = batch_of([2, 0, 3])
    ids, bags = 3 + 5 + 3, 9
    assert histories.nbytes == ids * 4 + (bags + 1) * 8 + 4 * 8 + 5 * 1 + 5 * 8 + 3 * 8 + 3 * 4


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
