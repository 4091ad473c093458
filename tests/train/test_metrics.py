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
from recperf.train import metrics
from recperf.train.metrics import (
    Resampling,
    Tally,
    auc,
    binary_metrics,
    binned_auc,
    calibration_error,
    normalized_entropy,
    reliability,
)


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
        replicates = {"auc": resampling.auc(logits_N, labels_N)}
        return {"leading": auc(logits_N, labels_N), "replicates": replicates, **more,
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
        (model[0]["leading"] + model[1]["leading"]) / 2 - scores["baselines"]["good"]["leading"]
    )
    assert best.low < best.difference < best.high
    # The same users: far narrower than the two intervals beside each other.
    alone = interval(combined([seed["replicates"]["auc"] for seed in model]))
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


def test_calibration_error_is_the_gap_of_each_of_fifteen_bins() -> None:
    """In the first bin predictions are too high, in the second too low, and 1 belongs to the last."""
    probabilities_N = torch.tensor([0.0, 0.05, 0.1, 0.12, 0.5, 0.99, 1.0], dtype=torch.float64)
    labels_N = torch.tensor([0.0, 0, 1, 0, 1, 1, 0])
    gaps = [0.05, 0.22 - 1, 0.5 - 1, 1.99 - 1]
    assert calibration_error(probabilities_N, labels_N) == pytest.approx(sum(map(abs, gaps)) / 7, rel=1e-12)
    assert calibration_error(torch.tensor([0.25]), torch.tensor([1.0])) == 0.75
    assert calibration_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_reliability_has_tenths_of_the_rows_in_the_order_of_predictions() -> None:
    logits_N = torch.tensor([float(number // 2) for number in range(20)]).flip(0) - 5
    labels_N = torch.arange(20) % 4 == 0
    rows = reliability(logits_N, labels_N.float())
    expected = (torch.arange(10.0, dtype=torch.float64) - 5).sigmoid().tolist()
    assert [row["predicted"] for row in rows] == pytest.approx(expected)
    # Rows 19 and 18 have the lowest prediction, 17 and 16 the next.
    assert [row["observed"] for row in rows] == [0.0, 0.5] * 5
    assert [row["rows"] for row in rows] == [2] * 10
    # Of equal predictions the earlier row comes first.
    tied = reliability(torch.zeros(4), torch.tensor([1.0, 1, 0, 0]), bins=2)
    assert [row["observed"] for row in tied] == [1.0, 0.0]


def test_a_logit_of_nothing_predicts_no_click_and_ends_of_the_bins_stay_apart() -> None:
    nothing = binary_metrics(torch.zeros(4), torch.tensor([0.0, 0, 0, 1]))
    assert (nothing["accuracy"], nothing["auc"], nothing["calibration"]) == (0.75, 0.5, 2.0)
    assert binary_metrics(torch.zeros(4), torch.zeros(4))["calibration"] == 2.0, "over one, where nobody clicked"
    assert nothing["calibration_error"] == pytest.approx(0.25)
    counted = tally(torch.zeros(4), torch.tensor([0.0, 0, 0, 1])).metrics()
    assert counted is not None
    assert counted["accuracy"] == 0.75
    assert Tally().counts_2K.shape == (2, 100_000)
    # Probabilities 0 and 1.5e-5 are in the first two bins, 1 - 1.5e-5 and 1 in the last two.
    for low in (-50.0, 11.1):
        pair = torch.tensor([low, low + 38.9])
        assert tally(pair, torch.tensor([1.0, 0.0])).auc() == 0.0
        assert tally(pair, torch.tensor([0.0, 1.0])).auc() == 1.0
    assert normalized_entropy(0.3, 0.0) == normalized_entropy(0.3, 1.0) == 1.0
    assert normalized_entropy(0.3, 0.2) == pytest.approx(0.3 / -(0.2 * np.log(0.2) + 0.8 * np.log(0.8)))
    one = torch.tensor([[1.0, 0.0]])
    assert [float(binned_auc(a, b)) for a, b in ((one, one.flip(1)), (one.flip(1), one), (one, 0 * one))] == [1, 0, 0.5]


def test_users_are_resampled_alone_up_to_2048_and_in_even_groups_beyond() -> None:
    users_N = torch.arange(2048).repeat(2)
    alone = Resampling(len(users_N), users_N)
    assert torch.equal(alone.groups_N, users_N)
    assert alone.weights_RG.shape == (200, 2048)
    many = Resampling(5000, torch.arange(5000).flip(0), replicates=3)
    assert (many.units, many.by, many.weights_RG.shape) == (5000, "users", (3, 2048))
    sizes = torch.bincount(many.groups_N)
    assert (len(sizes), sorted(set(sizes.tolist()))) == (2048, [2, 3])
    assert not torch.equal(many.groups_N, torch.arange(5000).flip(0) % 2048), "in a random order"
    empty, single = Resampling(0), Resampling(1)
    assert (empty.units, empty.by, single.units) == (0, "rows", 1)
    assert single.weights_RG.tolist() == [[1.0]] * 200
    figures = single.probabilities(torch.zeros(1), torch.ones(1))
    assert figures["log_loss"] == pytest.approx([np.log(2)] * 200)
    assert figures["calibration_error"] == pytest.approx([0.5] * 200)
    # Twice as many draws vary less: users are drawn with replacement, each about Poisson.
    assert float(alone.weights_RG.var()) == pytest.approx(1.0, abs=0.02)


def test_replicates_of_probabilities_are_those_of_repeated_rows() -> None:
    logits_N, labels_N, users_N = rows(60, 5)
    resampling = Resampling(60, users_N, replicates=9)
    figures = resampling.probabilities(logits_N, labels_N)
    probabilities = 1 / (1 + np.exp(-logits_N.numpy()))
    user = np.unique(users_N, return_inverse=True)[1]
    values_Q, rows_Q = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 1, 2])
    means = resampling.mean(values_Q, rows_Q)
    missing = 0
    for replicate, weights in enumerate(resampling.weights_RG.numpy()[:, user]):
        loss = log_loss(labels_N, probabilities, sample_weight=weights)
        assert figures["log_loss"][replicate] == pytest.approx(loss)
        gaps: dict[int, float] = {}
        for weight, p, label in zip(weights, probabilities, labels_N.tolist()):
            gaps[int(15 * p)] = gaps.get(int(15 * p), 0.0) + weight * (p - label)
        expected = sum(map(abs, gaps.values())) / weights.sum()
        assert figures["calibration_error"][replicate] == pytest.approx(expected)
        of_rows = weights[:3]
        missing += of_rows.sum() == 0
        mean = np.average([1.0, 2.0, 5.0], weights=of_rows) if of_rows.sum() else 8 / 3
        assert means[replicate] == pytest.approx(mean)
    alone = Resampling(60, users_N, replicates=40)
    one = alone.mean(torch.tensor([3.0]), torch.tensor([0]))
    assert one == [3.0] * 40, "of all rows where a replicate has none"
    assert (alone.weights_RG[:, user[0]] == 0).any()


def test_replicates_in_bins_keep_what_the_bins_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bins of ten rows, positives begin inside one: bins tie what is apart, by as much in every replicate."""
    assert metrics.INTERVAL_BINS == 4096
    monkeypatch.setattr(metrics, "INTERVAL_BINS", 4)
    logits_N = torch.arange(40.0, dtype=torch.float64) * 0.1
    labels_N = (torch.arange(40) >= 25).float()
    resampling = Resampling(40, replicates=50)
    bins = np.arange(40) * 4 // 40
    hidden = 1.0 - roc_auc_score(labels_N, bins)
    expected = [roc_auc_score(labels_N, bins, sample_weight=w.numpy()) + hidden for w in resampling.weights_RG]
    assert resampling.auc(logits_N, labels_N) == pytest.approx(np.clip(expected, 0, 1), abs=1e-9)
    assert max(expected) > 1, "such a replicate is cut at 1"
    assert resampling.auc(-logits_N, labels_N) == pytest.approx(1 - np.clip(expected, 0, 1), abs=1e-9)
    # As many different scores as bins are compared exactly, however many rows each has.
    few_N, clicks_N = torch.tensor([0.0] * 5 + [1.0, 2.0, 3.0]), torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1])
    exact = Resampling(8, replicates=20)
    assert exact.auc(few_N, clicks_N) == pytest.approx(
        [
            roc_auc_score(clicks_N, few_N, sample_weight=w.numpy()) if 0 < (w * clicks_N).sum() < 8 else 0.5
            for w in exact.weights_RG
        ]
    )
