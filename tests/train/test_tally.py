"""Metrics from sums alone: they are those of the predictions themselves, and add up in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from recperf.train.metrics import Tally, auc, normalized_entropy


def predictions(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, generator=draw, dtype=torch.float64) * 2
    return logits, (torch.rand(count, generator=draw) < (logits - 0.5).sigmoid()).float()


def tally(logits: torch.Tensor, labels: torch.Tensor, parts: int = 1) -> Tally:
    found = Tally()
    for some, few in zip(logits.chunk(parts), labels.chunk(parts)):
        found.add(some, few)
    return found


def test_it_says_what_scikit_learn_says() -> None:
    logits, labels = predictions(4000, 1)
    found = tally(logits, labels).metrics()
    assert found is not None
    p = logits.sigmoid()
    # The same bins: then the AUC is exact, ties and all.
    binned = (p * 100_000).floor().numpy()
    assert found["auc"] == pytest.approx(roc_auc_score(labels.numpy(), binned), abs=1e-12)
    assert found["log_loss"] == pytest.approx(log_loss(labels.numpy(), p.numpy()), rel=1e-12)
    assert found["accuracy"] == float(((p > 0.5) == (labels > 0)).double().mean())
    rate = float(labels.mean())
    base = log_loss(labels.numpy(), np.full(4000, rate))
    assert found["normalized_entropy"] == pytest.approx(found["log_loss"] / base, rel=1e-7)


def test_bins_cost_little_of_the_exact_auc() -> None:
    logits, labels = predictions(20_000, 2)
    assert tally(logits, labels).auc() == pytest.approx(auc(logits, labels), abs=1e-5)


@given(st.lists(st.tuples(st.sampled_from([-3.0, -0.1, 0.0, 0.1, 2.0, 50.0]), st.booleans()), max_size=60))
def test_ties_count_half(rows: list[tuple[float, bool]]) -> None:
    logits = torch.tensor([logit for logit, _ in rows], dtype=torch.float64)
    labels = torch.tensor([float(label) for _, label in rows])
    assert tally(logits, labels).auc() == pytest.approx(auc(logits, labels), abs=1e-12)


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


def test_a_state_brings_it_all_back() -> None:
    kept = tally(*predictions(500, 4))
    other = tally(*predictions(50, 5))
    other.load(kept.state())
    assert torch.equal(other.counts_2K, kept.counts_2K)
    assert other.metrics() == kept.metrics()
    kept.clear()
    assert kept.metrics() is None
    assert other.metrics() is not None


def test_what_cannot_be_told() -> None:
    assert Tally().metrics() is None
    one_class = tally(torch.tensor([0.3, -2.0]), torch.tensor([1.0, 1.0])).metrics()
    assert one_class is not None
    assert one_class["auc"] == 0.5
    assert one_class["normalized_entropy"] == 1.0
    assert normalized_entropy(0.3, 0.0) == 1.0
    assert normalized_entropy(math.log(2), 0.5) == pytest.approx(1.0)


def test_a_logit_that_is_no_number_does_no_harm() -> None:
    found = tally(torch.tensor([math.nan, 1.0, math.inf]), torch.tensor([1.0, 0.0, 1.0]))
    assert float(found.counts_2K.sum()) == 3
