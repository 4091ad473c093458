"""The same for many tensors in one launch: `reference` (torch's own functions for lists) and `triton` (a GPU), which
uses all of a GPU where torch's kernels, made for larger lists, use a part of it.

implementation = body(device)
implementation.copy(targets, sources)              # a target may be wider than its source, and of another type
implementation.descend(parameters, gradients, rate)
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from .. import choice
from . import reference

choose = functools.partial(choice.choose, __name__, fix="--fast.mlp plain")


def body(device: torch.device) -> ModuleType:
    """The implementation for a device; on a CPU without asking, which would take longer than a small step."""
    return choose("auto", device)[0] if device.type == "cuda" else reference
