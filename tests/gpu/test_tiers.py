"""Tables in host memory and in files train to the same bits on a GPU as tables in its memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiered_bags import dlrm, hashed, plain_records, tiered_records
from tiered_bags import trained as bags_trained

from recperf.models.tiers.cache import TieredRows
from recperf.models.tiers.config import TablesConfig
from recperf.models.tiers.store import HostRows
from recperf.ops.table_rules import RULES
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.dlrm_v4.config import laptop
from recperf.workloads.next_item import hstu
from recperf.workloads.next_item.build import PreparedSequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
STEPS = 200


def trained(tables: TablesConfig) -> tuple[list[float], torch.Tensor, Any]:
    config = laptop()
    data = replace(config.data, events=40_000, windows=replace(config.data.windows, min_history=8))
    train = replace(config.train, batch_size=32, device="cuda", graph="off", deterministic=True)
    prepared = PreparedHistories(replace(config, data=data, train=train, tables=tables))
    losses: list[torch.Tensor] = []
    with applied(prepared.settings):
        trial = prepared.trial(1)
        trial.recipe.model.train()
        batches = trial.recipe.order.batches(0)
        for step in range(STEPS):
            if step == STEPS // 2:
                # A second iterator, and an evaluation between steps, which reads rows beside those that are placed.
                batches = trial.recipe.order.batches(1, STEPS // 2)
                scores = [trial.predictions().logits_N]
                trial.recipe.model.train()
            losses.append(take_step(trial.recipe, batches, step)[0])
        tiers = trial.tiers()
        moved = tiers and replace(tiers.traffic)
        scores.append(trial.predictions().logits_N)
    return torch.stack(losses).tolist(), torch.stack(scores), (trial, moved)


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECPERF_HOME", str(tmp_path_factory.mktemp("home")))
        yield trained(TablesConfig(placement="device"))


@pytest.mark.parametrize("placement", ["host", "file"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_placements_train_to_the_same_bits(on_device: Any, placement: Any, depth: int, tmp_path: Path) -> None:
    tables = TablesConfig(placement=placement, device_bytes="96KiB", depth=depth, folder=tmp_path)
    losses, scores, (trial, moved) = trained(tables)
    assert losses == on_device[0]
    assert torch.equal(scores, on_device[1])
    assert moved.fetched > 1000
    assert moved.written_back > 1000
    for name, leaf in trial.model.tables.columns().items():
        rows = torch.arange(leaf.shape[0])
        assert torch.equal(leaf.values(rows), on_device[2][0].model.tables.get_buffer(name).cpu()), name


@pytest.mark.parametrize("placement", ["host", "file"])
@pytest.mark.parametrize(
    ("build", "optimizer"),
    [*((dlrm, rule) for rule in RULES), (hashed, "sgd"), (hashed, "rowwise-adagrad")],
)
def test_bags_train_to_the_same_bits(
    build: Any, optimizer: str, placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    # Otherwise the norm that gradients are clipped by is summed by atomics, in an order that varies.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    losses, scores, whole = bags_trained(build(optimizer, TablesConfig(placement="device"), device="cuda"))
    for depth in (1, 3):
        tables = TablesConfig(placement=placement, device_bytes="256KiB", depth=depth, folder=tmp_path / str(depth))
        tiered_losses, tiered_scores, tiered = bags_trained(build(optimizer, tables, device="cuda"))
        assert tiered_losses == losses
        assert torch.equal(tiered_scores, scores)
        assert torch.equal(tiered_records(tiered.model.embeddings), plain_records(whole))
        assert tiered.model.embeddings.tiers.traffic.fetched > 0


@pytest.mark.parametrize("placement", ["host", "file"])
def test_items_of_hstu_train_to_the_same_bits(placement: Any, tmp_path: Path) -> None:
    config, losses, ranks = hstu.default(), [], []
    config = replace(
        config,
        data=replace(config.data, users=800, group_items=400),
        model=replace(config.model, loss="sampled", negatives=64),
        train=replace(config.train, device="cuda", batch_size=16, table_optimizer="adam"),
    )
    for tables in (
        TablesConfig(placement="device"),
        TablesConfig(placement=placement, device_bytes="768KiB", folder=tmp_path),
    ):
        prepared = PreparedSequences(hstu.resolve(replace(config, tables=tables)))
        torch.manual_seed(1)
        with applied(prepared.settings):
            trial = prepared.trial(1)
            trial.model.train()
            batches = trial.recipe.order.batches(0)
            steps = range(len(trial.recipe.order))
            losses.append(torch.stack([take_step(trial.recipe, batches, step)[0] for step in steps]).tolist())
            trial.model.eval()
            ranks.append(trial.predictions().ranks_N)
    assert losses[0] == losses[1]
    assert torch.equal(*ranks)
    assert trial.tiers() is not None
    assert trial.tiers().traffic.fetched > 100


def test_events_of_batches_that_the_gpu_has_finished_are_forgotten() -> None:
    """The cache holds all rows, so that none leaves; a row that left would wait for the last batch that used it."""
    tiers = TieredRows(
        {"a": 64}, HostRows(64, 3), dim=2, slots=64, config=TablesConfig(), device=torch.device("cuda")
    )  # fmt: skip
    tiers.initial = lambda name, rows_U: torch.zeros(len(rows_U), 2, device=rows_U.device)
    for batch in range(100):
        placed = tiers.place({"a": torch.arange(8) + batch % 8 * 8}, "trained")
        tiers.cache_SD[placed.slots["a"]] += 1.0
        tiers.finish(placed)
        torch.cuda.synchronize()
        assert len(tiers._ends) <= 1
    torch.cuda._sleep(1 << 28)
    for _ in range(4):
        tiers.finish(tiers.place({"a": torch.arange(8)}, "trained"))
    # The GPU sleeps for a tenth of a second, so that none of these batches has ended.
    assert len(tiers._ends) >= 3
    torch.cuda.synchronize()
    assert tiers.records({"a": torch.arange(64)})[:, 0].tolist() == [13.0] * 32 + [12.0] * 32
    tiers.finish(tiers.place({"a": torch.arange(8)}, "trained"))
    assert not tiers._ends
