"""Ids outside their table on a GPU: a kernel skips them and leaves one in a flag, read where the host waits anyway.

Reading the flag waits for the device, so no op reads it: the training loop calls `raise_if_any` when it reads losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError

_flags: dict[torch.device, Tensor] = {}


def flag(device: torch.device) -> Tensor:
    """Where kernels on the device leave an id outside its table, and the rows of that table."""
    if device not in _flags:
        # The warm-up steps before a CUDA graph is captured make it, so that a graph only holds its address.
        _flags[device] = torch.zeros(2, dtype=torch.int64, device=device)
    return _flags[device]


def raise_if_any(device: torch.device) -> None:
    """Fail if a kernel on the device has met an id outside its table since the last call. Waits for the device."""
    if device not in _flags:
        return
    value, rows = _flags[device].tolist()
    if rows:
        _flags[device].zero_()
        raise ArgumentError(
            f"an id of a batch on {device} is {value}; allowed: 0 to {rows - 1}, the rows of its table",
            fix="check the data; steps since the last check ignored this id",
        )
