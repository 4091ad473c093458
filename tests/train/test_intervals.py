"""Bootstrap replicates are those of scikit-learn's AUC with the same users drawn; intervals follow from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from example_runs import quality_of
from sklearn.metrics import roc_auc_score

from recperf.runs.quality import best_of, combined, interval
from recperf.train.metrics import Resampling, auc


def rows(count: int, users: int, ties: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(3)
    user = draw.integers(0, users, count)
    labels = draw.random(count) < 0.3
    logits = labels + draw.normal(size=users)[user] + draw.normal(size=count)
    if ties:
        logits = np.round(logits * ties) / ties
    # Numbers of users need not be dense.
    return torch.from_numpy(logits), torch.from_numpy(labels).float(), torch.from_numpy(user * 7 + 3)


@pytest.mark.parametrize("ties", [None, 4])
def test_a_replicate_is_the_auc_with_users_drawn_again(ties: int | None) -> None:
    logits_N, labels_N, users_N = rows(3000, 80, ties)
    resampling = Resampling(len(users_N), users_N, replicates=7)
    assert (resampling.by, resampling.units) == ("users", 80)
    assert torch.equal(resampling.weights_RG.sum(1), torch.full((7,), 80.0))
    _, where = np.unique(users_N, return_inverse=True)
    expected = [roc_auc_score(labels_N, logits_N, sample_weight=w.numpy()[where]) for w in resampling.weights_RG]
    assert resampling.auc(logits_N, labels_N) == pytest.approx(expected, abs=1e-6)
    again = Resampling(len(users_N), users_N, replicates=7)
    assert again.auc(logits_N, labels_N) == resampling.auc(logits_N, labels_N)


def test_differences_are_paired_and_combine_the_seeds() -> None:
    logits_N, labels_N, users_N = rows(5000, 300)
    resampling = Resampling(len(users_N), users_N)

    def sampled(logits_N: torch.Tensor, **more: Any) -> dict[str, Any]:
        return {"auc": auc(logits_N, labels_N), "auc_replicates": resampling.auc(logits_N, labels_N), **more,
                "segments": {}, "calibration": []}  # fmt: skip

    model = [
        sampled(logits_N + 0.3 * labels_N + 0.01 * seed * users_N.double().sin(), rows_digest="a") for seed in (1, 2)
    ]
    other = sampled(logits_N * -1, rows_digest="rows of another seed")
    scores = {
        "rows": 5000, "rows_digest": "a", "by": "users", "units": 300, "segments": {},
        "baselines": {"majority": sampled(labels_N * 0), "good": sampled(logits_N), "planted": sampled(labels_N)},
        "seeds": {"1": model[0], "2": model[1], "3": other},
    }  # fmt: skip
    quality = quality_of(scores, 0.7)
    assert [row.baseline for row in quality.differences] == ["planted", "good", "majority"]
    best = best_of(quality.differences)
    assert best is not None
    assert (best.baseline, best.seeds, best.below_zero) == ("good", 2, 0.0)
    assert best.auc == pytest.approx((model[0]["auc"] + model[1]["auc"]) / 2 - scores["baselines"]["good"]["auc"])
    assert best.low < best.auc < best.high
    # The same users: far narrower than the two intervals beside each other.
    alone = interval(combined([seed["auc_replicates"] for seed in model]))
    assert best.high - best.low < 0.5 * (alone.high - alone.low)
    assert not quality.warnings


def test_few_rows_and_a_leaked_label_are_warnings() -> None:
    scores: dict[str, Any] = {
        "rows": 16,
        "rows_digest": "",
        "by": "rows",
        "units": 16,
        "baselines": {},
        "seeds": {},
        "segments": {},
    }
    scores["strongest_feature"] = {"name": "refunded", "auc": 0.9981}
    few, leak = quality_of(scores, 0.998).warnings
    assert "only 16 rows are scored" in few
    assert leak == "AUC 0.9980: a feature may contain the label; refunded alone reaches 0.9981"
