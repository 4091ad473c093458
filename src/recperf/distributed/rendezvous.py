"""How ranks meet in torchrun's store, also after they were restarted."""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from ..stop import poll

_POLL_S = 0.02


def meet(rank: int, size: int, timeout_s: float, init_method: str) -> Any:
    """The store of the ranks that run now."""
    store, _, _ = next(rendezvous(init_method, rank, size, timeout=timedelta(seconds=timeout_s)))
    prefix = f"recperf/{agree_on_round(store, rank, size, timeout_s)}"
    return distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def connect(backend: str, store: Any, rank: int, size: int, timeout_s: float) -> None:
    """Create the process group of all ranks."""
    timeout = timedelta(seconds=timeout_s)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def collectives(device: str) -> int:
    """The number of collectives that this rank has begun on a device, by NCCL or gloo."""
    backend: Any = distributed.distributed_c10d._get_default_group()._get_backend(torch.device(device))
    return int(backend._get_sequence_number_for_group())


def agree_on_round(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """A name that all ranks running now share and that no earlier ranks used in the same store.

    torchrun keeps its store when it restarts ranks, so they must not read the addresses of the previous ones. Torch
    separates them by the restart count, which differs between hosts: only the torchrun whose rank failed counts. Hence
    each rank leaves a token, rank 0 publishes a round with the tokens it sees, again whenever one changes, and starts
    the round once all ranks in it have confirmed. Ranks that are gone cannot confirm.
    """
    own_token, end, published = uuid.uuid4().hex, time.monotonic() + timeout_s, ""
    store.set(f"recperf/hello/{rank}", own_token)
    hello = [f"recperf/hello/{other}" for other in range(size)]
    tokens: list[str] = []
    while time.monotonic() < end:
        if rank == 0 and store.check(hello):
            seen = [store.get(key).decode() for key in hello]
            if seen != tokens:
                tokens, published = seen, uuid.uuid4().hex
                store.set("recperf/round", json.dumps([published, tokens]))
        if store.check(["recperf/round"]):
            name, members = json.loads(store.get("recperf/round").decode())
            if members[rank : rank + 1] == [own_token]:
                store.set(f"recperf/confirmed/{name}/{rank}", "1")
                if rank == 0 and store.check([f"recperf/confirmed/{name}/{other}" for other in range(size)]):
                    store.set("recperf/go", name)
                if store.check(["recperf/go"]) and store.get("recperf/go").decode() == name:
                    return str(name)
        poll()
        time.sleep(_POLL_S)
    missing = [str(other) for other in range(size) if not store.check([hello[other]])]
    raise TimeoutError(f"rank {', '.join(missing)} did not come" if missing else "a rank that had come is gone")
