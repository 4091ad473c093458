"""The last layer with its loss: autograd's numbers by every implementation."""

from __future__ import annotations

import importlib

import pytest
import torch

from recperf.models.mlp import make_loss
from recperf.ops.mlp import reference as many

LOSSES = {"bce": (1.0, 1.0), "wbce": (0.5, 2.0), "mse": (1.0, 1.0)}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("samples", "inputs"), [(1, 1), (63, 65), (17, 1024), (33, 7)])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_loss_and_gradients_are_autograds(implementation: str, name: str, samples: int, inputs: int) -> None:
    draw = torch.Generator().manual_seed(samples)
    before = torch.randn(samples, inputs, generator=draw)
    weight, bias = torch.randn(1, inputs, generator=draw) / inputs**0.5, torch.randn(1, generator=draw)
    labels = (torch.rand(samples, generator=draw) < 0.5).float()
    leaves = [tensor.requires_grad_() for tensor in (before, weight, bias)]
    criterion = make_loss(name, LOSSES[name])
    logits = (before.relu() @ weight.t() + bias).squeeze(1)
    value = criterion.value(logits, labels)
    value.backward()  # type: ignore[no-untyped-call]
    body = importlib.import_module(f"recperf.ops.mlp.{implementation}")
    with torch.no_grad():
        end = body.forward_backward(before.relu(), weight, bias, labels, criterion.kind, criterion.weights)
        half = end.scaled(0.5)
    expected = [leaf.grad for leaf in leaves]
    assert expected[0] is not None
    actual = [
        (end.logits_B, logits),
        (end.loss_S.sum(), value),
        (end.to_input_BN, expected[0]),
        (end.to_input_bias_SN.sum(0), expected[0].sum(0)),
        (end.to_weight_SN.sum(0, keepdim=True), expected[1]),
        (end.to_bias_S.sum().view(1), expected[2]),
        (2 * half.to_weight_SN, end.to_weight_SN),
        (2 * half.to_input_BN, end.to_input_BN),
    ]
    for got, wanted in actual:
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("triton", "poisoned")
def test_many_tensors_are_copied_and_updated_in_one_launch() -> None:
    fused = importlib.import_module("recperf.ops.mlp.triton")
    draw = torch.Generator().manual_seed(1)
    shapes = [(5, 7), (3000,), (1,), (0, 4), (70, 70), *[(3,)] * fused.AT_ONCE]
    sources = [torch.randn(shape, generator=draw) for shape in shapes]
    wider = [(*one.shape[:-1], one.shape[-1] + 2 * (one.dim() - 1)) for one in sources]
    targets = [[torch.full(shape, 9.0) for shape in wider] for _ in range(2)]
    parameters = [[one.clone() for one in sources] for _ in range(2)]
    for body, to, mine in zip((fused, many), targets, parameters):
        body.copy(to, sources)
        body.descend(mine, sources, torch.tensor([0.1]))
    for got, expected in zip(targets[0], targets[1]):
        assert torch.equal(got, expected)
    for got, expected in zip(parameters[0], parameters[1]):
        torch.testing.assert_close(got, expected)
