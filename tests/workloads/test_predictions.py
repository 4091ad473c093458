"""Predictions name the label, user and item of each scored row, and baselines score the same rows in the same order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recperf.data.config import SplitConfig
from recperf.data.rows.imported import ImportedClicks
from recperf.data.rows.imports import import_clicks
from recperf.data.rows.options import ClickOptions
from recperf.data.streaming.config import HistoryConfig, WindowConfig
from recperf.learn.leaks import areas
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
    scored = trial.metrics(trial.predictions())
    assert scored.items() >= binary_metrics(predictions.logits_N, predictions.labels_N).items()
    if has_users:
        assert len(rows.users_N.unique()) > 1


def clicks() -> Any:
    return PreparedClicks(default())


@pytest.mark.parametrize("make", [histories, clicks])
def test_a_candidate_scores_what_a_row_with_its_item_scores(make: Callable[[], Any]) -> None:
    """The same item gives the row's own logit; another item what it gives alone, and it matters which."""
    prepared = make()
    trial = prepared.trial(7)
    with torch.no_grad():
        for parameter in trial.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    predictions, catalogue = trial.predictions(), prepared.catalogue()
    rows_P = torch.arange(0, len(predictions.logits_N), 7)[:60]
    known_P = torch.isin(predictions.items_N[rows_P], catalogue.items_I)
    own_P = trial.candidate_logits(rows_P, predictions.items_N[rows_P])
    torch.testing.assert_close(own_P[known_P], predictions.logits_N[rows_P][known_P], atol=1e-5, rtol=1e-5)
    others = catalogue.items_I[:: max(1, len(catalogue.items_I) // 5)]
    together = trial.candidate_logits(rows_P.repeat_interleave(len(others)), others.repeat(len(rows_P)))
    alone = torch.stack([trial.candidate_logits(rows_P, other.expand_as(rows_P)) for other in others], 1)
    torch.testing.assert_close(together, alone.flatten(), atol=1e-5, rtol=1e-5)
    assert (alone.std(1) > 1e-3).all()
    row, rows = int(rows_P[3]), prepared.scored_rows()
    own_N = (rows.users_N == rows.users_N[row]) & (rows.times_N < rows.times_N[row])
    seen = set(catalogue.seen(row).tolist())
    assert seen >= set(rows.items_N[own_N].tolist())
    if make is clicks:
        trained_N = catalogue.users_N == rows.users_N[row]
        assert len(seen - set(rows.items_N[own_N].tolist())) == int(trained_N.sum()) == catalogue.user_rows_N[row]
    else:
        assert len(seen) <= catalogue.user_rows_N[row]


def test_a_column_that_holds_the_label_is_named(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    labels = draw.random(1500) < 0.3
    lines = [
        f"{draw.integers(40)},{draw.integers(60)},{draw.normal():.3f},{3.1 - 2 * one},{int(one)}" for one in labels
    ]
    (tmp_path / "ads.csv").write_text("\n".join(["user,ad,age,refund,clicked", *lines]))
    options = ClickOptions(clicks=tmp_path / "ads.csv", label="clicked", categorical="user,ad", numeric="age,refund")
    import_clicks(options, tmp_path / "store")
    alone = areas(ImportedClicks(tmp_path / "store", SplitConfig()))
    name, area = max(alone.items(), key=lambda pair: pair[1])
    assert (name, area) == ("refund", 1.0)
