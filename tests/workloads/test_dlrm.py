"""The workloads dlrm and micro-dlrm built and trained in this process, on small sizes, and the memory they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from recperf.config import from_json, to_json
from recperf.data.config import MovieLensConfig
from recperf.distributed.config import DistributedConfig
from recperf.distributed.ranks import Ranks, current, enter
from recperf.errors import MachineError
from recperf.execution import tables
from recperf.execution import workload as base
from recperf.ops.table_rules import RULES
from recperf.train.config import PLAIN, FastConfig
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.train.metrics import auc
from recperf.workloads import find
from recperf.workloads.dlrm import config as dlrm
from recperf.workloads.dlrm.build import PreparedDLRM
from recperf.workloads.dlrm.config import (
    DLRMDataConfig,
    DLRMModelConfig,
    DLRMTrainConfig,
    DLRMWorkloadConfig,
    estimate,
    expected_ids,
    expected_unique,
)
from recperf.workloads.micro_dlrm.build import PreparedClicks
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig, default, dot

# A CPU without bfloat16 takes its products another way, and torch says so once.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
PRESETS = find("dlrm").presets


def made(
    *, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None, fast: FastConfig | None = None,
    **train: Any,
) -> DLRMWorkloadConfig:  # fmt: skip
    fields = {"batch_size": 48, "learning_rate": 0.1, "eps": 1e-2} | train
    return DLRMWorkloadConfig(
        data=DLRMDataConfig(**({"ids_per_bag": 5, "batches": 8, "held_out_batches": 2} | (data or {}))),
        model=DLRMModelConfig(**({"rows": (30, 4, 200), "dim": 4, "bottom": (6, 8, 4), "top": (8, 1)} | (model or {}))),
        train=DLRMTrainConfig(epochs=1, device="cpu", threads=1, checkpoint_epochs=False, **fields),
        fast=fast or FastConfig(),
    )


def trained(config: DLRMWorkloadConfig, steps: int = 6) -> tuple[Any, list[float]]:
    prepared = PreparedDLRM(config)
    with applied(prepared.settings):
        trial = prepared.trial(1)
        batches = trial.recipe.order.batches(0)
        return trial, [float(take_step(trial.recipe, batches, step)[0]) for step in range(steps)]


def close(one: tuple[Any, list[float]], other: tuple[Any, list[float]], tolerance: float = 1e-5) -> None:
    assert one[1] == pytest.approx(other[1], rel=tolerance)
    mine, theirs = one[0].model.state_dict(), other[0].model.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_goes_through_json_and_is_estimated(name: str) -> None:
    config = PRESETS[name]()
    assert from_json(DLRMWorkloadConfig, to_json(config)) == config
    estimated = estimate(config)
    assert estimated.table_bytes == 4 * sum(config.dlrm.rows) * config.dlrm.dim
    assert estimated.parameters["tables"] == sum(config.dlrm.rows) * config.dlrm.dim
    assert sum(estimated.memory.values()) > estimated.table_bytes
    assert estimated.total.flops > 0
    assert find("dlrm").check(config).startswith("synthetic batches")


@pytest.mark.parametrize(
    "data", [{"ids_per_bag": 1}, {"ids_per_bag": 7}, {"ids_per_feature": (3, 1, 9)}, {"fixed": True}], ids=str
)
def test_expected_ids_are_those_of_drawn_batches(data: dict[str, Any]) -> None:
    config = made(data=data | {"batches": 40}, batch_size=400)
    drawn = PreparedDLRM(config).bags(1)
    counts = [batch.features.values_V for batch in drawn.batches(0)]
    mean = sum(ids.numel() for ids in counts) / len(counts)
    assert mean == pytest.approx(expected_ids(config), rel=0.01)
    trial = PreparedDLRM(config).trial(1)
    unique = sum(trial.rows_of(batch).unique().numel() for batch in drawn.batches(0)) / len(counts)
    assert unique == pytest.approx(expected_unique(config, expected_ids(config)), rel=0.1)


@pytest.mark.parametrize("optimizer", [*RULES, "adamw"])
def test_slices_take_the_same_steps_as_whole_batches(optimizer: str) -> None:
    """Gradients of a row that several slices use are summed before an optimizer sees them."""
    close(trained(made(optimizer=optimizer, micro_batches=5)), trained(made(optimizer=optimizer)), 1e-4)


CHANGES: dict[str, tuple[dict[str, Any], float]] = {
    "input device": ({"input": "device"}, 0.0),
    "embedding": ({"embedding": "fused"}, 1e-5),
    "interaction": ({"interaction": "fused"}, 1e-5),
    "mlp": ({"mlp": "fused"}, 1e-5),
    "optimizer": ({"optimizer": "fused"}, 1e-5),
    "bfloat16": ({"precision": "bfloat16"}, 2e-2),
    "bfloat16, fused": ({"precision": "bfloat16", "mlp": "fused"}, 2e-2),
}


@pytest.mark.parametrize("interaction", ["dot", "concat", "dcn"])
@pytest.mark.parametrize("name", CHANGES)
def test_each_switch_of_a_cpu_gives_the_plain_paths_numbers(name: str, interaction: str) -> None:
    change, tolerance = CHANGES[name]
    model = {"interaction": interaction, "cross_layers": 1, "cross_rank": 3, "top": (7, 1)}
    switched = trained(made(model=model, fast=replace(PLAIN, **change)))
    plain = trained(made(model=model, fast=PLAIN))
    close(switched, plain, tolerance or 1e-9)
    for field, value in change.items():
        assert switched[0].prepared.settings.reasons[field].startswith(f"{value}: requested")


def test_the_planted_answer_is_a_baseline_above_guessing_and_scores_are_repeatable() -> None:
    prepared = PreparedDLRM(made(data={"held_out_batches": 20}))
    logits, labels_N = prepared.baseline_logits(), prepared.scored_rows().labels_N
    assert auc(logits["majority"], labels_N) == 0.5
    assert auc(logits["planted"], labels_N) > 0.7
    trial = prepared.trial(1)
    first, second = (trial.predictions().logits_N for _ in range(2))
    assert torch.equal(first, second)
    held_out = {tuple(batch.dense_BD.flatten().tolist()) for batch in prepared.source.held_out(1)}
    assert held_out.isdisjoint(tuple(batch.dense_BD.flatten().tolist()) for batch in prepared.order(1).batches(0))


@pytest.mark.parametrize("preset", [default, dot])
def test_the_first_losses_are_those_of_autograd_in_float64(preset: Callable[[], MicroDLRMConfig]) -> None:
    config = replace(preset(), data=MovieLensConfig(source="embedded"))
    config = replace(config, train=replace(config.train, device="cpu"))
    prepared = PreparedClicks(config)
    trial, exact = prepared.trial(config.seed), prepared.trial(config.seed)
    model = exact.model.double()
    decays = [(model.dense_parameters(), config.train.weight_decay)]
    decays.append((list(model.embeddings.parameters()), config.train.table_weight_decay))
    optimizer = torch.optim.AdamW([{"params": params, "weight_decay": decay} for params, decay in decays])
    batches, worst = trial.recipe.order.batches(0), 0.0
    with applied(prepared.settings):
        for step, batch in zip(range(50), exact.recipe.order.batches(0)):
            loss, _ = take_step(trial.recipe, batches, step)
            for group in optimizer.param_groups:
                group["lr"] = trial.recipe.learning_rate(step)
            batch = replace(batch, dense_BD=batch.dense_BD.double(), labels_B=batch.labels_B.double())
            expected = model.criterion.value(model(batch.dense_BD, batch.features), batch.labels_B)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            worst = max(worst, abs(float(loss) / float(expected.detach()) - 1))
    assert worst < 5e-6


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    before = current()
    yield
    enter(before)


def two_of(local: int) -> None:
    enter(Ranks(rank=0, size=2, local_size=local))


def room(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (base, tables):
        monkeypatch.setattr(module, "available_bytes", lambda: size)


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = base.Estimate(parameters={}, table_bytes=0, step={}, memory={"all": 600})
    room(monkeypatch, 1000)
    base.require_memory(estimate)
    two_of(1)
    base.require_memory(estimate)
    two_of(2)
    with pytest.raises(MachineError, match="by the 2 ranks of this host"):
        base.require_memory(estimate)


@pytest.mark.parametrize(
    ("kinds", "share", "on_host"),
    [("row", 0.5, 0.5), ("t1=row,t2=data-parallel", 0.8, 0.8), ("t1=table,t2=data-parallel", 1.0, 0.8),
     ("table", 0.6, 0.5)],
)  # fmt: skip
def test_the_fullest_rank_or_host_counts(kinds: str, share: float, on_host: float) -> None:
    config = dlrm.DLRMWorkloadConfig(
        model=dlrm.DLRMModelConfig(rows=(40, 60), dim=8, bottom=(6, 8), top=(8, 1)),
        distributed=DistributedConfig(sharding=kinds),
    )
    planned, options = dlrm.planned(config), config.distributed
    assert tables.table_share(planned, options, on_host=False) == 1.0
    two_of(1)
    assert tables.table_share(planned, options, on_host=False) == pytest.approx(share)
    assert tables.table_share(planned, options, on_host=True) == pytest.approx(share)
    two_of(2)
    assert tables.table_share(planned, options, on_host=True) == pytest.approx(on_host)
