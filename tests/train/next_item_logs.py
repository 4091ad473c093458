"""Sequences of a few items as the data of next-item models."""

from __future__ import annotations

import numpy as np

from recperf.data.next_item import NextItemData

SEQUENCES = [[1, 2, 3, 4], [2, 3, 1, 5, 4], [5, 1, 2, 3, 1], [3, 4], [4, 1, 2, 5]]


def data_of(sequences: list[list[int]], times: bool = False) -> NextItemData:
    lengths = [len(one) for one in sequences]
    items_E = np.concatenate([np.array(one, np.int32) for one in sequences])
    return NextItemData(
        name="test",
        items=int(items_E.max()),
        users=len(sequences),
        offsets_U1=np.concatenate([[0], np.cumsum(lengths)]),
        items_E=items_E,
        times_E=np.concatenate([100 * np.arange(length) for length in lengths]) if times else None,
    )
