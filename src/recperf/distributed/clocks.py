"""The clocks of several ranks made one: on a host they are the same, between hosts their distance is measured."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

from .world import World

ROUNDS = 16
"""Messages to and fro; the fastest says most about the clocks."""


@dataclass(frozen=True)
class Clock:
    host: str
    """The same on ranks that share a clock."""
    ahead_ns: int = 0
    """To be taken from this rank's moments to make them rank 0's."""
    error_ns: int = 0
    """By how much that may be wrong."""


def host() -> str:
    """This start of this machine: processes that agree in it read one monotonic clock, whatever network they see."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def compared(world: World, *, here: str | None = None, now: Callable[[], int] = monotonic_ns) -> Clock:
    """How this rank's clock stands to rank 0's. Every rank calls it."""
    from torch import distributed

    here = here if here is not None else host()
    hosts: list[str] = [""] * world.size
    distributed.all_gather_object(hosts, here)
    found = Clock(here)
    # One rank after the other: rank 0 answers at once only while it talks to a single one.
    for rank in (rank for rank, other in enumerate(hosts) if other != hosts[0]):
        if world.rank == rank:
            found = _asked(here, now)
        elif world.is_leader:
            _answer(rank, now)
    return found


def _asked(here: str, now: Callable[[], int]) -> Clock:
    import torch
    from torch import distributed

    theirs, best = torch.zeros(1, dtype=torch.int64), Clock(here, 0, 1 << 62)
    for _ in range(ROUNDS):
        sent = now()
        distributed.send(theirs, 0)
        distributed.recv(theirs, 0)
        back = now()
        error = (back - sent) // 2
        if error < best.error_ns:
            best = Clock(here, sent + error - int(theirs), error)
    return best


def _answer(rank: int, now: Callable[[], int]) -> None:
    import torch
    from torch import distributed

    for _ in range(ROUNDS):
        asked = torch.zeros(1, dtype=torch.int64)
        distributed.recv(asked, rank)
        distributed.send(torch.tensor([now()]), rank)
