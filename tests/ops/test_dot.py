"""Every implementation of the dot interaction: plain loops, autograd, and the kernels by Triton's interpreter."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from recperf.ops.dot import reference

ALL = ["reference", "native", "triton"]
SHAPES = [(1, 1, 1), (2, 4, 0), (3, 7, 5), (26, 33, 1), (15, 3, 4), (16, 5, 3)]
"""Sparse vectors, width, samples: also exactly and just over a power of two vectors."""


def body(name: str) -> ModuleType:
    return importlib.import_module(f"recperf.ops.dot.{name}")


def vectors(features: int, dim: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(features + dim)
    return torch.randn(samples, dim, generator=draw), torch.randn(features, samples, dim, generator=draw)


def pair_by_pair(dense: torch.Tensor, sparse: torch.Tensor, *, diagonal: bool) -> torch.Tensor:
    """As the public DLRM lists them: (1,0), (2,0), (2,1) ..., with the diagonal (0,0), (1,0), (1,1) ..."""
    rows = [dense, *sparse]
    columns = [dense]
    for i in range(len(rows)):
        for j in range(i + 1 if diagonal else i):
            columns.append((rows[i] * rows[j]).sum(1, keepdim=True))
    return torch.cat(columns, dim=1)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("features", "dim", "samples"), SHAPES)
@pytest.mark.parametrize("implementation", ALL)
def test_values_and_gradients_are_those_of_pairs(
    implementation: str, features: int, dim: int, samples: int, diagonal: bool
) -> None:
    dense, sparse = vectors(features, dim, samples)
    dense.requires_grad_()
    sparse.requires_grad_()
    expected = pair_by_pair(dense, sparse, diagonal=diagonal)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(gradient)
    it = body(implementation)
    met, saved = it.forward(dense.detach(), sparse.detach(), diagonal=diagonal)
    torch.testing.assert_close(met, expected.detach(), rtol=1e-5, atol=1e-5)
    to_dense, to_sparse = it.backward(saved, gradient, diagonal=diagonal)
    torch.testing.assert_close(to_dense, dense.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(to_sparse, sparse.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("implementation", ALL)
def test_zeros_fill_the_output_up_to_a_width_and_their_gradient_goes_nowhere(
    implementation: str, diagonal: bool
) -> None:
    more = 7
    dense, sparse = vectors(3, 5, 4)
    it = body(implementation)
    exact, saved = it.forward(dense, sparse, diagonal=diagonal)
    width = exact.shape[1] + more
    filled, filled_saved = it.forward(dense, sparse, diagonal=diagonal, width=width)
    assert torch.equal(filled, torch.cat([exact, torch.zeros(4, more)], dim=1))
    gradient = torch.randn(4, width, generator=torch.Generator().manual_seed(1))
    expected = it.backward(saved, gradient[:, : width - more], diagonal=diagonal)
    for mine, theirs in zip(it.backward(filled_saved, gradient, diagonal=diagonal), expected):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("implementation", ALL)
def test_a_bfloat16_layer_meets_float32_tables(implementation: str) -> None:
    """The output has the layer's type (float32 from C), the gradient of the tables theirs; sums are in float32."""
    dense, sparse = vectors(3, 8, 4)
    low = dense.to(torch.bfloat16)
    it = body(implementation)
    met, saved = it.forward(low, sparse, diagonal=False)
    expected = pair_by_pair(low.float(), sparse, diagonal=False)
    kind = torch.float32 if implementation == "native" else torch.bfloat16
    assert met.dtype == kind
    # Half a bit by rounding; the interpreter cuts off instead, which costs a whole one.
    torch.testing.assert_close(met.float(), expected, rtol=2**-7, atol=1e-6)
    gradient = torch.randn(met.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    to_dense, to_sparse = it.backward(saved, gradient, diagonal=False)
    assert (to_dense.dtype, to_sparse.dtype) == (kind, torch.float32)
    _, exact = reference.forward(low.float(), sparse, diagonal=False)
    wanted_dense, wanted_sparse = reference.backward(exact, gradient.float(), diagonal=False)
    torch.testing.assert_close(to_dense.float(), wanted_dense, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(to_sparse, wanted_sparse, rtol=1e-5, atol=1e-5)
