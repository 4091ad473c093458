"""The backward pass of a ReLU and of its bias: autograd's numbers by every implementation."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from recperf.ops.mlp import native

ALL = ["reference", "native", "triton"]


def body(name: str) -> ModuleType:
    return importlib.import_module(f"recperf.ops.mlp.{name}")


def layer(samples: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gradient, what came out of the ReLU, and autograd's gradients of its input and of the bias."""
    draw = torch.Generator().manual_seed(samples + outputs)
    before = torch.randn(samples, outputs, generator=draw)
    before[::3, ::2] = 0.0
    before.requires_grad_()
    bias = torch.zeros(outputs, requires_grad=True)
    after = (before + bias).relu()
    gradient = torch.randn(samples, outputs, generator=draw)
    after.backward(gradient)
    assert before.grad is not None
    assert bias.grad is not None
    return gradient, after.detach(), before.grad, bias.grad


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("samples", "outputs"), [(1, 1), (1, 63), (63, 1), (63, 65), (64, 64), (65, 7), (200, 130)])
@pytest.mark.parametrize("implementation", ALL)
def test_gradients_are_autograds(implementation: str, samples: int, outputs: int) -> None:
    gradient, after, expected, bias = layer(samples, outputs)
    got, stripes = body(implementation).backward(gradient, after)
    assert torch.equal(got, expected)
    torch.testing.assert_close(stripes.sum(0), bias, rtol=1e-5, atol=1e-5)


BELOW = [
    *(("outer_backward", samples, 1, outputs) for samples, outputs in ((1, 1), (63, 65), (65, 7), (130, 64))),
    *(("product_backward", *shape) for shape in ((1, 2, 1), (63, 65, 130), (130, 7, 64), (200, 128, 129))),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("function", "samples", "above", "outputs"), BELOW)
@pytest.mark.parametrize("implementation", ALL)
def test_below_another_layer_the_gradient_is_a_product(
    implementation: str, function: str, samples: int, above: int, outputs: int
) -> None:
    draw = torch.Generator().manual_seed(samples)
    slope, weight = torch.randn(samples, above, generator=draw), torch.randn(above, outputs, generator=draw)
    before = torch.randn(samples, outputs, generator=draw, requires_grad=True)
    after = before.relu()
    (after @ weight.t()).backward(slope)
    assert before.grad is not None
    got, stripes = getattr(body(implementation), function)(slope, weight, after.detach())
    torch.testing.assert_close(got, before.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stripes.sum(0), before.grad.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("implementation", ALL)
def test_the_bias_of_a_bfloat16_layer_is_summed_in_float32(implementation: str) -> None:
    """300 ones are 300; a sum in bfloat16 would stop at 256."""
    ones = torch.ones(300, 2, dtype=torch.bfloat16)
    got, stripes = body(implementation).backward(ones, ones)
    assert got.dtype == torch.bfloat16
    assert stripes.dtype == torch.float32
    assert stripes.sum(0).tolist() == [300.0, 300.0]


@pytest.mark.usefixtures("native_code")
@pytest.mark.usefixtures("poisoned")
def test_c_works_in_place_and_gives_equal_bits_with_any_number_of_threads(threads: Any) -> None:
    actual = []
    for count in (1, 2, 3, 8):
        threads(count)
        gradient, after, expected, _ = layer(200, 130)
        got, stripes = native.backward(gradient, after)
        assert got.data_ptr() == gradient.data_ptr()
        assert torch.equal(got, expected)
        actual.append(stripes)
    assert actual[0].shape == (4, 130)
    assert all(torch.equal(stripes, actual[0]) for stripes in actual)
