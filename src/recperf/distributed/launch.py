"""Starting the ranks of one host by torch elastic's agent, which torchrun uses too, and the verdict on how they ended.

Three things are our own, since the agent has no option for them: which failures are worth a restart (the agent restarts
after any), how signals reach ranks and how long they get to end (`_forwarding`), and what a killed or hung rank did
last (progress.py).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from ..errors import Interrupted, MachineError, RecperfError, Stopped, UsageError
from ..folders import temporary_folder
from ..machine import usable_cores
from ..stop import FLAG, SIGNALS, child, name_of
from .progress import LAUNCHER, Exit, Progress, read_exit, read_progress
from .world import World

MOST_RANKS = 1024
LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Ranks of one host listen to nothing outside it: they meet in a file, and the agent starts no store that listens."""
SAVE_S = 600
"""Seconds that ranks get to save after a signal before they are killed."""
END_S = 5
"""Seconds that the other ranks get to end once one has ended: they save together, and cannot without it."""


def require_ranks(world: World, requested: int, workload: str, has_ranks: bool) -> None:
    """Fail if this command cannot be started as several ranks."""
    if requested and world.size > 1 and requested != world.size:
        raise UsageError(f"--ranks {requested}, but torchrun started {world.size}", fix="leave --ranks out")
    if not 0 <= requested <= MOST_RANKS:
        raise UsageError(f"--ranks {requested}: allowed are 1 to {MOST_RANKS}")
    if max(requested, world.size) > 1 and not has_ranks:
        raise UsageError(f"workload {workload!r} runs in a single process", fix="leave --ranks out")


def rank_arguments(arguments: list[str]) -> list[str]:
    """The command line of a rank: without --ranks and --restarts."""
    remaining, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--ranks", "--restarts"):
            skip = True
        elif not argument.startswith(("--ranks=", "--restarts=")):
            remaining.append(argument)
    return remaining


def launch(
    arguments: list[str],
    ranks: int,
    report: Callable[[RecperfError], None],
    *,
    verb: str = "run",
    restarts: int = 0,
    notice: Callable[[str], None] = print,
) -> int:
    """Run a command as several ranks and return their exit code.

    If a rank was killed, hangs or is out of memory, all are restarted up to `restarts` times, unless a signal came.
    """
    from .library import require_torchrec

    require_torchrec()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    os.environ.update(LOCAL)
    with temporary_folder(LAUNCHER) as folder:
        agent = Agent([verb, *arguments], ranks, folder)
        for attempt in range(1, restarts + 2):
            FLAG.poll()
            outcome = agent.run()
            if attempt > restarts or not outcome.restartable or not agent.has_run():
                break
            notice(f"{outcome.summary}; restarting all ranks ({attempt} of {restarts})")
    if outcome.error is not None:
        report(outcome.error)
    return outcome.code


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended, over all ranks."""

    code: int
    error: RecperfError | None = None
    """What no rank could report itself."""
    restartable: bool = False

    @property
    def summary(self) -> str:
        return self.error.what if self.error else "a rank is out of memory"

    @classmethod
    def unsaved(cls, received: int) -> Outcome:
        text = "; not all ranks confirmed that they saved"
        error = Interrupted(f"interrupted{text}") if received == signal.SIGINT else Stopped(f"stopped{text}")
        return cls(code=error.exit_code, error=error)


class Agent:
    """Torch elastic's agent for the ranks of this host."""

    def __init__(self, command: list[str], ranks: int, folder: Path) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        self.command, self.ranks, self.folder = command, ranks, folder
        # One for all attempts: it puts the folders of their ranks into the same job folder.
        self._logs = DefaultLogsSpecs(log_dir=str(folder))

    def run(self) -> Outcome:
        """Start the ranks once and wait until all have ended."""
        # The agent's log says at length what is reported here in a line.
        logging.disable(logging.CRITICAL)
        try:
            with _forwarding():
                exit_codes = self._elastic()
        finally:
            logging.disable(logging.NOTSET)
        folders = {rank: self._job() / "attempt_0" / str(rank) for rank in range(self.ranks)}
        return judge(folders, exit_codes, FLAG.received)

    def _elastic(self) -> dict[int, int]:
        """The exit codes of failed ranks, in the order in which they were noticed."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        meeting = self.folder / "rendezvous"
        # An earlier attempt closed it.
        meeting.unlink(missing_ok=True)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.ranks,
            run_id=self.folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint=str(meeting),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=self._logs,
        )
        try:
            program, *arguments = child([sys.executable, "-m", "recperf", *self.command])
            elastic_launch(config, program)(*arguments)
        except ChildFailedError as error:
            return {rank: failure.exitcode for rank, failure in error.failures.items()}
        return {}

    def _job(self) -> Path:
        return next(self.folder.glob("*/"), self.folder)

    def has_run(self) -> bool:
        """Whether the ranks have begun a run, which a restart can resume."""
        return (self._job() / "run").exists()


@contextmanager
def _forwarding() -> Iterator[None]:
    """Forward a signal to the ranks, give them SAVE_S seconds after it, and END_S once one has ended.

    The agent would raise from its own signal handlers. Ranks start with the signals blocked, so that none comes before
    they can receive it. A second Ctrl-C kills them.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    start, poll, close = SubprocessContext.start, SubprocessContext._poll, SubprocessContext.close
    contexts: list[Any] = []
    forwarded: float | None = None

    def send(number: int) -> None:
        for handler in (handler for context in contexts for handler in context.subprocess_handlers.values()):
            with suppress(ProcessLookupError):
                if handler.proc.poll() is None:
                    os.killpg(handler.proc.pid, number)

    def start_ranks(self: Any) -> None:
        contexts.append(self)
        # Torch would handle SIGHUP too, and the ranks would not inherit that nohup ignores it.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            start(self)
        finally:
            FLAG.listen()

    def poll_ranks(self: Any) -> Any:
        nonlocal forwarded
        if FLAG.received is not None and forwarded is None:
            forwarded = monotonic()
            send(FLAG.received)
        elif forwarded is not None and monotonic() - forwarded > SAVE_S:
            send(signal.SIGKILL)
        return poll(self)

    def close_ranks(self: Any, death_sig: Any = None, timeout: int = 30) -> None:
        # A signal that does nothing: a rank that is asked to stop would not say that it lost another one.
        close(self, signal.SIGURG, END_S)

    replaced = {"start": start_ranks, "_poll": poll_ranks, "close": close_ranks}
    originals = {"start": start, "_poll": poll, "close": close}
    try:
        for name, function in replaced.items():
            setattr(SubprocessContext, name, function)
        with FLAG.before_exit(lambda: send(signal.SIGKILL)):
            yield
    finally:
        for name, function in originals.items():
            setattr(SubprocessContext, name, function)


