"""The ranks of a run, the messages between them, and how they share its work. A single process is a world of one.

A caller never asks how many ranks there are: for a single process each method does what that process does alone, and
sends nothing. Torch is imported only where there are several ranks.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from ..errors import DataError, MachineError, UsageError
from ..machine import out_of_memory, usable_cores
from ..measure.cost import FLOAT
from .job import connect, meeting, members

if TYPE_CHECKING:
    from torch import Tensor

    from ..train.loop import Position
    from ..train.metrics import Tally
    from .config import DistributedConfig

T = TypeVar("T")


class RendezvousError(MachineError):
    """The ranks did not meet in time."""


class ReceivesSignals(Protocol):
    """Remembers the signal that this process received."""

    received: int | None


@dataclass
class Ranks:
    """All ranks of a run, as one of them sees them, and how they share its work."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    backend: str = "none"
    device: str = "cpu"
    joined: bool = False
    timeout_s: float = 0.0
    """How long a rank waits for the others in a collective."""
    signal: int | None = None
    """The signal on which all ranks agreed to stop."""
    stop_flag: ReceivesSignals | None = None
    """Holds the signal that this rank alone received; the others learn of it in the next step."""
    due_on_leader: Callable[[None], bool] = lambda _: False
    """A condition that rank 0 evaluates for all in every step."""
    due: bool = False
    """Whether it held in the last step."""
    shared_error: BaseException | None = None
    """An error that every rank raises; only rank 0 prints it."""

    @classmethod
    def from_environment(cls) -> Self:
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

    def join(self, device: str, timeout_s: float, *, init_method: str | None = None) -> None:
        """Meet the other ranks: gloo between CPUs, NCCL between GPUs, with gloo for tensors in host memory."""
        if self.size == 1 or self.joined:
            return
        self.device, self.timeout_s = self._device(device), timeout_s
        self.backend = "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            connect(self.backend, init_method or meeting(), self.rank, self.size, timeout_s)
        except (RuntimeError, TimeoutError) as error:
            if out_of_memory(error):
                raise
            shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            raise RendezvousError(
                f"the ranks did not meet within {timeout_s:g} s",
                where={"rank": self.rank, "of": self.size, "cause": " ".join(str(error).split())[:200]},
                fix="set GLOO_SOCKET_IFNAME to the network device between the hosts; "
                "raise --distributed.timeout-s if ranks start late"
                + ("; if the number of hosts changes, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" if shared else ""),
            ) from error
        self.joined = True

    def _device(self, requested: str) -> str:
        import torch

        device = ("cuda" if torch.cuda.is_available() else "cpu") if requested == "auto" else requested
        if device == "cuda":
            count = torch.cuda.device_count()
            if self.local_size > count:
                # Every rank of the host raises it, so that the one that reports errors does, too.
                raise MachineError(
                    f"{self.local_size} ranks on a host need as many GPUs; this one has {count}",
                    fix="start one rank per GPU, or use --train.device cpu",
                )
            torch.cuda.set_device(self.local_rank)
            # Torch's watchdog names the collective of a hang and leaves time for a dump before it ends the process: by
            # default more than 40 s on an H200. The effect of this value has not been measured.
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
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

    def stack(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, of one shape, stacked in rank order on every rank."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        import torch
        from torch import distributed

        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(tensors, tensor)
        return torch.stack(tensors)

    def merge_tally(self, tally: Tally) -> Tally:
        """The counts of all ranks together, in another tally than this rank's own."""
        if self.size == 1:
            return tally
        from ..train.metrics import Tally

        merged = Tally(bins=tally.counts_2K.shape[1], device=tally.counts_2K.device)
        merged.merge(tally)
        self.sum_(merged.counts_2K)
        self.sum_(merged.sums_2)
        return merged

    def on_leader(self, work: Callable[[], T]) -> T:
        """Rank 0 does the work, every rank gets the result."""
        return cast(T, self.broadcast(work() if self.is_leader else None))

    def choose(self, single: T, several: T) -> T:
        """The first for a single process, the second for each of several ranks."""
        return single if self.size == 1 else several

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

    def require_same_data(self, digest: str) -> None:
        """Fail on every rank if one reads data other than rank 0's."""
        digests = self.all_gather(digest)
        for rank, other in enumerate(digests):
            if other != digests[0]:
                self.shared_error = error = DataError(
                    f"rank {rank} has other data than rank 0",
                    where={"rank": rank, "its digest": other, "digest of rank 0": digests[0]},
                    fix="put the same data on every host",
                )
                raise error

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
            import torch

            device = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
            notice(members(self.all_gather((platform.node(), device)), self.backend))

    def report_plan(self, trial: Any, notice: Callable[[str], None]) -> None:
        """Print which rank holds which part of the tables."""
        if self.size > 1:
            notice(f"placement of the tables\n{trial.ranks.plan()}")

    def trace_facts(self, run: str) -> dict[str, Any]:
        """What a trace says of its origin: `profile --trace FOLDER` joins traces of one run."""
        return {"run": run} | ({"rank": self.rank, "ranks": self.size, "host": host()} if self.size > 1 else {})

    def trace_name(self) -> str:
        return f"trace.rank{self.rank}.json.gz" if self.size > 1 else "trace.json.gz"


def host() -> str:
    """An id of this boot of this machine: processes that share it read one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


_ranks = Ranks()


def current() -> Ranks:
    """The ranks of the run that this process takes part in."""
    return _ranks


def enter(ranks: Ranks) -> Ranks:
    global _ranks
    _ranks = ranks
    return ranks
