"""Drawing a batch of made-up samples: `reference` (plain torch, any device), `native` (C, a CPU), `triton` (a GPU).

implementation, why = choose("auto", device)
implementation.draw(plan, index, batch)     # fills the batch for the window whose number `index` holds
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from ...errors import MachineError
from .. import triton_problem
from . import native, reference
from .plan import Plan

__all__ = ["Name", "Plan", "choose"]

Name = Literal["auto", "reference", "native", "triton"]


def choose(name: Name, device: str) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    if name == "reference":
        return reference, "reference: asked for"
    wanted = name
    if name == "auto":
        wanted = "native" if torch.device(device).type == "cpu" else "triton"
    problem = _problem(wanted, torch.device(device))
    if problem and name == "auto":
        return reference, f"reference: {problem}"
    if problem:
        raise MachineError(f"the {name} draw cannot be used: {problem}", fix="draw with reference")
    why = "asked for"
    if name == "auto":
        why = "batches are made on a CPU, and a C compiler" if wanted == "native" else f"batches are made on {device}"
    return _module(wanted), f"{wanted}: {why}"


def _module(name: Name) -> ModuleType:
    if name == "native":
        return native
    from . import triton

    return triton


def _problem(name: Name, device: torch.device) -> str | None:
    if name == "triton":
        return triton_problem.problem(device)
    if device.type != "cpu":
        return f"batches are made on {device.type}"
    found = native.library()
    return found if isinstance(found, str) else None
