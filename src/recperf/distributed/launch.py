"""Starting the ranks of one host by torchrun's agent, and what each rank tells of its end.

A rank whose peers went away says nothing: the one that went first has said why, or was killed, which its launcher sees.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError, GateFailed, Interrupted, MachineError, RecperfError, Stopped, UsageError
from ..machine import out_of_memory
from . import notes, roll_call
from .watching import Watch
from .world import RendezvousError, World

MOST_RANKS = 1024
SAVE_S = 600
"""Seconds that ranks get to save after a signal before they are killed."""
LINGER_S = 5.0
"""Seconds that a rank whose peers went away waits to be ended, so that it is not taken for the one that failed."""
LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|gloo|nccl|process group|"
    r"failed to (connect|recv|send)|socket|pair closure",
    re.IGNORECASE,
)
SILENT = re.compile("timed out|timeout", re.IGNORECASE)
ALIKE = (ConfigError, UsageError, GateFailed, Stopped, Interrupted)
"""Errors that every rank comes to by itself, from what all ranks know."""


def rank_arguments(words: list[str]) -> list[str]:
    """The command line of a rank."""
    found, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("--ranks", "--restarts"):
            skip = True
        elif not word.startswith(("--ranks=", "--restarts=")):
            found.append(word)
    return found


def launch(
    words: list[str],
    ranks: int,
    say: Callable[[RecperfError], None],
    *,
    verb: str = "run",
    restarts: int = 0,
    notice: Callable[[str], None] = print,
) -> int:
    """Run a command as so many ranks; their exit code.

    Where a rank was killed, hangs or has no memory all are started again, as often as there are `restarts`, unless a
    signal came.
    """
    from .library import require_torchrec

    require_torchrec()
    from torch.distributed.elastic.multiprocessing import SignalException

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    with tempfile.TemporaryDirectory(prefix="recperf-ranks-") as place:
        try:
            return _attempts([verb, *words], ranks, Path(place), say, restarts, notice)
        except SignalException as stopped:
            # The agent's handlers stay when it has ended: one that comes between two starts ends here.
            error = _unsaved(int(stopped.sigval))
            say(error)
            return error.exit_code


def _attempts(
    words: list[str],
    ranks: int,
    place: Path,
    say: Callable[[RecperfError], None],
    restarts: int,
    notice: Callable[[str], None],
) -> int:
    for attempt in range(1, restarts + 2):
        told: list[RecperfError] = []
        died, received = _attempt(words, ranks, place)
        code = verdict(place, ranks, died, received, told.append)
        if attempt <= restarts and received is None and curable(place, ranks, told) and notes.run_in(place):
            what = told[0].what if told else "a rank has no memory"
            notice(f"{what}; they are started again, {attempt} of {restarts}")
            continue
        for error in told:
            say(error)
        return code
    raise AssertionError


def _attempt(words: list[str], ranks: int, place: Path) -> tuple[dict[int, int], int | None]:
    """Start the ranks once: the exit codes of those that failed, and the signal that stopped them."""
    notes.forget(place)
    os.environ[notes.VARIABLE] = str(place)
    # The agent would tell at length what is told here in a line.
    logging.disable(logging.CRITICAL)
    try:
        with Watch(place, ranks):
            return _agent(words, ranks, str(place))
    finally:
        del os.environ[notes.VARIABLE]
        logging.disable(logging.NOTSET)


def _agent(words: list[str], ranks: int, place: str) -> tuple[dict[int, int], int | None]:
    """Until all ranks have ended: the exit codes of those that failed, and the signal that stopped them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=Path(place).name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=place),
        shutdown_timeout=SAVE_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "recperf", *words)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}, None
    except SignalException as error:
        return {}, int(error.sigval)
    return {}, None


def verdict(
    place: Path, ranks: int, died: dict[int, int], received: int | None, say: Callable[[RecperfError], None]
) -> int:
    """The exit code of the rank that failed first; one that could not say why is named."""
    words = _words(place, ranks)
    first = _first_failure(words)
    if first is not None:
        return int(first["code"])
    if received is not None:
        error = _unsaved(received)
        if len(words) < ranks:
            say(error)
        return error.exit_code if len(words) < ranks else max(int(word["code"]) for word in words.values())
    silent = [rank for rank in range(ranks) if rank not in words]
    if not silent:
        lost = [rank for rank, word in words.items() if word["lost"]]
        if not lost:
            return 0
        # Every rank is waiting for another one.
        silent = lost[:1]
    # A process that ended by itself comes before one that only did not answer.
    rank = min(silent, key=lambda rank: (rank not in died, rank))
    # One that others waited for in vain was ended by us, not by itself.
    waited = any(word["lost"] == "silent" for word in words.values())
    say(_gone(rank, ranks, notes.noted(place, rank), None if waited else died.get(rank)))
    return MachineError.exit_code


def curable(place: Path, ranks: int, told: list[RecperfError]) -> bool:
    """Whether starting the ranks again may help: the first to fail was killed, hangs or has no memory."""
    first = _first_failure(_words(place, ranks))
    if first is not None:
        return bool(first.get("full"))
    return any(isinstance(error, Gone) and error.curable for error in told)


