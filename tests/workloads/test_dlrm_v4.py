"""dlrm-v4 as a workload: what it costs before it runs, that it trains on the past alone, and goes on bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.cli import main
from recperf.data.yambda.config import HistoryConfig, WindowConfig
from recperf.errors import ConfigError, MachineError
from recperf.workloads import find
from recperf.workloads.dlrm_v4 import config as dlrm_v4
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig, EventsConfig, HistoryTrainConfig, laptop

EVENTS = EventsConfig(
    events=3_000,
    history=HistoryConfig(length=12, scan=40),
    windows=WindowConfig(min_history=5, seconds=30 * 86_400),
    holdout_windows=2,
)


def small(**changes: Any) -> DLRMv4WorkloadConfig:
    train = HistoryTrainConfig(batch_size=64, max_steps=6, device="cpu")
    model = replace(laptop().model, row_scale=0.02)
    return replace(laptop(), **({"data": EVENTS, "train": train, "model": model} | changes))


WORDS = [
    "run", "dlrm-v4", "--data.events", "3000", "--data.history.length", "12", "--data.history.scan", "40",
    "--data.windows.min-history", "5", "--data.windows.seconds", "2592000", "--data.holdout-windows", "2",
    "--model.row-scale", "0.02",
    "--train.batch-size", "64", "--train.device", "cpu", "--target.beat", "none", "--no-peaks", "--no-report",
]  # fmt: skip


def test_what_it_takes_is_known_before_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    parameters = dlrm_v4.estimate(dlrm_v4.mlperf()).parameters
    assert parameters["tables"] == 150_042_476_544
    assert sum(parameters.values()) - parameters["tables"] == 15_243_057
    assert main(["show", "dlrm-v4", "--model.row-scale", "1e-4"]) == 0
    said = capsys.readouterr().out
    assert "activations" in said
    assert "attention_backward" in said


@pytest.mark.parametrize("preset", dlrm_v4.DLRM_V4.presets)
def test_presets_fit_their_histories(preset: str) -> None:
    config = dlrm_v4.DLRM_V4.presets[preset]()
    assert config.data.history.longest <= config.model.max_history
    memory = dlrm_v4.estimate(config).memory
    assert memory["activations"] > 0
    assert (sum(memory.values()) < 1 << 30) == (preset == "laptop")


def test_a_table_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(MachineError, match="GiB are needed") as caught:
        find("dlrm-v4").check(dlrm_v4.mlperf())
    assert "--model.row-scale" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": replace(EVENTS, history=HistoryConfig(length=4086))}, "histories of at most 39 events"),
        ({"train": {"weight_decay": 0.1}}, "train.weight_decay"),
        ({"train": {"table_learning_rate": 0.0}}, "train.table_learning_rate"),
        ({"data": {"holdout_windows": 0}}, "data.holdout_windows"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        if isinstance(change.get("train"), dict):
            HistoryTrainConfig(**change["train"])
        elif isinstance(change["data"], dict):
            EventsConfig(**change["data"])
        else:
            small(**change)


def test_it_learns_what_one_batch_says() -> None:
    trial = PreparedHistories(small(train=HistoryTrainConfig(batch_size=64, device="cpu"))).trial(3)
    trial.model.eval()
    batch = next(trial.recipe.order.batches(0))
    first = last = 0.0
    for _ in range(30):
        loss = trial.recipe.model.loss(batch)
        loss.backward()
        trial.optimizer.step(3e-3)
        last = float(loss.detach())
        first = first or last
    assert last < 0.8 * first


def test_a_run_says_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "--train.max-steps", "12", "--run-dir", "one", "--quiet"]) == 0
    result = json.loads(Path("one/result.json").read_text())
    assert result["data"]["split"] == "windows 0 to 7, scored 8 to 9"
    assert result["data"]["synthetic"] is True
    budget = result["performance"]["budget"]
    assert budget["attention"] > 0
    assert "bottom" not in budget
    assert budget["other"] < 0.2
    assert set(result["quality"]["baselines"]) == {"majority", "item_bias", "user_item_bias", "popularity"}


def test_a_restored_trial_goes_on_bit_for_bit() -> None:
    prepared = PreparedHistories(small())

    def steps(trial: Any, first: int, last: int) -> None:
        batches = trial.recipe.order.batches(0, first)
        for number in range(first, last):
            trial.recipe.model.loss(next(batches)).backward()
            trial.optimizer.step(trial.recipe.learning_rate(number))

    straight, begun, resumed = prepared.trial(5), prepared.trial(5), prepared.trial(6)
    steps(straight, 0, 5)
    steps(begun, 0, 2)
    resumed.restore(begun.state())
    resumed.recipe.model.seed = 5  # type: ignore[attr-defined]
    steps(resumed, 2, 5)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
