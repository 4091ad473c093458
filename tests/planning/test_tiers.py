"""Tables in tiers: the share that a cache serves, and what limits a step."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from recperf.planning import tiers
from recperf.planning.devices import KNOWN
from recperf.planning.predict import Prediction, predict
from recperf.workloads import find


def test_the_estimated_share_is_that_of_a_counted_log() -> None:
    """Of ids drawn by a power law, in a cache that drops the least recently used rows, once it is full."""
    rows, ids, steps = 20_000, 800, 400
    share_K = np.arange(1.0, rows + 1) ** -0.8
    share_K /= share_K.sum()
    generator = np.random.default_rng(5)
    drawn = (generator.choice(rows, ids, p=share_K) for _ in range(steps))
    # Shuffled: popular rows have low numbers.
    batches = [generator.permutation(np.unique(batch)).tolist() for batch in drawn]
    use_K = -np.expm1(ids * np.log1p(-share_K))
    for slots in (2_048, 8_192):
        cache: OrderedDict[int, None] = OrderedDict()
        served = []
        for batch in batches:
            served.append(sum(row in cache for row in batch) / len(batch))
            for row in batch:
                cache[row] = None
                cache.move_to_end(row)
            while len(cache) > slots:
                cache.popitem(last=False)
        counted = float(np.mean(served[steps // 2 :]))
        assert tiers.served_by(np.ones(rows), use_K, slots) == pytest.approx(counted, abs=0.01)
    assert tiers.served_by(np.ones(rows), use_K, rows) == 1.0


@pytest.fixture(scope="module")
def published() -> Prediction:
    workload = find("dlrm-v4")
    return predict(workload.planned(workload.presets["mlperf"]()), 1, KNOWN["h200"])


def test_a_step_takes_as_long_as_the_slowest_of_device_link_and_store(published: Prediction) -> None:
    device, step = KNOWN["h200"], published.step
    priced = tiers.price(published, device, served=0.9)
    assert priced.table_bytes == 4 * 513 * sum(table.rows for table in published.work.tables)
    host, file = priced.stores["host"], priced.stores["file"]
    assert host.limit == "the device"
    assert (host.step.value, host.step.low, host.step.high) == (step.value, step.low, step.high)
    assert host.bytes_each_way == pytest.approx(0.1 * priced.rows_per_step * 4 * 513)
    slow = tiers.price(published, replace(device, host_bytes_per_s=1e7), served=0.9).stores["host"]
    assert (slow.limit, slow.step.low) == ("the link", slow.bytes_each_way / 1e7)
    none = tiers.price(published, device, served=0.0).stores["file"]
    assert none.limit == "the disk"
    assert none.step.value > file.step.value


def test_each_of_four_ranks_has_a_quarter_of_the_rows_and_they_share_the_host(published: Prediction) -> None:
    """Four ranks with a quarter of the batch each touch the rows of the whole batch together."""
    workload, device = find("dlrm-v4"), KNOWN["h200"]
    four = predict(workload.planned(workload.presets["mlperf"]()), 4, device)
    assert four.global_batch == published.global_batch
    one, each = tiers.price(published, device, served=0.5), tiers.price(four, device, served=0.5, node_ranks=4)
    assert each.table_bytes == pytest.approx(one.table_bytes / 4, rel=1e-3)
    assert each.rows_per_step == pytest.approx(one.rows_per_step / 4, rel=1e-3)
    for name, store in each.stores.items():
        parts, alone = store.parts, one.stores[name].parts
        assert parts["the link"] == pytest.approx(alone["the link"] / 4, rel=1e-3)
        assert [*parts.values()][2] == pytest.approx([*alone.values()][2], rel=1e-3)
