"""The made-up logs of benchmarks/large_log.py have the sizes that they state, and order says what comes next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq
import pytest


@pytest.mark.parametrize("name", ["ml-20m", "shop"])
def test_a_log_has_its_sizes_in_the_order_of_time(
    name: str, script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    module = script("_large_log")
    size = module.LOGS[name].scaled(0.002)
    facts = module.write(tmp_path / "log.parquet", size, 1)
    log = pq.read_table(tmp_path / "log.parquet").to_pydict()
    users_E, items_E = np.array(log["user"]), np.array(log["item"])
    assert log["time"] == sorted(log["time"])
    assert len(users_E) == facts["events"] == pytest.approx(size.events, rel=0.1 if size.repeats else 0.5)
    lengths_U, counts_I = np.bincount(users_E)[1:], np.bincount(items_E)[1:]
    assert (len(lengths_U), len(counts_I)) == (size.users, size.items)
    assert lengths_U.min() >= 1
    assert np.median(lengths_U) == pytest.approx(size.median, rel=0.2)
    assert counts_I.min() >= 1
    distinct = len(np.unique(users_E * (size.items + 1) + items_E)) / len(users_E)
    assert (distinct < 0.9) if size.repeats else (distinct > 0.99)
