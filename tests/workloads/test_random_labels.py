"""With random labels nothing can be learnt but the training rows themselves: whatever a feature adds is a leak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

from recperf.data.batch import ClickBatch
from recperf.data.clicks import Clicks
from recperf.data.movielens_like import generate
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.train.metrics import auc
from recperf.workloads.micro_dlrm import build
from recperf.workloads.micro_dlrm.config import default

CONFIG = replace(default(), train=replace(default().train, device="cpu", threads=1))


@pytest.fixture(scope="module")
def clicks() -> Clicks:
    data = generate(3, users=120, items=150, ratings=12_000)
    labels_N = np.random.default_rng(5).random(len(data.user)) < 0.55
    return Clicks(replace(data, rating=np.where(labels_N, 5, 1)), CONFIG.data)


def areas(clicks: Clicks, columns: slice, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """The AUC on training and on held-out rows of a model that does not see some dense features."""
    dense_ND = clicks.rows.dense_ND.copy()
    clicks.rows.dense_ND[:, columns] = 0
    monkeypatch.setattr(build, "rows_of", lambda config: clicks)
    prepared = build.PreparedClicks(CONFIG)
    with applied(prepared.settings):
        trial = prepared.trial(1)
        for epoch in range(CONFIG.train.epochs):
            batches = trial.recipe.order.batches(epoch)
            for step in range(len(trial.recipe.order)):
                take_step(trial.recipe, batches, epoch * len(trial.recipe.order) + step)
        trained, held_out = (prepared.source.held_out(1, split=split) for split in ("train", "valid"))
        scored = [area_of(trial, trained), area_of(trial, held_out)]
    clicks.rows.dense_ND[:] = dense_ND
    return scored[0], scored[1]


@torch.no_grad()
def area_of(trial: build.ClickTrial, batches: Iterable[ClickBatch]) -> float:
    logits, labels = zip(*((trial.logits_of(batch), batch.labels_B) for batch in batches))
    return auc(torch.cat(logits), torch.cat(labels))


def test_counts_tell_a_model_nothing(clicks: Clicks, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = slice(clicks.dense_names.index("user count"), clicks.dense_names.index("item count") + 1)
    with_counts, without = (areas(clicks, columns, monkeypatch) for columns in (slice(0, 0), counts))
    assert with_counts[0] == pytest.approx(without[0], abs=0.01)
    # Held-out rows are 2,400: three standard errors of an AUC.
    assert with_counts[1] == pytest.approx(0.5, abs=0.036)


def test_no_feature_tells_a_label_within_users(clicks: Clicks) -> None:
    train, users_N = clicks.every("train", 1), torch.from_numpy(clicks.role_ids("user", "train"))
    labels_N, counts_U = torch.from_numpy(train.labels_N).float(), torch.bincount(users_N)
    for name, column_N in zip(clicks.dense_names, torch.from_numpy(train.dense_ND).double().T):
        means_U = torch.bincount(users_N, column_N) / counts_U
        area = auc(column_N - means_U[users_N], labels_N)
        assert area == pytest.approx(0.5, abs=0.02), name
