"""How a rank ends: its exit code, and one message from all ranks together when something fails.

A rank that only lost the others prints nothing under `recperf run --ranks`: the rank that failed first has printed why,
or was killed, which the launcher sees. torchrun's agent prints no last span and knows nothing of other hosts, so under
torchrun the remaining ranks find out by a roll call who is missing, and one of them names it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError, GateFailed, Interrupted, MachineError, RecperfError, Stopped, UsageError
from ..machine import memory_error, out_of_memory
from ..stop import FLAG
from . import progress
from .heartbeat import ENDED, FAILED, LEFT
from .progress import Exit, Progress
from .world import RendezvousError, World

LINGER_S = 5.0
"""Seconds that a rank which lost the others waits to be ended, lest the agent take it for the rank that failed."""
ANSWER_S = 3.0
"""Seconds that ranks have to answer a roll call."""
_POLL_S = 0.1
_PEER_FAILURE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|gloo|nccl|process group|"
    r"failed to (connect|recv|send)|socket|pair closure",
    re.IGNORECASE,
)
_TIMEOUT = re.compile("timed out|timeout", re.IGNORECASE)
_ending = threading.Lock()
"""Held by the thread that ends this process: the rank's own, or the one that watches the others."""
_SAME_ON_ALL = (ConfigError, UsageError, GateFailed, Stopped, Interrupted)
"""Errors that every rank raises by itself, from what all ranks know."""
Report = Callable[[RecperfError], None]


def run_as_rank(world: World, work: Callable[[], int], report: Report) -> int:
    """Be one rank: do the work and return its exit code; `report` prints an error."""
    # Torch prints a native stack for every request to a store that is gone; a message says which ranks are.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    progress.begin(several=world.size > 1)
    world.on_lost = functools.partial(_end_lost, world, report)
    state = ENDED
    try:
        end = Exit(code=work())
    except SystemExit:
        raise
    except BaseException as error:
        with _ending:
            end = _failure(world, error, report)
        # A signal that ranks have not agreed on stops this one alone.
        alone = isinstance(error, Stopped | Interrupted) and world.joined and world.signal is None
        state = ENDED if isinstance(error, _SAME_ON_ALL) and not alone else FAILED
    finally:
        # The process group is not destroyed: that would wait for ranks that may be gone.
        world.joined = False
    _leave(world, end, state)
    if state == FAILED and "nccl" in world.backend:
        # The interpreter's end would wait for collectives of NCCL that others never join.
        _exit_now(end.code)
    return end.code


def _leave(world: World, end: Exit, state: str) -> None:
    """Record how this rank ended."""
    if world.heartbeat is not None:
        world.heartbeat.stop(state)
    progress.record_exit(end)
    if end.lost == "gone" and progress.launched():
        time.sleep(LINGER_S)


def _end_lost(world: World, report: Report, missing: dict[int, Progress] | None, cause: str) -> None:
    """End this process, which waits for ranks that are missing; called in a thread. If none is missing, one has failed
    and has reported it; None: the store is gone, so nothing is known of any rank."""
    with _ending:
        lost, reports = "gone" if missing == {} else "silent", False
        if missing is None:
            reports, missing = world.local_rank == 0, _other_hosts(world)
        elif missing and world.heartbeat:
            reports = world.heartbeat.reports(missing)
        if reports and not progress.launched():
            _report_missing(world, missing, cause, report)
        end = Exit(code=MachineError.exit_code, lost=lost, message=cause)
        _leave(world, end, FAILED if reports or lost == "gone" else LEFT)
        _exit_now(end.code)


