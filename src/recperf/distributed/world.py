"""The ranks of a run: who this one is, and what they tell each other. Torch is imported when there are others."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ..errors import MachineError, UsageError
from ..machine import out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

    from ..train.loop import Position
    from ..train.metrics import Tally

T = TypeVar("T")
_EVERY_S = 0.02


class RendezvousError(MachineError):
    """The ranks did not come together."""


class Signalled(Protocol):
    """Where signals to this process are noted."""

    received: int | None


@dataclass
class World:
    """A world of one needs no process group, and everything here is free."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    backend: str = "none"
    device: str = "cpu"
    joined: bool = False
    signal: int | None = None
    """The one that the ranks agreed to stop on."""
    stop_flag: Signalled | None = None
    """What this rank alone received so far."""
    shared_error: BaseException | None = None
    """An error that every rank knows of, and one of them says."""

    @classmethod
    def from_environment(cls) -> World:
        """As torchrun describes it; alone where it does not."""
        words = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        if not words["RANK"] or words["WORLD_SIZE"] in ("", "1"):
            return cls()
        try:
            size, rank = int(words["WORLD_SIZE"]), int(words["RANK"])
            local, local_size = int(words["LOCAL_RANK"] or rank), int(words["LOCAL_WORLD_SIZE"] or size)
        except ValueError:
            raise UsageError(f"RANK and WORLD_SIZE are no numbers: {words}", fix="start it with torchrun") from None
        return cls(rank=rank, size=size, local_rank=local, local_size=local_size)

    @property
    def is_leader(self) -> bool:
        """Rank 0 prints and writes; the others only work."""
        return self.rank == 0

    def join(self, device: str, timeout_s: float, *, init_method: str = "env://") -> None:
        """Meet the other ranks: gloo between CPUs, NCCL between GPUs, with gloo beside it for what lies on the host."""
        if self.size == 1 or self.joined:
            return
        from datetime import timedelta

        import torch
        from torch import distributed
        from torch.distributed.rendezvous import rendezvous

        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if self.device == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise MachineError(
                    f"rank {self.rank} is the {self.local_rank + 1}. of its host, which has "
                    f"{torch.cuda.device_count()} GPUs",
                    fix="as many ranks as GPUs, or --train.device cpu",
                )
            torch.cuda.set_device(self.local_rank)
        self.backend = "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        try:
            store, _, _ = next(rendezvous(init_method, self.rank, self.size, timeout=timeout))
            # torchrun keeps its store when it starts ranks again: those must not read the addresses of the ones before.
            prefix = f"recperf/{agreed_round(store, self.rank, self.size, timeout_s)}"
            distributed.init_process_group(
                self.backend,
                store=distributed.PrefixStore(prefix, store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
            )
        except (RuntimeError, TimeoutError) as error:
            if out_of_memory(error):
                raise
            raise self._not_met(timeout_s, error) from error
        self.joined = True

    def _not_met(self, timeout_s: float, error: Exception) -> RendezvousError:
        return RendezvousError(
            f"the ranks did not meet within {timeout_s:g} s",
            where={"rank": self.rank, "of": self.size, "was told": " ".join(str(error).split())[:200]},
            fix="GLOO_SOCKET_IFNAME names the network device between the hosts, see docs/launching.md; "
            "--distributed.timeout-s where ranks start late",
        )

    def leave(self) -> None:
        if self.joined:
            from torch import distributed

            self.joined = False
            distributed.destroy_process_group()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Over the ranks, in place; the same bits everywhere."""
        if self.size > 1:
            from torch import distributed

            distributed.all_reduce(tensor)
        return tensor

    def maximum(self, number: int) -> int:
        if self.size == 1:
            return number
        import torch
        from torch import distributed

        told = torch.tensor([number])
        distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
        return int(told)

    def any_true(self, flag: bool) -> bool:
        return bool(self.maximum(int(flag)))

    def broadcast(self, value: T) -> T:
        """What rank 0 has, on every rank."""
        if self.size == 1:
            return value
        from torch import distributed

        carried: list[Any] = [value if self.is_leader else None]
        distributed.broadcast_object_list(carried, src=0)
        found: T = carried[0]
        return found

    def gather(self, value: T) -> list[T]:
        """What every rank has, in their order, on rank 0; nothing on the others."""
        if self.size == 1:
            return [value]
        from torch import distributed

        found: list[Any] = [None] * self.size
        distributed.gather_object(value, found if self.is_leader else None, dst=0)
        return found if self.is_leader else []

    def on_leader(self, work: Callable[[], T]) -> T:
        """The result of what only rank 0 does."""
        return cast(T, self.broadcast(work() if self.is_leader else None))

    def leader_first(self, work: Callable[[], T]) -> T:
        """Every rank does it, rank 0 before the others, so that what it leaves on disk is made once."""
        if self.is_leader:
            found = work()
            self.barrier()
            return found
        self.barrier()
        return work()

    def barrier(self) -> None:
        if self.size > 1:
            self.maximum(0)

    def decide_on_leader(self, due: Callable[[Position], bool]) -> Callable[[Position], bool]:
        """Something that looks at the clock, asked on rank 0 for all."""
        if self.size == 1:
            return due
        return lambda at: self.any_true(self.is_leader and due(at))

    def merge_tally(self, tally: Tally) -> Tally:
        """What all ranks counted together; this rank's own tally stays as it is."""
        from ..train.metrics import Tally

        found = Tally(bins=tally.counts_2K.shape[1], device=tally.counts_2K.device)
        found.merge(tally)
        self.sum_(found.counts_2K)
        self.sum_(found.sums_2)
        return found


def agreed_round(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """A name that the ranks which are there now have in common, and no earlier ones had in the same store.

    How often torchrun has started them differs between hosts, so it is agreed on: each rank leaves a word of its own,
    rank 0 publishes a round with the words it sees, anew where one changes, and lets everyone go once all whose words
    are in it have said so. Ranks that are gone cannot say so.
    """
    ours, end, published = uuid.uuid4().hex, time.monotonic() + timeout_s, ""
    store.set(f"recperf/hello/{rank}", ours)
    hello = [f"recperf/hello/{other}" for other in range(size)]
    words: list[str] = []
    while time.monotonic() < end:
        if rank == 0 and store.check(hello):
            seen = [_text(store.get(key)) for key in hello]
            if seen != words:
                words, published = seen, uuid.uuid4().hex
                store.set("recperf/round", json.dumps([published, words]))
        if store.check(["recperf/round"]):
            name, told = json.loads(_text(store.get("recperf/round")))
            if told[rank : rank + 1] == [ours]:
                store.set(f"recperf/in/{name}/{rank}", "1")
                if rank == 0 and store.check([f"recperf/in/{name}/{other}" for other in range(size)]):
                    store.set("recperf/go", name)
                if store.check(["recperf/go"]) and _text(store.get("recperf/go")) == name:
                    return str(name)
        time.sleep(_EVERY_S)
    missing = [str(other) for other in range(size) if not store.check([hello[other]])]
    raise TimeoutError(f"rank {', '.join(missing)} did not come" if missing else "a rank that was there is gone")


def _text(value: bytes) -> str:
    return value.decode()


_world = World()


def current() -> World:
    """The world this process is in."""
    return _world


def enter(world: World) -> World:
    global _world
    _world = world
    return world
