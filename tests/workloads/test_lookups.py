"""The rows that a workload reads without a model are those that its training looks up."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from recperf.errors import ConfigError
from recperf.execution.tables import Lookups
from recperf.execution.workload import load
from recperf.workloads import find


def small(name: str) -> Any:
    workload = find(name)
    config = next(iter(workload.presets.values()))()
    if name == "dlrm-v4":
        data = replace(config.data, events=8_000, windows=replace(config.data.windows, min_history=5))
        return replace(config, data=data, train=replace(config.train, graph="off"))
    if name == "micro-dlrm-dram":
        data = replace(config.data, ids="zipf", ids_per_bag=3, batches=4)
        return replace(config, data=data, model=replace(config.model, rows=900, dim=16))
    data = replace(config.data, ids_per_bag=5, batches=4, distinct=False)
    model = replace(config.model, rows=(50, 7, 300), dim=8, bottom=(6, 8), top=(8, 1))
    train = replace(config.train, batch_size=64, optimizer="rowwise-adagrad")
    return replace(config, data=data, model=model, train=replace(train, device="cpu"))


@pytest.mark.parametrize("name", ["dlrm-v4", "dlrm", "micro-dlrm-dram"])
def test_lookups_are_the_rows_of_the_training_batches(name: str) -> None:
    workload, config = find(name), small(name)
    assert workload.lookups is not None
    lookups: Lookups = load(workload.lookups)(config)
    trial = workload.prepare(config).trial(config.seed)
    assert list(lookups.tables.items()) == trial.tables()
    assert lookups.steps == trial.recipe.steps
    pairs = list(islice(zip(lookups.rows(), trial.recipe.order.batches(0)), 3))
    assert len(pairs) == 3
    starts = np.cumsum([0, *lookups.tables.values()])
    for tables, batch in pairs:
        rows_N = np.concatenate([start + rows for start, rows in zip(starts, tables)])
        assert np.array_equal(np.unique(rows_N), np.unique(trial.rows_of(batch).numpy()))


def test_an_optimizer_that_changes_all_rows_is_refused() -> None:
    config = small("dlrm")
    with pytest.raises(ConfigError, match="adamw changes every row"):
        load("recperf.workloads.dlrm.data:lookups")(replace(config, train=replace(config.train, optimizer="adamw")))