def judge(folders: dict[int, Path], exit_codes: dict[int, int], received: int | None) -> Outcome:
    """The outcome of an attempt: the exit code of the rank that failed first; a rank that could not report is named."""
    exits = {rank: end for rank, folder in folders.items() if (end := read_exit(folder)) is not None}
    own = [end for end in exits.values() if end.code and not end.lost]
    if own:
        first = min(own, key=lambda end: end.time)
        signalled = {kind.exit_code: kind for kind in (Stopped, Interrupted)}.get(first.code)
        if signalled and (0 not in exits or exits[0].lost):
            # Rank 0 reports a signal for all, but lost the rank that received it before the training.
            return Outcome(code=first.code, error=signalled(first.message.removeprefix("error: ")))
        return Outcome(code=first.code, restartable=first.out_of_memory and received is None)
    if received is not None:
        saved = len(exits) == len(folders)
        return Outcome(code=max(end.code for end in exits.values())) if saved else Outcome.unsaved(received)
    rank = _culprit(len(folders), exits, exit_codes)
    if rank is None:
        return Outcome(code=0)
    # A rank that others waited for was killed by the agent, not before.
    hung = any(end.lost == "silent" for end in exits.values())
    code = None if hung else exit_codes.get(rank)
    error = _gone(rank, len(folders), read_progress(folders[rank]) or Progress(), code)
    return Outcome(code=error.exit_code, error=error, restartable=code is None or code < 0)


def _culprit(ranks: int, exits: dict[int, Exit], exit_codes: dict[int, int]) -> int | None:
    """The rank that stopped the others: the first to end without a record, or one that hangs; None if all is well."""
    silent = [rank for rank in range(ranks) if rank not in exits]
    if not silent:
        # Where every rank lost the others, they wait for each other.
        return next((rank for rank, end in exits.items() if end.lost), None)
    return next((rank for rank in exit_codes if rank in silent), silent[0])


def _gone(rank: int, ranks: int, last: Progress, code: int | None) -> MachineError:
    if code is None:
        what = f"rank {rank} of {ranks} does not respond"
    elif code < 0:
        what = f"rank {rank} of {ranks} was killed by {name_of(-code)}" + (
            ", perhaps out of memory" if code == -9 else ""
        )
    else:
        what = f"rank {rank} of {ranks} ended with code {code}"
    return MachineError(
        f"{what}; all ranks were stopped",
        where={"rank": rank, **last.facts},
        fix=f"recperf run --resume RUN --ranks {ranks} continues from the last checkpoint",
    )
