"""Predictions name the label, user and item of each scored row, and baselines score the same rows in the same order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from recperf.data.yambda.config import HistoryConfig, WindowConfig
from recperf.train.metrics import binary_metrics
from recperf.workloads.dlrm.build import PreparedDLRM
from recperf.workloads.dlrm.config import experiment
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.dlrm_v4.config import EventsConfig, laptop
from recperf.workloads.micro_dlrm.build import PreparedClicks
from recperf.workloads.micro_dlrm.config import default
from recperf.workloads.micro_dlrm_dram.build import PreparedDram
from recperf.workloads.micro_dlrm_dram.config import default as dram

DAY = 86_400


def histories() -> Any:
    """Shuffled windows, so that the order of scoring is not that of time."""
    data = EventsConfig(
        events=3_000, history=HistoryConfig(length=12, scan=40), holdout_windows=2,
        windows=WindowConfig(min_history=5, seconds=30 * DAY, shuffle=1.0),
    )  # fmt: skip
    return PreparedHistories(replace(laptop(), data=data, model=replace(laptop().model, row_scale=0.02)))


def cold_clicks() -> Any:
    """Users without training rows, whose id is 0 to the model."""
    return PreparedClicks(replace(default(), data=replace(default().data, split="cold")))


def random_bags() -> Any:
    config = experiment()
    return PreparedDLRM(replace(config, data=replace(config.data, batches=3, held_out_batches=3)))


def virtual_ids() -> Any:
    config = dram()
    data = replace(config.data, batches=3, held_out_batches=3)
    return PreparedDram(replace(config, data=data, model=replace(config.model, rows=100)))


@pytest.mark.parametrize(
    ("make", "has_users"), [(histories, True), (cold_clicks, True), (random_bags, False), (virtual_ids, False)]
)
def test_predictions_and_baselines_are_of_the_same_rows(make: Callable[[], Any], has_users: bool) -> None:
    prepared = make()
    rows, logits, trial = prepared.scored_rows(), prepared.baseline_logits(), prepared.trial(prepared.config.seed)
    predictions = trial.predictions()
    assert len(rows.labels_N) == prepared.data["valid_rows"]
    for column in ("labels_N", "users_N", "items_N"):
        ours, theirs = getattr(predictions, column), getattr(rows, column)
        assert (ours is None) == (theirs is None) == (column != "labels_N" and not has_users)
        assert ours is None or torch.equal(ours, theirs)
    assert {name: len(logits_N) for name, logits_N in logits.items()} == dict.fromkeys(logits, len(rows.labels_N))
    expected = {name: binary_metrics(logits_N, rows.labels_N) for name, logits_N in logits.items()}
    assert prepared.baselines() == expected
    scored = trial.score()
    assert scored.items() >= binary_metrics(predictions.logits_N, predictions.labels_N).items()
    if has_users:
        assert len(rows.users_N.unique()) > 1
