"""The softmax loss of the next-item model, and its gradients, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from recperf.models.next_item import softmax

TEMPERATURE = 0.05


@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_loss_and_gradients_are_those_of_cross_entropy(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are scored in several parts; some drawn items are the target, which must not count twice."""
    monkeypatch.setitem(softmax.SCORES, "cpu", 100)
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=1)  # noqa: E731
    users_TD, items_ID = draw(37, 8).requires_grad_(), draw(19, 8).requires_grad_()
    targets_T = torch.randint(19, (37,), generator=generator)
    if loss == "full":
        scores = users_TD @ items_ID.T / TEMPERATURE
        ours = softmax.full_loss(users_TD, items_ID, targets_T, TEMPERATURE)
        expected = F.cross_entropy(scores, targets_T)
    else:
        drawn_K = torch.randint(19, (11,), generator=generator)
        same_TK = targets_T[:, None] == drawn_K
        assert same_TK.any()
        ours = softmax.sampled_loss(users_TD, items_ID[targets_T], items_ID[drawn_K], same_TK, TEMPERATURE)
        own = (users_TD * items_ID[targets_T]).sum(1, keepdim=True)
        drawn = (users_TD @ items_ID[drawn_K].T).masked_fill(same_TK, -torch.inf)
        zeros = torch.zeros(37, dtype=torch.int64)
        expected = F.cross_entropy(torch.cat([own, drawn], 1) / TEMPERATURE, zeros)
    gradients = torch.autograd.grad(ours * 3, [users_TD, items_ID])
    theirs = torch.autograd.grad(expected * 3, [users_TD, items_ID])
    torch.testing.assert_close([ours, *gradients], [expected, *theirs])
