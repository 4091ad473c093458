"""What a profile of several ranks needs beside that of one."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed.world import current
from ..measure.peaks.other_work import OtherWork


def of_slowest(found: dict[str, Any], value: Any) -> Any:
    """What the slowest rank of a window has, on every rank."""
    world = current()
    if world.size == 1:
        return value
    from ..distributed.window import from_rank

    return from_rank(world, found["communication"]["slowest"], value)


def share_of_others(other_work: OtherWork) -> float | None:
    """What processes used that are no ranks; none where ranks of other hosts hide which those are."""
    world = current()
    if world.size == 1:
        return other_work.share()
    used = float(world.sum_(torch.tensor([other_work.own_seconds()], dtype=torch.float64)))
    return other_work.share(used) if world.local_size == world.size else None


def about(run: str) -> dict[str, Any]:
    """Whose trace it is: ranks of one run are told from those of another, and ranks with one clock from others."""
    world = current()
    if world.size == 1:
        return {"run": run}
    from ..distributed.clocks import host

    return {"run": run, "rank": world.rank, "ranks": world.size, "host": host()}
