"""How a rank ends: its exit code, and one message from all ranks together when something fails.

A rank that only lost another one prints nothing under `recperf run --ranks`: the rank that failed first has printed
why, or was killed or hangs, which the launcher reports. Under torchrun the first rank of each host prints what it
waited for.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable

from ..errors import ConfigError, GateFailed, Interrupted, MachineError, RecperfError, Stopped, UsageError
from ..machine import memory_error, out_of_memory
from .job import Exit, launched, record_exit
from .ranks import Ranks, RendezvousError

_PEER_FAILURE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|gloo|nccl|process group|"
    r"failed to (connect|recv|send)|socket|pair closure",
    re.IGNORECASE,
)
_TIMEOUT = re.compile("timed out|timeout", re.IGNORECASE)
_COLLECTIVE = re.compile(r"all_?reduce|all_?(to_?|2)all|gather|scatter|broadcast|barrier", re.IGNORECASE)
_SAME_ON_ALL = (ConfigError, UsageError, GateFailed, Stopped, Interrupted)
"""Errors that every rank raises by itself, from what all ranks know."""
Report = Callable[[RecperfError], None]


def run_as_rank(world: Ranks, work: Callable[[], int], report: Report) -> int:
    """Be one rank: do the work and return its exit code; `report` prints an error."""
    # Torch prints a native stack for every request to a store that is gone.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        end = Exit(code=work())
    except SystemExit:
        raise
    except BaseException as error:
        end = _failure(world, error, report)
    finally:
        # The process group is not destroyed: that would wait for ranks that may be gone.
        world.joined = False
    record_exit(end)
    if end.code and "nccl" in world.backend:
        # The interpreter's end would wait for collectives of NCCL that others never join.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)
    return end.code


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error only says that another rank went away. Our own errors may have such words in a path."""
    return isinstance(error, RuntimeError) and not out_of_memory(error) and bool(_PEER_FAILURE.search(str(error)))


def _failure(world: Ranks, error: BaseException, report: Report) -> Exit:
    text = " ".join(error.lines()) if isinstance(error, RecperfError) else f"{type(error).__name__}: {error}"
    if not (world.joined and is_peer_failure(error)):
        code = _report_own(world, error, text, report)
        return Exit(code=code, out_of_memory=out_of_memory(error), message=text[:200])
    waited_s, collective = world.timeout_s if _TIMEOUT.search(text) else 0.0, _collective(error)
    if world.local_rank == 0 and not launched():
        what = f"waited {waited_s:.0f} s for" if waited_s else "lost the connection to"
        report(
            MachineError(
                f"rank {world.rank} of {world.size} {what} another rank; it stops",
                where={"collective": collective, "cause": text[:200]},
                fix="recperf run --resume RUN continues from the last checkpoint",
            )
        )
    code = MachineError.exit_code
    return Exit(code=code, lost=True, collective=collective, waited_s=waited_s, message=text[:200])


def _collective(error: BaseException) -> str:
    """The innermost function with the name of a collective in which an error was raised."""
    frames = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name for name in reversed(frames) if _COLLECTIVE.search(name)), frames[-1] if frames else "")


def _report_own(world: Ranks, error: BaseException, text: str, report: Report) -> int:
    """Report this rank's own failure, unless rank 0 reports the same one."""
    if out_of_memory(error):
        report(memory_error(error, rank=world.rank))
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
