"""With random labels nothing can be learnt but the training rows themselves: whatever a feature adds is a leak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recperf.data.batch import ClickBatch
from recperf.data.known.movielens_like import generate
from recperf.data.rows.clicks import Clicks
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.train.metrics import auc
from recperf.workloads.micro_dlrm import build
from recperf.workloads.micro_dlrm.config import default

USERS, ITEMS, RATINGS = 2400, 1682, 80_000
"""Half of the rows are held out: an AUC of 40,000 has a standard error of 0.003. Users have few rows each, so that one
label changes a mean of them noticeably."""
CONFIG = replace(
    default(),
    data=replace(default().data, holdout=0.5),
    model=replace(default().model, rows=(USERS + 1, ITEMS + 1, 22)),
    train=replace(default().train, device="cpu", threads=1, epochs=5),
)


@pytest.fixture(scope="module")
def clicks() -> Clicks:
    data = generate(3, users=USERS, items=ITEMS, ratings=RATINGS)
    labels_N = np.random.default_rng(5).random(len(data.user)) < 0.55
    return Clicks(replace(data, rating=np.where(labels_N, 5, 1)), CONFIG.data)


def counts_of(clicks: Clicks) -> slice:
    """The columns that are computed from the rows of users and items."""
    return slice(clicks.dense_names.index("user count"), clicks.dense_names.index("item count") + 1)


def areas(
    clicks: Clicks, columns: slice, values: Any, monkeypatch: pytest.MonkeyPatch, seeds: int = 2
) -> tuple[float, float]:
    """The AUC on training and on held-out rows, mean over seeds, with other values in some dense features."""
    dense_ND = clicks.rows.dense_ND.copy()
    clicks.rows.dense_ND[:, columns] = values
    monkeypatch.setattr(build, "rows_of", lambda config: clicks)
    prepared = build.PreparedClicks(CONFIG)
    scored = []
    with applied(prepared.settings):
        for seed in range(1, seeds + 1):
            trial = prepared.trial(seed)
            for epoch in range(CONFIG.train.epochs):
                batches = trial.recipe.order.batches(epoch)
                for step in range(len(trial.recipe.order)):
                    take_step(trial.recipe, batches, epoch * len(trial.recipe.order) + step)
            trained, held_out = (prepared.source.held_out(1, split=split) for split in ("train", "valid"))
            scored.append((area_of(trial, trained), area_of(trial, held_out)))
    clicks.rows.dense_ND[:] = dense_ND
    train, valid = np.mean(scored, 0)
    return float(train), float(valid)


@torch.no_grad()
def area_of(trial: build.ClickTrial, batches: Iterable[ClickBatch]) -> float:
    logits, labels = zip(*((trial.logits_of(batch), batch.labels_B) for batch in batches))
    return auc(torch.cat(logits), torch.cat(labels))


def mean_of_earlier_rows(clicks: Clicks) -> NDArray[np.float64]:
    """For each row the mean label of the training rows that its user had before, drawn to that of all."""
    ratings, labels_N, training_N = clicks.ratings, clicks.rows.labels_N, np.zeros(len(clicks.rows))
    training_N[clicks.index["train"]] = 1
    shares_N = np.empty(len(labels_N))
    for user in np.unique(ratings.user):
        rows_K = np.flatnonzero(ratings.user == user)
        rows_K = rows_K[np.argsort(ratings.timestamp[rows_K], kind="stable")]
        clicks_K, counts_K = (np.cumsum(part) - part for part in ((labels_N * training_N)[rows_K], training_N[rows_K]))
        shares_N[rows_K] = (clicks_K + 5 * 0.55) / (counts_K + 5)
    return (shares_N - 0.5) * 4.0


def test_counts_tell_a_model_nothing_and_a_mean_label_would(clicks: Clicks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clicks.count("valid") >= 40_000
    counts, nothing = counts_of(clicks), slice(0, 0)
    with_counts, without = areas(clicks, nothing, 0, monkeypatch), areas(clicks, counts, 0, monkeypatch)
    assert with_counts[0] == pytest.approx(without[0], abs=0.01)
    assert (with_counts[1], without[1]) == pytest.approx((0.5, 0.5), abs=0.01)
    # What the bounds notice. A mean of earlier rows, where the model learns from later ones what all have together:
    first, users_N = slice(counts.start, counts.start + 1), clicks.ratings.user
    earlier = areas(clicks, first, mean_of_earlier_rows(clicks)[:, None], monkeypatch, seeds=1)
    assert earlier[0] > without[0] + 0.02
    # One that has labels of held-out rows:
    means_N = (np.bincount(users_N, clicks.rows.labels_N) / np.maximum(np.bincount(users_N), 1))[users_N]
    assert areas(clicks, first, 4 * means_N[:, None] - 2, monkeypatch, seeds=1)[1] > 0.53


def test_no_feature_tells_a_label_within_users(clicks: Clicks) -> None:
    train, users_N = clicks.every("train", 1), torch.from_numpy(clicks.role_ids("user", "train"))
    labels_N, counts_U = torch.from_numpy(train.labels_N).float(), torch.bincount(users_N)
    for name, column_N in zip(clicks.dense_names, torch.from_numpy(train.dense_ND).double().T):
        means_U = torch.bincount(users_N, column_N) / counts_U
        area = auc(column_N - means_U[users_N], labels_N)
        assert area == pytest.approx(0.5, abs=0.02), name
