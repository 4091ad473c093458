"""What execution, workloads and commands need of the ranks of a run, behind one object that a single process has too.

A caller never asks how many ranks there are: for a single process each method does what that process does alone.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ..machine import usable_cores
from ..measure.cost import FLOAT
from .world import World

if TYPE_CHECKING:
    from ..runs.record import Run
    from ..stop import StopFlag
    from ..train.checkpoint import CheckpointStore
    from ..train.config import TrainConfig
    from ..train.loop import Position
    from .config import DistributedConfig
    from .window import SharedWindow, SingleWindow

T = TypeVar("T")


class Planned(Protocol):
    """A training whose tables are placed on ranks."""

    def plan(self) -> str:
        """A table of which rank holds what."""
        ...


@dataclass
class Ranks(World):
    """All ranks of a run, and how they share its work."""

    def choose(self, single: T, several: T) -> T:
        """The first for a single process, the second for each of several ranks."""
        return single if self.size == 1 else several

    def leader_only(self, work: Callable[[], T]) -> T | None:
        """Rank 0 does the work and has the result; the others get None."""
        return work() if self.is_leader else None

    def leader_first(self, work: Callable[[], T]) -> T:
        """Every rank does the work, rank 0 before the others, so that files it leaves on disk are made once."""
        if self.is_leader:
            result = work()
            self.barrier()
            return result
        self.barrier()
        return work()

    def decide_on_leader(self, due: Callable[[Position | None], bool]) -> Callable[[Position], bool]:
        """A condition that reads the clock: rank 0 evaluates it for all once a step, since clocks differ."""
        if self.size == 1:
            return due
        self.due_on_leader = due
        return lambda at: self.due

    def share_run(self, run: Run | None) -> Run:
        """The run folder as this rank sees it: rank 0 passes it and writes it, the others pass None."""
        if self.size == 1:
            return cast("Run", run)
        from .shared_run import share_run

        return share_run(run, self)

    def share_stop(self, stop: StopFlag) -> StopFlag:
        """A stop flag that is set on all ranks in the same step."""
        if self.size == 1:
            return stop
        from .shared_run import SharedStop

        return cast("StopFlag", SharedStop(stop, self))

    def checkpoint_store(
        self, folder: Path, config: TrainConfig, notice: Callable[[str], None], background: Callable[[], bool]
    ) -> CheckpointStore:
        """The checkpoints of a training. A single process writes them in the background where `background` says so."""
        from ..train.checkpoint import CheckpointStore

        if self.size == 1:
            return CheckpointStore(
                folder=folder, notice=notice, keep_last=config.keep_last, background=background()
            )  # fmt: skip
        from .checkpoint import RankStore

        if config.checkpoint_background == "on":
            notice("training waits while a checkpoint is written: several ranks write it together")
        return RankStore(folder=folder, notice=notice, keep_last=config.keep_last, world=self)

    def window(self) -> SharedWindow | SingleWindow:
        """What measuring a window of steps needs beside the steps themselves."""
        from .window import SharedWindow, SingleWindow

        return SingleWindow() if self.size == 1 else SharedWindow(self)

    def require_same_config(self, workload: str, config: Any, **options: Any) -> None:
        """Fail if a rank was started with a config other than rank 0's."""
        if self.size > 1:
            from .shared_run import require_same_config

            require_same_config(self, workload, config, **options)

    def require_same_data(self, digest: str) -> None:
        """Fail if a rank reads data other than rank 0's."""
        if self.size > 1:
            from .shared_run import require_same_data

            require_same_data(self, digest)

    def needed_bytes(self, process_bytes: float) -> tuple[float, str]:
        """Memory that all processes of this host need together, and whose it is, for a message."""
        by = f" by the {self.local_size} ranks of this host" if self.local_size > 1 else ""
        return self.local_size * process_bytes, by

    def overlaps(self, options: DistributedConfig, threads: int) -> tuple[bool, str]:
        """Whether gradients are summed during the backward pass, and why. All ranks call it and decide alike: they must
        send the same messages."""
        if options.overlap != "auto":
            return options.overlap == "on", f"{options.overlap}: requested"
        if self.device == "cuda":
            return True, "on: a GPU sends while it computes"
        cores, used = usable_cores(), self.local_size * threads
        everywhere = not self.maximum(int(cores <= used))
        facts = f"the ranks of this host use {used} of {cores} cores"
        if cores > used and not everywhere:
            facts += ", those of another host use all"
        return everywhere, f"{'on' if everywhere else 'off'}: {facts}"

    def reduction_bytes(self, parameters: int) -> int:
        """Bytes of the buffer in which ranks sum gradients; a single process has none."""
        return FLOAT * parameters if self.size > 1 else 0

    def settings(self) -> dict[str, str]:
        """The entry of a result that says how many ranks took part."""
        return {"ranks": f"{self.size}: {self.backend}"} if self.size > 1 else {}

    def resume_options(self) -> str:
        """What `recperf run --resume RUN` needs to start as many ranks again; torchrun starts those of many hosts."""
        return f" --ranks {self.size}" if self.size > 1 and self.on_one_host else ""

    def report_ranks(self, notice: Callable[[str], None]) -> None:
        """Print which hosts and devices take part, and how the ranks reach each other."""
        if self.size > 1:
            from .rendezvous import device_name, members

            notice(members(self.all_gather((platform.node(), device_name(self.device))), self.backend))

    def report_plan(self, trial: Any, notice: Callable[[str], None]) -> None:
        """Print which rank holds which part of the tables."""
        if self.size > 1:
            notice(f"placement of the tables\n{cast(Planned, trial).plan()}")

    def trace_facts(self, run: str) -> dict[str, Any]:
        """What a trace says of its origin: `profile --trace FOLDER` joins traces of one run, aligned by host."""
        if self.size == 1:
            return {"run": run}
        from .waits import host

        return {"run": run, "rank": self.rank, "ranks": self.size, "host": host()}

    def trace_barrier(self) -> Callable[[], None] | None:
        """A barrier whose ends mark the same moment in the traces of all ranks."""
        return self.barrier if self.size > 1 else None

    def trace_name(self) -> str:
        return f"trace.rank{self.rank}.json.gz" if self.size > 1 else "trace.json.gz"


_ranks = Ranks()


def current() -> Ranks:
    """The ranks of the run that this process takes part in."""
    return _ranks


def enter(ranks: Ranks) -> Ranks:
    global _ranks
    _ranks = ranks
    return ranks
