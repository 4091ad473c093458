"""Baselines of next items, fitted to training rows with labels: the items before each row are those of its user."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recperf.data.next_item import Targets
from recperf.train import next_item
from recperf.train.linear_items import LinearItems
from recperf.train.row_histories import TrainingRows, by_history


def rows(users: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Users who keep to one of four groups of ten items, in any order of rows."""
    draw = np.random.default_rng(8)
    users_N = np.repeat(np.arange(users), 7)
    items_N = np.concatenate([draw.permutation(10)[:7] + 10 * (user % 4) for user in range(users)])
    times_N, order = draw.permutation(len(users_N)), draw.permutation(len(users_N))
    return tuple(torch.from_numpy(column[order]) for column in (users_N, items_N, times_N))  # type: ignore[return-value]


def test_training_rows_become_sequences_in_the_order_of_time() -> None:
    users_N = torch.tensor([2, 0, 2, 0, 2, 2])
    items_N = torch.tensor([5, 1, 3, 4, 0, 2])
    times_N = torch.tensor([9, 7, 1, 2, 5, 9])
    data = TrainingRows.of(users_N, items_N, times_N, users=4, items=6)
    assert data.offsets_U1.tolist() == [0, 2, 2, 6, 6]
    assert (data.items_E - 1).tolist() == [4, 1, 3, 0, 5, 2]
    without = TrainingRows.of(users_N, items_N, None, users=4, items=6)
    assert (without.items_E - 1).tolist() == [1, 4, 5, 3, 0, 2]
    # The last row of a user with three or more chooses, and is not counted.
    train, chosen = data.train(), data.validation()
    assert (train.users_S.tolist(), train.begins_S.tolist(), train.ends_S.tolist()) == ([0, 2], [0, 2], [2, 5])
    assert (chosen.users_N.tolist(), chosen.positions_N.tolist()) == ([2], [5])


@pytest.mark.parametrize("together", [1, 90, 1 << 22])
def test_pairs_get_the_scores_of_their_users_histories(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_item, "SCORES", together)
    data = TrainingRows.of(*rows(), users=61, items=40)
    scored_users_N = torch.tensor([3, 60, 17, 3, 8])
    rules = by_history(data, scored_users_N)
    assert list(rules) == ["item_to_item", "item_knn", "als", "ease"]
    model = next(option for option in LinearItems.options(data))
    monkeypatch.setattr("recperf.train.linear_items.best", lambda data, options: model)
    rows_P = torch.tensor([0, 0, 1, 2, 2, 2, 4, 3, 0])
    items_P = torch.tensor([1, 39, 5, 0, 11, 12, 7, 1, 39])
    found = rules["ease"](rows_P, items_P)
    users = scored_users_N[rows_P].numpy()
    expected = model(Targets(users, data.offsets_U1[1:][users]))[torch.arange(9), items_P]
    torch.testing.assert_close(found, expected)
    assert float(found[2]) == 0, "a user without training rows"


def test_each_rule_puts_the_items_of_the_users_group_first() -> None:
    users_N, items_N, times_N = rows()
    data = TrainingRows.of(users_N, items_N, times_N, users=60, items=40)
    scored_users_N = torch.arange(8)
    pairs = torch.arange(8).repeat_interleave(40), torch.arange(40).repeat(8)
    own_P = pairs[1] // 10 == pairs[0] % 4
    for name, scorer in by_history(data, scored_users_N).items():
        scores_P = scorer(*pairs).double()
        assert scores_P[own_P].view(8, 10).min(1)[0].gt(scores_P[~own_P].view(8, 30).max(1)[0]).all(), name


def test_nothing_is_fitted_to_users_with_few_rows() -> None:
    data = TrainingRows.of(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0]), None, users=2, items=3)
    assert len(by_history(data, torch.tensor([0]))) == 0
