from __future__ import annotations

import pytest
import torch

from recperf.models.losses import make

LOSSES = [("bce", (1.0, 1.0)), ("wbce", (0.3, 2.5)), ("wbce", (0.0, 1.0)), ("mse", (1.0, 1.0))]


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = torch.cat([torch.randn(61, generator=draw) * 4, torch.tensor([30.0, -30.0])])
    return logits, (torch.rand(63, generator=draw) < 0.4).float()


@pytest.mark.parametrize(("name", "weights"), LOSSES)
def test_the_slope_is_autograds(name: str, weights: tuple[float, float]) -> None:
    loss = make(name, weights)
    logits, labels = drawn()
    leaf = logits.clone().requires_grad_()
    loss.value(leaf, labels).backward()
    torch.testing.assert_close(loss.slope(logits, labels), leaf.grad, rtol=1e-5, atol=1e-8)


def test_the_slope_leaves_its_arguments_alone() -> None:
    for name, weights in LOSSES:
        logits, labels = drawn()
        make(name, weights).slope(logits, labels)
        assert torch.equal(logits, drawn()[0])
        assert torch.equal(labels, drawn()[1])


def test_values_by_hand() -> None:
    logits, labels = torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0])
    first, second = 0.6931472, 0.1269280
    assert float(make("bce").value(logits, labels)) == pytest.approx((first + second) / 2, rel=1e-6)
    # A mean over samples: doubling every weight doubles the loss.
    assert float(make("wbce", (2.0, 2.0)).value(logits, labels)) == pytest.approx(first + second, rel=1e-6)
    assert float(make("wbce", (3.0, 0.5)).value(logits, labels)) == pytest.approx(1.5 * first + 0.25 * second, rel=1e-6)
    assert float(make("mse").value(logits, labels)) == pytest.approx((0.25 + 0.1192029**2) / 2, rel=1e-6)
