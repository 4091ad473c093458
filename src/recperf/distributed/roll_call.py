"""Who is gone, found out by the ranks that are left, where no launcher of ours looks after them.

The agent of torchrun keeps the store in which ranks met, so it outlives them. Each rank that lost the others answers
there, with what it can read of its neighbours; whoever does not answer within some seconds is gone or hangs.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from . import notes
from .world import World

ANSWER_S = 3.0
"""Seconds in which ranks answer."""
_EVERY_S = 0.1


@dataclass(frozen=True)
class Lacking:
    """A rank that did not answer, and what it was seen doing last."""

    rank: int
    note: notes.Note


def answer(world: World, *, said: bool) -> list[Lacking]:
    """Answer the call, and get the ranks that do not where this one is to name them. `said`: it told why it ends."""
    if not _store_answers():
        return [] if said else _of_other_hosts(world)
    try:
        return _answer(world, said)
    except Exception:
        # The store went with the rank or the host that kept it; torch has several errors for that.
        return []


def _store_answers() -> bool:
    """Whether the host that keeps the store is there: asked in vain, the store itself would wait without an end."""
    place = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    try:
        socket.create_connection(place, timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _of_other_hosts(world: World) -> list[Lacking]:
    """Where a host went with the store, or the network between: each host's first rank names what it cannot reach."""
    if world.local_rank:
        return []
    here = range(world.rank, world.rank + world.local_size)
    unknown = notes.Note(doing="not known: the host on which the ranks met does not answer")
    return [Lacking(rank, unknown) for rank in range(world.size) if rank not in here]


def _answer(world: World, said: bool) -> list[Lacking]:
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    store.set(_key(world.rank), json.dumps({"said": said, "seen": _seen(world)}))
    if said:
        return []
    end, ranks = time.monotonic() + ANSWER_S, range(world.size)
    answered: dict[int, dict[str, Any]] = {}
    while len(answered) < world.size and time.monotonic() < end:
        for rank in ranks:
            if rank not in answered and store.check([_key(rank)]):
                answered[rank] = json.loads(store.get(_key(rank)))
        time.sleep(_EVERY_S)
    if world.rank != min(answered) or any(found["said"] for found in answered.values()):
        return []
    seen = {int(rank): notes.Note(*told) for found in answered.values() for rank, told in found["seen"].items()}
    unknown = notes.Note(doing="not known: it was alone on its host")
    return [Lacking(rank, seen.get(rank, unknown)) for rank in ranks if rank not in answered]


def _key(rank: int) -> str:
    return f"recperf/ended/{rank}"


def _seen(world: World) -> dict[int, list[Any]]:
    """What the ranks of this host did last."""
    place = notes.folder()
    if place is None:
        return {}
    found = {rank: notes.noted(place, rank) for rank in range(world.size)}
    return {rank: [note.process, note.doing, note.span] for rank, note in found.items() if note.process}
