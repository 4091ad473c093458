"""Starting the ranks of one host by torch elastic's launcher, which torchrun uses too, and how the attempt ended.

The launcher's public options do most: it forwards a signal to the ranks, gives them time to save, and ends the others
when one fails. Which failures are worth a restart is decided here, since it would restart after any.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import Interrupted, MachineError, RecperfError, Stopped, UsageError
from ..folders import temporary_folder
from ..machine import usable_cores
from ..stop import FLAG, child, name_of
from .job import LAUNCHER, Exit, read_exit
from .ranks import Ranks

MOST_RANKS = 1024
LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Ranks of one host listen to nothing outside it: they meet in a file, and the agent starts no store that listens."""
SAVE_S = 600
"""Seconds that ranks get to save after a signal before they are killed (torch 2.11 gives them 30)."""


def require_ranks(world: Ranks, requested: int, workload: str, has_ranks: bool) -> None:
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
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_S))
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
    def failed(cls, error: RecperfError, *, restartable: bool = False) -> Outcome:
        return cls(code=error.exit_code, error=error, restartable=restartable)


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
            exit_codes = self._elastic()
        finally:
            logging.disable(logging.NOTSET)
        ends = {int(path.parent.name): read_exit(path) for path in self.folder.glob("*/attempt_0/*/error.json")}
        exits = {rank: end for rank, end in ends.items() if end is not None}
        if FLAG.received is not None:
            return judge_stop(self.ranks, exits, FLAG.received)
        return judge(self.ranks, exits, exit_codes)

    def _elastic(self) -> dict[int, int]:
        """The exit codes of failed ranks, in the order in which they were noticed."""
        from torch.distributed.elastic.multiprocessing import SignalException
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
            # The others stay ours: they raise its exception too, but only the first one does.
            signals_to_handle="SIGQUIT",
        )
        program, *arguments = child([sys.executable, "-m", "recperf", *self.command])
        try:
            with FLAG.raising(lambda number: SignalException("", signal.Signals(number))):
                elastic_launch(config, program)(*arguments)
        except ChildFailedError as error:
            return {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException as error:
            FLAG.received = FLAG.received or error.sigval
        return {}

    def has_run(self) -> bool:
        """Whether the ranks have begun a run, which a restart can resume."""
        return any(self.folder.glob("*/run"))


def judge(ranks: int, exits: dict[int, Exit], exit_codes: dict[int, int]) -> Outcome:
    """The outcome of an attempt that no signal ended: that of the rank that failed first. A rank that could not report
    itself is named."""
    waiting = next((rank for rank, end in exits.items() if end.waited_s), None)
    if waiting is not None:
        silent = [rank for rank in range(ranks) if rank not in exits or not exits[rank].waited_s]
        who = f"rank {silent[0]} of {ranks} does not respond" if silent else "the ranks wait for each other"
        end = exits[waiting]
        where: dict[str, object] = {"waited": f"rank {waiting}, {end.waited_s:.0f} s in {end.collective}"}
        return Outcome.failed(_ended(who, ranks, where), restartable=True)
    # A rank that lost another one ends because of it. What follows is sent by the agent: others may be stopped by it.
    first = next((rank for rank in exit_codes if not (rank in exits and exits[rank].lost)), None)
    if first is None:
        if not exit_codes:
            return Outcome(code=0)
        where = {"cause": exits[next(iter(exit_codes))].message}
        return Outcome.failed(_ended("the ranks lost the connection to each other", ranks, where), restartable=True)
    if first in exits:
        end = exits[first]
        stop = {kind.exit_code: kind for kind in (Stopped, Interrupted)}.get(end.code)
        if stop and _unreported(exits):
            return Outcome.failed(stop(end.message.removeprefix("error: ")))
        return Outcome(code=end.code, restartable=end.out_of_memory)
    code = exit_codes[first]
    how = f"was killed by {name_of(-code)}" if code < 0 else f"ended with code {code}"
    memory = ", perhaps out of memory" if code == -signal.SIGKILL else ""
    return Outcome.failed(_ended(f"rank {first} of {ranks} {how}{memory}", ranks, {}), restartable=code < 0)


def judge_stop(ranks: int, exits: dict[int, Exit], received: int) -> Outcome:
    """The outcome of an attempt that a signal to the launcher ended."""
    own = [end for end in exits.values() if not end.lost]
    failed = min((end for end in own if end.code), key=lambda end: end.time, default=None)
    if failed and not _unreported(exits):
        return Outcome(code=failed.code)
    if len(own) == ranks:
        return Outcome(code=0)
    if failed:
        text = failed.message.removeprefix("error: ")
    else:
        text = f"{'interrupted' if received == signal.SIGINT else 'stopped'}; not all ranks confirmed that they saved"
    return Outcome.failed((Interrupted if received == signal.SIGINT else Stopped)(text))


def _unreported(exits: dict[int, Exit]) -> bool:
    """Whether rank 0, which reports a signal for all, lost the rank that received it before the training."""
    return 0 not in exits or exits[0].lost


def _ended(what: str, ranks: int, where: dict[str, object]) -> MachineError:
    fix = f"recperf run --resume RUN --ranks {ranks} continues from the last checkpoint"
    return MachineError(f"{what}; all ranks were stopped", where=where, fix=fix)
