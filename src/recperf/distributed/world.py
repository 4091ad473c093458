"""The ranks of a run and the messages between them. A single process is a world of one, whose methods send nothing.
Torch is imported only where there are several ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from ..errors import MachineError, UsageError
from ..machine import out_of_memory
from .job import meeting

if TYPE_CHECKING:
    from torch import Tensor

    from ..train.metrics import Tally

T = TypeVar("T")


class RendezvousError(MachineError):
    """The ranks did not meet in time."""


class ReceivesSignals(Protocol):
    """Remembers the signal that this process received."""

    received: int | None


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
        from .rendezvous import connect, meet

        self.device, self.timeout_s = self._device(device), timeout_s
        self.backend = "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            store = meet(self.rank, self.size, timeout_s, init_method or meeting())
            connect(self.backend, store, self.rank, self.size, timeout_s)
        except (RuntimeError, TimeoutError) as error:
            if out_of_memory(error):
                raise
            shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            raise RendezvousError(
                f"the ranks did not meet within {timeout_s:g} s",
                where={"rank": self.rank, "of": self.size, "cause": " ".join(str(error).split())[:200]},
                fix="set GLOO_SOCKET_IFNAME to the network device between the hosts, see docs/launching.md; "
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
