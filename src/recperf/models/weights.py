"""Copies weights under the names of another implementation into a model; everything is checked before that."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import DataError


def require_same(ours: Mapping[str, Tensor], loaded: Mapping[str, Tensor], *, fix: str) -> None:
    """Fail unless both have the same parameters, each with the same shape."""
    if ours.keys() != loaded.keys():
        missing, unknown = sorted(ours.keys() - loaded.keys()), sorted(loaded.keys() - ours.keys())
        raise DataError(
            f"the weights belong to another model: {len(missing)} parameters are missing{_first(missing)}, "
            f"{len(unknown)} are unknown{_first(unknown)}",
            fix=fix,
        )
    for name, tensor in ours.items():
        if tensor.shape != loaded[name].shape:
            raise DataError(f"{name} has shape {tuple(loaded[name].shape)}, the model {tuple(tensor.shape)}", fix=fix)


@torch.no_grad()
def copy_weights(ours: Mapping[str, Tensor], loaded: Mapping[str, Tensor], *, fix: str) -> None:
    """Copy values into tensors of the same names."""
    require_same(ours, loaded, fix=fix)
    for name, tensor in ours.items():
        tensor.copy_(loaded[name])


def _first(names: list[str]) -> str:
    return f" (first: {names[0]})" if names else ""
