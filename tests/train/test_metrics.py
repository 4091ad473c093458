"""Metrics, Tallies in any order of adding and bootstrap replicates equal scikit-learn's; intervals follow from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from example_runs import quality_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from recperf.runs.derive import best_of, combined, interval
from recperf.train.metrics import Resampling, Tally, auc, binary_metrics


def predictions(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, generator=draw, dtype=torch.float64) * 2
    return logits, (torch.rand(count, generator=draw) < (logits - 0.5).sigmoid()).float()


def tally(logits: torch.Tensor, labels: torch.Tensor, parts: int = 1) -> Tally:
    total = Tally()
    for some, few in zip(logits.chunk(parts), labels.chunk(parts)):
        total.add(some, few)
    return total


def test_metrics_equal_scikit_learns() -> None:
    logits, labels = predictions(4000, 1)
    metrics = tally(logits, labels).metrics()
    assert metrics is not None
    p = logits.sigmoid()
    # The same bins: then the AUC is exact, ties and all.
    binned = (p * 100_000).floor().numpy()
    assert metrics["auc"] == pytest.approx(roc_auc_score(labels.numpy(), binned), abs=1e-12)
    assert metrics["log_loss"] == pytest.approx(log_loss(labels.numpy(), p.numpy()), rel=1e-12)
    assert metrics["accuracy"] == float(((p > 0.5) == (labels > 0)).double().mean())
    rate = float(labels.mean())
    base = log_loss(labels.numpy(), np.full(4000, rate))
    assert metrics["normalized_entropy"] == pytest.approx(metrics["log_loss"] / base, rel=1e-7)


def test_parts_add_up_in_any_order() -> None:
    logits, labels = predictions(3001, 3)
    whole = tally(logits, labels, 7)
    first, second = tally(logits[:1000], labels[:1000]), tally(logits[1000:], labels[1000:], 5)
    for a, b in ((first, second), (second, first)):
        both = Tally()
        both.merge(a)
        both.merge(b)
        assert torch.equal(both.counts_2K, whole.counts_2K)
        assert both.metrics() == pytest.approx(whole.metrics(), rel=1e-12)


def test_a_state_restores_everything_and_nothing_added_has_no_metrics() -> None:
    saved, other = tally(*predictions(500, 4)), tally(*predictions(50, 5))
    other.load(saved.state())
    assert torch.equal(other.counts_2K, saved.counts_2K)
    assert other.metrics() == saved.metrics()
    saved.clear()
    assert saved.metrics() is None
    one_class = tally(torch.tensor([0.3, -2.0]), torch.tensor([1.0, 1.0])).metrics()
    assert one_class is not None
    assert (one_class["auc"], one_class["normalized_entropy"]) == (0.5, 1.0)


PAIRS = st.lists(st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.25, 3.0]), st.booleans()), min_size=2, max_size=60)


@settings(max_examples=60)
@given(PAIRS)
def test_auc_with_ties_equals_scikit_learns(pairs: list[tuple[float, bool]]) -> None:
    scores, labels = torch.tensor([s for s, _ in pairs]), torch.tensor([float(y) for _, y in pairs])
    if 0 < labels.sum() < len(pairs):
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    else:
        assert auc(scores, labels) == 0.5


def test_exact_metrics_equal_scikit_learns() -> None:
    draw = np.random.default_rng(0)
    labels = (draw.random(5000) < 0.4).astype(float)
    logits = draw.normal(size=5000) + labels
    metrics = binary_metrics(torch.from_numpy(logits), torch.from_numpy(labels))
    probabilities = 1 / (1 + np.exp(-logits))
    assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, logits > 0))
    assert metrics["auc"] == pytest.approx(roc_auc_score(labels, logits))
    assert metrics["log_loss"] == pytest.approx(log_loss(labels, probabilities))
    assert metrics["calibration"] == pytest.approx(probabilities.sum() / labels.sum())


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
    assert best.difference == pytest.approx(
        (model[0]["auc"] + model[1]["auc"]) / 2 - scores["baselines"]["good"]["auc"]
    )
    assert best.low < best.difference < best.high
    # The same users: far narrower than the two intervals beside each other.
    alone = interval(combined([seed["auc_replicates"] for seed in model]))
    assert best.high - best.low < 0.5 * (alone.high - alone.low)
    assert not quality.warnings


def test_few_rows_and_a_leaked_label_are_warnings() -> None:
    scores = {
        "rows": 16, "rows_digest": "", "by": "rows", "units": 16, "baselines": {}, "seeds": {}, "segments": {},
        "strongest_feature": {"name": "refunded", "auc": 0.9981},
    }  # fmt: skip
    few, leak = quality_of(scores, 0.998).warnings
    assert "only 16 rows are scored" in few
    assert leak == "AUC 0.9980: a feature may contain the label; refunded alone reaches 0.9981"
    assert "all scored rows have the same label" in quality_of(scores, 0.5).warnings[1]