def _words(place: Path, ranks: int) -> dict[int, dict[str, Any]]:
    return {rank: word for rank in range(ranks) if (word := notes.word(place, rank)) is not None}


def _first_failure(words: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """The word of the rank that failed first, by a failure of its own."""
    own = [word for word in words.values() if word["code"] and not word["lost"]]
    return min(own, key=lambda word: float(word["time"]), default=None)


def _unsaved(received: int) -> RecperfError:
    text = "; the ranks did not say that they saved"
    return Interrupted(f"interrupted{text}") if received == signal.SIGINT else Stopped(f"stopped{text}")


class Gone(MachineError):
    """A rank that could not say why it ended."""

    curable = True


def _gone(rank: int, ranks: int, last: notes.Note, code: int | None) -> Gone:
    if code is None:
        what = f"rank {rank} of {ranks} does not answer"
    elif code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        what = f"rank {rank} of {ranks} was ended by {name}" + (", as when memory runs out" if code == -9 else "")
    else:
        what = f"rank {rank} of {ranks} ended with code {code}"
    found = Gone(
        what + "; the others were stopped",
        where={"rank": rank, **last.facts},
        fix=f"recperf run --resume RUN --ranks {ranks} goes on from the last checkpoint",
    )
    # It left by itself, and would do so again.
    found.curable = code is None or code < 0
    return found


def require_ranks(world: World, asked: int, workload: str, has_ranks: bool) -> None:
    """Refuse what cannot be started as several ranks."""
    if asked and world.size > 1 and asked != world.size:
        raise UsageError(f"--ranks {asked}, but torchrun started {world.size}", fix="leave --ranks out")
    if not 0 <= asked <= MOST_RANKS:
        raise UsageError(f"--ranks {asked}: allowed are 1 to {MOST_RANKS}")
    if max(asked, world.size) > 1 and not has_ranks:
        fix = "--ranks goes with micro-dlrm, dlrm and dlrm-v4"
        raise UsageError(f"workload {workload!r} runs in one process", fix=fix)


def run_as_rank(world: World, work: Callable[[], int], tell: Callable[[RecperfError], None]) -> int:
    """Be one rank: its exit code, with one message from all ranks where something fails."""
    notes.begin(world.rank)
    full = False
    try:
        code, lost = work(), ""
    except SystemExit:
        raise
    except BaseException as error:
        full = out_of_memory(error)
        code, lost = _told(world, error, tell)
    finally:
        # Without waiting for the others, who may be gone.
        world.joined = False
    notes.leave_word(world.rank, code=code, lost=lost, full=full, time=time.time())
    if lost == "gone" and notes.launched():
        time.sleep(LINGER_S)
    # What the others end with says nothing about the run, which is rank 0's.
    notes.end(world.rank, done=world.is_leader and code == 0)
    return code


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error only says that another rank went away; messages of our own may have the same words in a path."""
    return isinstance(error, RuntimeError) and not out_of_memory(error) and LOST.search(str(error)) is not None


def _told(world: World, error: BaseException, tell: Callable[[RecperfError], None]) -> tuple[int, str]:
    """What an error makes of a rank: its exit code, and whether it only lost the others: they are gone, or silent."""
    text = " ".join(error.lines()) if isinstance(error, RecperfError) else f"{type(error).__name__}: {error}"
    if world.joined and is_peer_failure(error):
        if not notes.launched():
            _name_lacking(world, text, tell)
        return MachineError.exit_code, "silent" if SILENT.search(text) else "gone"
    code = _say(world, error, text, tell)
    if world.joined and not notes.launched():
        roll_call.answer(world, said=True)
    return code, ""


def _say(world: World, error: BaseException, text: str, tell: Callable[[RecperfError], None]) -> int:
    """A rank's own failure."""
    if out_of_memory(error):
        last = notes.last(world.rank)
        tell(MachineError("out of memory", where={"rank": world.rank, **last.facts, "was told": text[:200]}))
        return MachineError.exit_code
    if isinstance(error, RendezvousError):
        # Hosts that do not meet cannot agree on who says so.
        if world.local_rank == 0:
            tell(error)
        return error.exit_code
    if isinstance(error, RecperfError):
        # What every rank finds out alike is said by rank 0.
        alike = isinstance(error, ALIKE) or not world.joined or error is world.shared_error
        if world.is_leader or not alike:
            error.where = {**error.where, "rank": str(world.rank)} if not alike else error.where
            tell(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    traceback.print_exception(error)
    tell(RecperfError(f"a fault in recperf itself: {text}", where={"rank": world.rank}))
    return 1


def _name_lacking(world: World, text: str, tell: Callable[[RecperfError], None]) -> None:
    """Under torchrun alone: one of the ranks that are left names those that are not."""
    # torchrun ends them as soon as it sees one gone; it waits 30 seconds for those that do not.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lacking = roll_call.answer(world, said=False)
    if lacking:
        first, *others = lacking
        more = {"as well": ", ".join(f"rank {found.rank}" for found in others)} if others else {}
        tell(
            MachineError(
                f"rank {first.rank} of {world.size} is gone or does not answer; the others stop",
                where={"rank": first.rank, **first.note.facts, **more, "was told": text[:200]},
                fix="recperf run --resume RUN goes on from the last checkpoint",
            )
        )
