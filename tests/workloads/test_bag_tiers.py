"""Tables of bags in tiers train to the same bits as tables in memory, whatever the optimizer and the depth."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiered_bags import STEPS, dlrm, hashed, losses_of, plain_records, tiered_records, trained

from recperf.errors import ConfigError
from recperf.models.tiers.config import TablesConfig
from recperf.ops.table_rules import RULES
from recperf.train.checkpoint import CheckpointStore


def small(depth: int) -> TablesConfig:
    return TablesConfig(placement="file", resident="256KiB", depth=depth)


def require_equal(build: Any, depths: tuple[int, ...]) -> None:
    losses, scores, trial = trained(build(TablesConfig(placement="device")))
    for depth in depths:
        tiered_losses, tiered_scores, tiered = trained(build(small(depth)))
        assert tiered_losses == losses
        assert torch.equal(tiered_scores, scores)
        assert torch.equal(tiered_records(tiered.model.embeddings), plain_records(trial))
        traffic = tiered.model.embeddings.tiers.traffic
        assert 0 < traffic.hits < traffic.rows
        assert traffic.fetched > 0


@pytest.mark.parametrize("optimizer", RULES)
def test_dlrm_is_equal_to_the_bit(optimizer: str) -> None:
    require_equal(lambda tables: dlrm(optimizer, tables), (1, 3))


@pytest.mark.parametrize("build", [lambda tables: dlrm("adagrad", tables), lambda tables: hashed("adam", tables)])
def test_a_checkpoint_is_resumed_into_any_placement(build: Any, tmp_path: Path) -> None:
    placements = TablesConfig(placement="device"), small(2)
    losses, _, whole = trained(build(placements[0]))
    for number, (before, after) in enumerate(product(placements, placements)):
        trial, other = build(before).trial(1), build(after).trial(1)
        store = CheckpointStore(folder=tmp_path / str(number), notice=print)
        for first, last in ((0, 5), (5, 15)):
            losses_of(trial, first, last)
            store.save(last, {"trial": trial.state()}, best=False)
        saved = CheckpointStore(folder=store.folder, notice=print).load(into={"trial": other.state()})
        assert saved is not None
        other.restore(saved["trial"])
        assert losses_of(other, 15, STEPS) == losses[15:]
        records = plain_records if after.placement == "device" else lambda one: tiered_records(one.model.embeddings)
        assert torch.equal(records(other), plain_records(whole))


def test_the_choice_is_recorded_and_adamw_is_refused() -> None:
    assert dlrm("sgd", TablesConfig()).settings.reasons["tables"].startswith("device: tables of 3.1 MiB fit")
    with pytest.raises(ConfigError, match="adamw") as error:
        dlrm("adamw", small(1))
    assert error.value.fix == "--train.optimizer rowwise-adagrad"
    assert dlrm("adamw", TablesConfig()).settings.reasons["tables"].startswith("device: adamw")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from Linux")
@pytest.mark.parametrize(
    ("gib", "limit_gib", "resident", "steps", "batch"),
    [
        pytest.param(2, 1, "64MiB", 60, 64, id="small"),
        pytest.param(20, 3, "2GiB", 2000, 128, id="large"),
    ],
)
@pytest.mark.long
def test_a_table_trains_within_less_memory_than_it_has(
    gib: int, limit_gib: int, resident: str, steps: int, batch: int, tmp_path: Path
) -> None:
    """A limit of the system makes every allocation beyond it fail; and memory does not grow once the cache is full."""
    script = Path(__file__).with_name("train_in_files.py")
    numbers = map(str, (gib, limit_gib, resident, steps, batch, tmp_path))
    trained = subprocess.run([sys.executable, script, *numbers], stdout=subprocess.PIPE, check=True)
    figures = json.loads(trained.stdout)
    memory = figures["memory"]
    assert max(memory) < limit_gib << 30
    # What a batch takes for a moment varies.
    assert max(memory[-(steps // 4) :]) <= 1.05 * max(memory[steps // 4 : steps // 2])
    assert figures["traffic"]["fetched"] > 0
    assert max(figures["losses"]) < 1
