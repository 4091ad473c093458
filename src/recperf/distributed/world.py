"""The ranks of a run behind one object. A single process is a world of one: it has the same methods, and none of them
communicates. So a caller never asks how many ranks there are. Torch is imported only where there are several.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ..errors import MachineError, UsageError
from ..machine import out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

    from ..runs.record import Run
    from ..train.checkpoint import CheckpointStore
    from ..train.config import TrainConfig
    from ..train.loop import Position
    from ..train.metrics import Tally
    from ..train.stop import StopFlag
    from .config import DistributedConfig
    from .window import SharedWindow, SingleWindow

T = TypeVar("T")
FLOAT_BYTES = 4


class RendezvousError(MachineError):
    """The ranks did not meet in time."""


class ReceivesSignals(Protocol):
    """Remembers the signal that this process received."""

    received: int | None


class Planned(Protocol):
    """A training whose tables are placed on ranks."""

    def plan(self) -> str:
        """A table of which rank holds what."""
        ...


@dataclass
class World:
    """All ranks of a run, as one of them sees them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    backend: str = "none"
    device: str = "cpu"
    joined: bool = False
    signal: int | None = None
    """The signal on which all ranks agreed to stop."""
    stop_flag: ReceivesSignals | None = None
    """Holds the signal that this rank alone received; the others learn of it in the next step."""
    shared_error: BaseException | None = None
    """An error that every rank raises; only rank 0 prints it."""

    @classmethod
    def from_environment(cls) -> World:
        """The world that torchrun describes in the environment; without torchrun a world of one."""
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = {name: os.environ.get(name, "") for name in names}
        if not values["RANK"] or values["WORLD_SIZE"] in ("", "1"):
            return cls()
        try:
            size, rank = int(values["WORLD_SIZE"]), int(values["RANK"])
            local, local_size = int(values["LOCAL_RANK"] or rank), int(values["LOCAL_WORLD_SIZE"] or size)
        except ValueError:
            raise UsageError(
                f"RANK and WORLD_SIZE are not numbers: {values}", fix="start ranks with torchrun"
            ) from None
        return cls(rank=rank, size=size, local_rank=local, local_size=local_size)

    @property
    def is_leader(self) -> bool:
        """Rank 0 prints and writes; the others only compute."""
        return self.rank == 0

    @property
    def on_one_host(self) -> bool:
        return self.local_size == self.size

    def join(self, device: str, timeout_s: float, *, init_method: str = "env://") -> None:
        """Meet the other ranks: gloo between CPUs, NCCL between GPUs, with gloo for tensors in host memory."""
        if self.size == 1 or self.joined:
            return
        from .rendezvous import meet

        self.device = self._device(device)
        self.backend = "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            meet(self.backend, self.rank, self.size, timeout_s, init_method)
        except (RuntimeError, TimeoutError) as error:
            if out_of_memory(error):
                raise
            raise RendezvousError(
                f"the ranks did not meet within {timeout_s:g} s",
                where={"rank": self.rank, "of": self.size, "cause": " ".join(str(error).split())[:200]},
                fix="set GLOO_SOCKET_IFNAME to the network device between the hosts, see docs/launching.md; "
                "raise --distributed.timeout-s if ranks start late",
            ) from error
        self.joined = True

    def _device(self, requested: str) -> str:
        import torch

        device = ("cuda" if torch.cuda.is_available() else "cpu") if requested == "auto" else requested
        if device == "cuda":
            count = torch.cuda.device_count()
            if self.local_rank >= count:
                raise MachineError(
                    f"rank {self.rank} needs GPU {self.local_rank} of its host, which has {count} GPUs",
                    fix="start one rank per GPU, or use --train.device cpu",
                )
            torch.cuda.set_device(self.local_rank)
        return device

    def leave(self) -> None:
        if self.joined:
            from torch import distributed

            self.joined = False
            distributed.destroy_process_group()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks in place; every rank gets the same bits."""
        if self.size > 1:
            from torch import distributed

            distributed.all_reduce(tensor)
        return tensor

    def total(self, value: float) -> float:
        """The sum of a number over the ranks."""
        if self.size == 1:
            return value
        import torch

        return float(self.sum_(torch.tensor([value], dtype=torch.float64)))

    def maximum(self, value: int) -> int:
        if self.size == 1:
            return value
        import torch
        from torch import distributed

        maximum = torch.tensor([value])
        distributed.all_reduce(maximum, op=distributed.ReduceOp.MAX)
        return int(maximum)

    def any_true(self, flag: bool) -> bool:
        return bool(self.maximum(int(flag)))

    def barrier(self) -> None:
        self.maximum(0)

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of one rank, on every rank."""
        if self.size == 1:
            return value
        from torch import distributed

        values: list[Any] = [value if self.rank == source else None]
        distributed.broadcast_object_list(values, src=source)
        return cast(T, values[0])

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in rank order, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.size
        distributed.gather_object(value, values if self.is_leader else None, dst=0)
        return values if self.is_leader else []

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks in rank order, on every rank."""
        if self.size == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def merge_tally(self, tally: Tally) -> Tally:
        """The counts of all ranks together; this rank's own tally stays as it is."""
        from ..train.metrics import Tally

        merged = Tally(bins=tally.counts_2K.shape[1], device=tally.counts_2K.device)
        merged.merge(tally)
        self.sum_(merged.counts_2K)
        self.sum_(merged.sums_2)
        return merged

    def on_leader(self, work: Callable[[], T]) -> T:
        """Rank 0 does the work, every rank gets the result."""
        return cast(T, self.broadcast(work() if self.is_leader else None))

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

    def decide_on_leader(self, due: Callable[[Position], bool]) -> Callable[[Position], bool]:
        """A condition that reads the clock: rank 0 evaluates it for all, since clocks differ."""
        if self.size == 1:
            return due
        return lambda at: self.any_true(self.is_leader and due(at))

    def choose(self, single: T, several: T) -> T:
        """The first for a single process, the second for each of several ranks."""
        return single if self.size == 1 else several

    def own_samples(self, samples: int) -> range:
        """The samples of a batch that this rank works on: r, r + n, r + 2n and so on."""
        return range(self.rank, samples, self.size)

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
        """Memory that all processes of this host need together, and words that say whose it is."""
        by = f" by the {self.local_size} ranks of this host" if self.local_size > 1 else ""
        return self.local_size * process_bytes, by

    def held_share(self, rows: Mapping[str, int], options: DistributedConfig) -> float:
        """The share of all table rows that one process holds: its shard, and whole data-parallel tables."""
        kinds = options.shardings
        held = [count if kinds.get(name) == "data-parallel" else count / self.size for name, count in rows.items()]
        return sum(held) / sum(rows.values())

    def reduction_bytes(self, parameters: int) -> int:
        """Bytes of the buffer in which ranks sum gradients; a single process has none."""
        return FLOAT_BYTES * parameters if self.size > 1 else 0

    def settings(self) -> dict[str, str]:
        """The entry of a result that says how many ranks took part."""
        return {"ranks": f"{self.size}: {self.backend}"} if self.size > 1 else {}

    def resume_options(self) -> str:
        """What `recperf run --resume RUN` needs to start as many ranks again."""
        return f" --ranks {self.size}" if self.size > 1 else ""

    def report_plan(self, trial: Any, notice: Callable[[str], None]) -> None:
        """Print which rank holds which part of the tables."""
        if self.size > 1:
            notice(f"placement of the tables\n{cast(Planned, trial).plan()}")

    def trace_facts(self, run: str) -> dict[str, Any]:
        """What a trace says of its origin: `recperf trace merge` joins traces of one run, aligned by host."""
        if self.size == 1:
            return {"run": run}
        from .waits import host

        return {"run": run, "rank": self.rank, "ranks": self.size, "host": host()}

    def trace_barrier(self) -> Callable[[], None] | None:
        """A barrier whose ends mark the same moment in the traces of all ranks."""
        return self.barrier if self.size > 1 else None

    def trace_name(self) -> str:
        return f"trace.rank{self.rank}.json.gz" if self.size > 1 else "trace.json.gz"


_world = World()


def current() -> World:
    """The world this process is in."""
    return _world


def enter(world: World) -> World:
    global _world
    _world = world
    return world
