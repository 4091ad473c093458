"""Tables in tiers train to the same bits as tables on the device."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.measure.limits import tables_sentence
from recperf.models.tiers.config import TablesConfig
from recperf.train.checkpoint import CheckpointStore
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.dlrm_v4.config import laptop


def config_of(tables: TablesConfig) -> Any:
    config = laptop()
    data = replace(config.data, events=8000, windows=replace(config.data.windows, min_history=8))
    train = replace(config.train, batch_size=32, max_steps=60, device="cpu")
    return replace(config, data=data, train=train, tables=tables)


def trained(tables: TablesConfig, steps: int) -> tuple[list[float], Any, Any]:
    prepared = PreparedHistories(config_of(tables))
    losses = []
    with applied(prepared.settings):
        trial = prepared.trial(1)
        trial.recipe.model.train()
        batches = trial.recipe.order.batches(0)
        for step in range(steps):
            losses.append(float(take_step(trial.recipe, batches, step)[0]))
        scores = trial.predictions().logits_N
    return losses, scores, trial


@pytest.fixture(scope="module")
def on_device() -> Any:
    return trained(TablesConfig(), 40)


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("eviction", ["recent", "frequent"])
def test_losses_and_scores_are_equal_to_the_bit(on_device: Any, depth: int, eviction: Any) -> None:
    losses, scores, trial = trained(
        TablesConfig(placement="file", resident="64KiB", depth=depth, eviction=eviction), 40
    )
    assert losses == on_device[0]
    assert torch.equal(scores, on_device[1])
    tiers = trial.model.tables.tiers
    assert 0 < tiers.traffic.hits < tiers.traffic.rows
    assert tiers.traffic.written_back > 0
    folder = tiers.store.paths[0].parent
    assert folder.is_dir()
    del trial, tiers
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("placements", [("file", "device"), ("device", "file"), ("file", "file")])
def test_a_checkpoint_resumes_into_another_placement(
    on_device: Any, tmp_path: Path, placements: tuple[str, str]
) -> None:
    """Two saves, the second an increment; then a new process would load it and train on."""
    first, second = (TablesConfig(placement=name, resident="64KiB") for name in placements)  # type: ignore[arg-type]
    store = CheckpointStore(folder=tmp_path, notice=pytest.fail)
    losses: list[float] = []
    for tables, start, stop in ((first, 0, 20), (second, 20, 40)):
        prepared = PreparedHistories(config_of(tables))
        with applied(prepared.settings):
            trial = prepared.trial(1)
            if start:
                state = CheckpointStore(folder=tmp_path, notice=pytest.fail).load(into={"trial": trial.state()})
                assert state is not None
                trial.restore(state["trial"])
            trial.recipe.model.train()
            batches = trial.recipe.order.batches(0, start)
            for step in range(start, stop):
                losses.append(float(take_step(trial.recipe, batches, step)[0]))
                if step in (5, 19):
                    store.save(step, {"trial": trial.state()}, best=False)
            scores = trial.predictions().logits_N if start else None
    assert losses == on_device[0]
    assert torch.equal(scores, on_device[1])


def test_tables_in_tiers_are_a_sentence() -> None:
    tables = {
        "placement": "file", "cache_bytes": 2 << 30, "rows": 127_498.4, "hit_rate": 0.769, "fetched_bytes": 60 << 20,
        "written_back_bytes": 60 << 20, "placing_ms": 240.0, "exposed_ms": 40.0,
    }  # fmt: skip
    text = tables_sentence({"tables": tables, "step_ms": {"p50": 200.0}})
    assert text == (
        "Tables in files: the cache of 2 GiB held 76.9% of the 127,498 rows of a batch; 60 MiB a step were fetched and "
        "60 MiB written back in 240 ms, 500 MiB/s, beside the step, which waited 40 ms for its batch. A larger cache "
        "(--tables.device-bytes, on a CPU --tables.resident) would move less."
    )
    assert tables_sentence({"step_ms": {"p50": 200.0}}) == ""
