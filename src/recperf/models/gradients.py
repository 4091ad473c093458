"""Keeping gradients of written-out backward passes."""

from __future__ import annotations

from torch import Tensor


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient as autograd would: the optimizer clears it, and until then it grows.

    The first gradient is kept, not copied: it must be nobody else's.
    """
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
