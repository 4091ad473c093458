"""Embedding bags and their sparse update: `reference` (plain torch, any device) and `native` (C, on a CPU).

implementation = choose("auto", table)
pooled = implementation.bag_sum(table, rows, offsets)
grouped = implementation.Grouped(rows, offsets, table.shape[0])
implementation.update(table, state, grouped, gradient, rate=..., eps=..., decay=..., scale=...)
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from ...errors import MachineError
from . import native, reference

Name = Literal["auto", "reference", "native"]


def choose(name: Name, table: Tensor) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    if name == "reference":
        return reference, "reference: asked for"
    problem = _problem(table)
    if name == "native":
        if problem:
            raise MachineError(f"the native bag cannot be used: {problem}", fix="--model.bag reference")
        return native, "native: asked for"
    if problem:
        return reference, f"reference: {problem}"
    return native, "native: a float32 table on a CPU, and a C compiler"


def _problem(table: Tensor) -> str | None:
    if table.device.type != "cpu":
        return f"the table is on {table.device.type}"
    if table.dtype != torch.float32:
        return f"the table is {table.dtype}"
    found = native.library()
    return found if isinstance(found, str) else None
