"""Ranks: who this process is, how ranks meet, and that a single process sends nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rank_pool import needs_torchrec, run_ranks
from torch import distributed

from recperf.distributed.ranks import Ranks
from recperf.distributed.rendezvous import agree_on_round, members
from recperf.distributed.world import RendezvousError, World
from recperf.errors import MachineError, UsageError
from recperf.train.metrics import Tally


def test_without_torchrun_there_is_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert World.from_environment() == World()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert World.from_environment().size == 1


def test_ranks_are_read_from_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    world = World.from_environment()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.is_leader) == (5, 8, 1, 4, False)
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(UsageError, match="not numbers"):
        World.from_environment()


def test_every_rank_of_a_host_with_too_few_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank in (0, 1):
        with pytest.raises(MachineError, match="2 ranks on a host need as many GPUs; this one has 1"):
            Ranks(rank=rank, size=2, local_rank=rank, local_size=2).join("cuda", 1)


def test_a_single_process_sends_nothing() -> None:
    world, tally = Ranks(), Tally()
    world.join("cpu", 1)
    assert not torch.distributed.is_initialized()
    tally.add(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert world.merge_tally(tally).metrics() == tally.metrics()
    assert world.maximum(3) == 3
    assert world.broadcast("x") == "x"
    assert world.leader_first(lambda: 7) == world.on_leader(lambda: 7) == 7


def test_ranks_that_do_not_meet(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"the ranks did not meet within 0\.1 s") as caught:
        World(rank=0, size=2).join("cpu", 0.1, init_method=f"file://{tmp_path / 'meeting'}")
    assert caught.value.where["cause"] == "rank 1 did not come"
    assert "GLOO_SOCKET_IFNAME" in str(caught.value.fix)
    assert "docs/launching.md" in str(caught.value.fix)
    assert not distributed.is_initialized()


def test_a_line_says_who_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    ranks = [(host, "H200") for host in ("node7", "node7", "node8")]
    assert members(ranks, "cpu:gloo,cuda:nccl") == (
        "3 ranks by gloo and nccl on eth0: 0 to 1 on node7 (H200); 2 on node8 (H200)"
    )
    assert members([(f"node{host}", "CPU") for host in range(10)], "gloo").endswith("7 on node7 (CPU); 2 more hosts")


def test_restarted_ranks_meet_in_a_new_round() -> None:
    """The store still has the keys of the previous ranks, and the new ones arrive one after the other."""
    store, rounds = distributed.HashStore(), []  # type: ignore[attr-defined]

    def meet(rank: int) -> str:
        time.sleep(0.1 * rank)
        return agree_on_round(store, rank, 3, 20)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            (name,) = set(pool.map(meet, range(3)))
            rounds.append(name)
    assert len(set(rounds)) == 3
    # A rank that has left again does not count.
    with pytest.raises(TimeoutError, match="is gone"):
        agree_on_round(store, 0, 3, 0.2)


@needs_torchrec
def test_a_different_config_or_other_data_is_an_error_on_all_ranks() -> None:
    config, data = zip(*run_ranks(2, "rank_states.unlike"))
    (error,) = set(config)
    assert error == ("ConfigError", "rank 1 has train.batch_size 65, rank 0 has 64", "train.batch_size", True)
    (error,) = set(data)
    assert error == ("DataError", "rank 1 has other data than rank 0", "digest 1", True)