def _exit_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error only says that another rank went away. Our own errors may have such words in a path."""
    return isinstance(error, RuntimeError) and not out_of_memory(error) and bool(_PEER_FAILURE.search(str(error)))


def _failure(world: World, error: BaseException, report: Report) -> Exit:
    if world.joined and is_peer_failure(error) and FLAG.received is not None and progress.launched():
        # The others received the signal too and were faster. torchrun also signals ranks when another one has failed.
        error = FLAG.error()
    text = " ".join(error.lines()) if isinstance(error, RecperfError) else f"{type(error).__name__}: {error}"
    if world.joined and is_peer_failure(error):
        if not progress.launched():
            _name_missing(world, text, report)
        lost = "silent" if _TIMEOUT.search(text) else "gone"
        return Exit(code=MachineError.exit_code, lost=lost, message=text[:200])
    code = _report_own(world, error, text, report)
    if world.joined and not progress.launched():
        roll_call(world, reported=True)
    return Exit(code=code, out_of_memory=out_of_memory(error), message=text[:200])


def _report_own(world: World, error: BaseException, text: str, report: Report) -> int:
    """Report this rank's own failure, unless rank 0 reports the same one."""
    if out_of_memory(error):
        last = progress.read_progress(progress.folder()) or Progress()
        report(memory_error(error, rank=world.rank, **last.facts))
        return MachineError.exit_code
    if isinstance(error, RendezvousError):
        # Hosts that do not meet cannot agree on who reports it.
        if world.local_rank == 0:
            report(error)
        return error.exit_code
    if isinstance(error, RecperfError):
        same = isinstance(error, _SAME_ON_ALL) or not world.joined or error is world.shared_error
        # Before the ranks have met, a host reports what is wrong with itself.
        here = world.local_rank == 0 and not world.joined and isinstance(error, MachineError)
        if world.is_leader or here or not same:
            error.where = error.where if same else {**error.where, "rank": str(world.rank)}
            report(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    traceback.print_exception(error)
    report(RecperfError(f"a fault in recperf itself: {text}", where={"rank": world.rank}))
    return 1


def _name_missing(world: World, text: str, report: Report) -> None:
    """Under torchrun: one of the remaining ranks names those that are missing."""
    missing = roll_call(world, reported=False)
    if missing:
        _report_missing(world, missing, text, report)


def _report_missing(world: World, missing: dict[int, Progress], cause: str, report: Report) -> None:
    if not missing:
        # The store of ranks on one host went away, and with it whoever started them.
        report(MachineError("the ranks have lost the store in which they met; all ranks stop", where={"cause": cause}))
        return
    (first, last), *others = missing.items()
    also = {"also missing": ", ".join(f"rank {rank}" for rank in dict(others))} if others else {}
    report(
        MachineError(
            f"rank {first} of {world.size} is gone or does not respond; all ranks stop",
            where={"rank": first, **last.facts, **also, "cause": cause[:200]},
            fix="recperf run --resume RUN continues from the last checkpoint",
        )
    )


def roll_call(world: World, *, reported: bool) -> dict[int, Progress]:
    """The ranks that do not answer, if this rank is the one to name them; `reported`: it printed an error of its own.

    Ranks answer in the store in which they met. torchrun's agent keeps that store, so it outlives them.
    """
    if not _store_reachable():
        return {} if reported else _other_hosts(world)
    try:
        return _answers(world, reported)
    except (RuntimeError, OSError):
        # The store went away with the host that had it; torch's errors of its store are RuntimeErrors.
        return {}


def _store_reachable() -> bool:
    """Whether the host of the store responds: the store itself would wait forever."""
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    try:
        socket.create_connection(address, timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _other_hosts(world: World) -> dict[int, Progress]:
    """Without the store, each host's first rank names the ranks of all other hosts, which it cannot ask."""
    if world.local_rank:
        return {}
    here = range(world.rank, world.rank + world.local_size)
    unknown = Progress("unknown: the host on which the ranks met does not respond")
    return {rank: unknown for rank in range(world.size) if rank not in here}


def _answers(world: World, reported: bool) -> dict[int, Progress]:
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    store.set(_key(world.rank), json.dumps({"reported": reported, "seen": _seen_here(world)}))
    if reported:
        return {}
    end, answers = time.monotonic() + ANSWER_S, dict[int, dict[str, Any]]()
    while len(answers) < world.size and time.monotonic() < end:
        for rank in range(world.size):
            if rank not in answers and store.check([_key(rank)]):
                answers[rank] = json.loads(store.get(_key(rank)))
        time.sleep(_POLL_S)
    if world.rank != min(answers) or any(answer["reported"] for answer in answers.values()):
        return {}
    seen = {int(rank): Progress(*last) for answer in answers.values() for rank, last in answer["seen"].items()}
    unknown = Progress("unknown: no other rank of its host is left")
    return {rank: seen.get(rank, unknown) for rank in range(world.size) if rank not in answers}


def _key(rank: int) -> str:
    return f"recperf/ended/{rank}"


def _seen_here(world: World) -> dict[int, list[str]]:
    """What the ranks of this host did last."""
    own = progress.folder()
    if own is None:
        return {}
    first = world.rank - world.local_rank
    read = {first + local: progress.read_progress(own.parent / str(local)) for local in range(world.local_size)}
    return {rank: [last.activity, last.span] for rank, last in read.items() if last is not None}
