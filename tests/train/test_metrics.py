"""Metrics equal scikit-learn's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from recperf.train.metrics import auc, binary_metrics, calibration_error

PAIRS = st.lists(st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.25, 3.0]), st.booleans()), min_size=2, max_size=60)


@settings(max_examples=60)
@given(PAIRS)
def test_auc_with_ties_equals_scikit_learns(pairs: list[tuple[float, bool]]) -> None:
    scores, labels = torch.tensor([s for s, _ in pairs]), torch.tensor([float(y) for _, y in pairs])
    if 0 < labels.sum() < len(pairs):
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    else:
        assert auc(scores, labels) == 0.5


def test_metrics_against_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    labels = (draw.random(5000) < 0.4).astype(float)
    logits = draw.normal(size=5000) + labels
    metrics = binary_metrics(torch.from_numpy(logits), torch.from_numpy(labels))
    probabilities = 1 / (1 + np.exp(-logits))
    assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, logits > 0))
    assert metrics["auc"] == pytest.approx(roc_auc_score(labels, logits))
    assert metrics["log_loss"] == pytest.approx(log_loss(labels, probabilities))
    assert metrics["calibration"] == pytest.approx(probabilities.sum() / labels.sum())


def test_calibration_error_is_zero_when_rates_match_and_large_when_not() -> None:
    labels = torch.tensor([1.0, 0.0] * 500)
    assert calibration_error(torch.full((1000,), 0.5), labels) == pytest.approx(0)
    assert calibration_error(torch.full((1000,), 0.9), labels) == pytest.approx(0.4)


def test_extreme_logits_stay_finite() -> None:
    metrics = binary_metrics(torch.tensor([1e4, -1e4, 60.0]), torch.tensor([0.0, 1.0, 1.0]))
    assert all(math.isfinite(value) for value in metrics.values())
