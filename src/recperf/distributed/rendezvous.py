"""How ranks meet in torchrun's store, also after they were restarted."""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from ..stop import poll

MOST_HOSTS = 8
"""Hosts that the line about the ranks names."""
_POLL_S = 0.02


def connect(backend: str, init_method: str, rank: int, size: int, timeout_s: float) -> None:
    """Create the process group of all ranks that run now."""
    timeout = timedelta(seconds=timeout_s)
    shared, _, _ = next(rendezvous(init_method, rank, size, timeout=timeout))
    prefix = f"recperf/{agree_on_round(shared, rank, size, timeout_s)}"
    store = distributed.PrefixStore(prefix, shared)  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def members(ranks: list[tuple[str, str]], backend: str) -> str:
    """A line that says which hosts and devices take part, from those of each rank, and what connects them."""
    places = []
    for (host, device), group in itertools.groupby(range(len(ranks)), key=ranks.__getitem__):
        first, *others = group
        places.append(f"{first}{f' to {others[-1]}' if others else ''} on {host} ({device})")
    more = f"; {len(places) - MOST_HOSTS} more hosts" if len(places) > MOST_HOSTS else ""
    interfaces = {name: os.environ.get(f"{name.upper()}_SOCKET_IFNAME") for name in ("gloo", "nccl") if name in backend}
    network = " and ".join(f"{name} on {interface}" if interface else name for name, interface in interfaces.items())
    return f"{len(ranks)} ranks by {network}: {'; '.join(places[:MOST_HOSTS])}{more}"


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
