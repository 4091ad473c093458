"""Embedding bags and their sparse update: `reference` (plain torch, any device), `native` (C, on a CPU) and `triton`
(one GPU, all tables in one launch).

implementation, why = choose("auto", table)
pooled = implementation.bag_sum(table, ids, offsets, starts)
grouped = implementation.Grouped(ids, offsets, table.shape[0], starts)
implementation.update(table, state, grouped, gradient, rate=..., eps=..., decay=..., scale=...)

`starts` are where the tables of the features begin when several are stacked in one; none: ids are rows already.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from ...errors import MachineError
from .. import triton_problem
from . import native, reference

Name = Literal["auto", "reference", "native", "triton"]


def choose(name: Name, table: Tensor) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    if name == "reference":
        return reference, "reference: asked for"
    if name == "auto":
        name = "native" if table.device.type == "cpu" else "triton"
        problem = _problem(name, table)
        if problem:
            return reference, f"reference: {problem}"
        fits = "on a CPU, and a C compiler" if name == "native" else f"on {table.device.type}, and triton"
        return _module(name), f"{name}: a float32 table {fits}"
    problem = _problem(name, table)
    if problem:
        raise MachineError(f"the {name} bag cannot be used: {problem}", fix="--model.bag reference")
    return _module(name), f"{name}: asked for"


def _module(name: Name) -> ModuleType:
    if name == "native":
        return native
    from . import triton

    return triton


def _problem(name: Name, table: Tensor) -> str | None:
    if table.dtype != torch.float32:
        return f"the table is {table.dtype}"
    if name == "triton":
        return triton_problem.problem(table.device)
    if table.device.type != "cpu":
        return f"the table is on {table.device.type}"
    found = native.library()
    return found if isinstance(found, str) else None
