"""Starting the ranks of one host by torch elastic's launcher, which torchrun uses too, and how they end: exit codes,
and one message from all ranks together when something fails.

The launcher's public options do most: it forwards a signal to the ranks, gives them time to save, and ends the others
when one fails. Which failures are worth a restart is decided here, since it would restart after any.

A rank that only lost another one prints nothing under `recperf run --ranks`: the rank that failed first has printed
why, or was killed or hangs, which the launcher reports. Under torchrun the first rank of each host prints what it
waited for.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, GateFailed, Interrupted, MachineError, RecperfError, Stopped, UsageError
from ..folders import temporary_folder
from ..machine import memory_error, out_of_memory, usable_cores
from ..stop import FLAG, child, name_of
from .job import LAUNCHER, Exit, launched, read_exit, record_exit
from .ranks import Ranks, RendezvousError

MOST_RANKS = 1024
LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Ranks of one host listen to nothing outside it: they meet in a file, and the agent starts no store that listens."""
SAVE_S = 600
"""Seconds that ranks get to save after a signal before they are killed (torch 2.11 gives them 30)."""
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
    report: Report,
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
