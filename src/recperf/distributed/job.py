"""The job that this rank belongs to, torchrun's, or that of `recperf run --ranks`, which uses the same agent: where its
ranks meet, also after they were restarted, and how they ended.

The agent names an error file for each rank, <job>/attempt_<n>/<local rank>/error.json, in TORCHELASTIC_ERROR_FILE. A
rank records there how it ended, in torch's format, so that torchrun prints it. Beside the attempts lies the path of the
run, so that ranks that are restarted resume it. Ranks that were started by hand have no such folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..jsonfile import load
from ..stop import poll

LAUNCHER = "recperf-ranks-"
"""Prefix of the job ids of `recperf run --ranks`, whose launcher reports how ranks ended."""
MOST_HOSTS = 8
"""Hosts that the line about the ranks names."""
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a rank ended."""

    code: int
    lost: bool = False
    """Whether it only lost another rank, which closed its connection or did not answer in time."""
    collective: str = ""
    """Where it waited for that rank."""
    waited_s: float = 0.0
    """How long it waited there; 0 where the connection was closed."""
    out_of_memory: bool = False
    message: str = ""
    time: float = field(default_factory=time.time)


def job() -> str:
    """torchrun's id of its job, the same on all hosts; empty where torchrun did not start this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def launched() -> bool:
    """Whether `recperf run --ranks` started this rank, and reports how it ended."""
    return job().startswith(LAUNCHER)


def restarted() -> bool:
    """Whether torchrun has restarted the ranks of this host; an agent counts only failures of its own ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def same_job(other: str) -> bool:
    """Whether a recorded job id means this job. torchrun calls every job without --rdzv-id "none"."""
    return bool(other) and other == job() and (other != "none" or restarted())


def _error_file() -> Path | None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(path) if path else None


def meeting() -> str:
    """Where ranks meet: in a file that only this user can read, if `recperf run --ranks` started them, else in
    torchrun's store."""
    path = _error_file()
    return f"file://{path.parents[1] / 'store'}" if launched() and path else "env://"


def record_exit(end: Exit) -> None:
    """Write how this rank ends to its error file."""
    path = _error_file()
    if path is not None:
        details = {"message": end.message, "extraInfo": {"timestamp": str(int(end.time)), "recperf": asdict(end)}}
        with contextlib.suppress(OSError):
            _replace(path, json.dumps({"message": details}))


def read_exit(path: Path) -> Exit | None:
    """How the rank of an error file ended; None where it could not say."""
    try:
        return Exit(**load(path)["message"]["extraInfo"]["recperf"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def remember_run(run: Path) -> None:
    """Record on this host which run the job is at."""
    path = _error_file()
    if path is not None:
        with contextlib.suppress(OSError):
            _replace(path.parents[2] / "run", str(run.resolve()))


def remembered_run() -> Path | None:
    """The run that the ranks of this job on this host were at before they were restarted."""
    path = _error_file()
    try:
        return Path((path.parents[2] / "run").read_text()) if path else None
    except (OSError, ValueError):
        return None


def forget_run() -> None:
    """The run of this job on this host is finished: a program may begin another one with the same config."""
    path = _error_file()
    if path is not None:
        with contextlib.suppress(OSError):
            (path.parents[2] / "run").unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    # Several ranks of a host may write the same file.
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(text)
    draft.replace(path)


def connect(backend: str, init_method: str, rank: int, size: int, timeout_s: float) -> None:
    """Create the process group of all ranks that run now."""
    from datetime import timedelta

    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=timeout_s)
    shared, _, _ = next(rendezvous(init_method, rank, size, timeout=timeout))
    prefix = f"recperf/{agree_on_round(shared, rank, size, timeout_s)}"
    store = distributed.PrefixStore(prefix, shared)  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def members(ranks: list[tuple[str, str]], backend: str) -> str:
    """A line that says which hosts and devices take part, from those of each rank, and what connects them."""
    hosts = []
    for (host, device), group in itertools.groupby(range(len(ranks)), key=ranks.__getitem__):
        first, *others = group
        hosts.append(f"{first}{f' to {others[-1]}' if others else ''} on {host} ({device})")
    more = f"; {len(hosts) - MOST_HOSTS} more hosts" if len(hosts) > MOST_HOSTS else ""
    interfaces = {name: os.environ.get(f"{name.upper()}_SOCKET_IFNAME") for name in ("gloo", "nccl") if name in backend}
    network = " and ".join(f"{name} on {interface}" if interface else name for name, interface in interfaces.items())
    return f"{len(ranks)} ranks by {network}: {'; '.join(hosts[:MOST_HOSTS])}{more}"


def agree_on_round(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """A name that all ranks running now share and that no earlier ranks used in the same store.

    torchrun keeps its store when it restarts ranks, so they must not read the addresses of the previous ones. Torch
    separates them by the restart count, which differs between hosts: only the torchrun whose rank failed counts. Hence
    each rank leaves a token, rank 0 publishes a round with the tokens it sees, again whenever one changes, and starts
    the round once all ranks in it have confirmed. Ranks that are gone cannot confirm.
    """
    own_token, end, published = os.urandom(16).hex(), time.monotonic() + timeout_s, ""
    store.set(f"recperf/hello/{rank}", own_token)
    hello = [f"recperf/hello/{other}" for other in range(size)]
    tokens: list[str] = []
    while time.monotonic() < end:
        if rank == 0 and store.check(hello):
            seen = [store.get(key).decode() for key in hello]
            if seen != tokens:
                tokens, published = seen, os.urandom(16).hex()
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
