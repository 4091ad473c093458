"""Ranks: who this process is, how ranks meet, and that a single process sends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_pool import needs_torchrec, run_ranks
from torch import distributed

from recperf.distributed.ranks import Ranks, RendezvousError
from recperf.errors import MachineError, UsageError
from recperf.train.metrics import Tally


def test_without_torchrun_there_is_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Ranks.from_environment().size == 1


def test_ranks_are_read_from_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    world = Ranks.from_environment()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.is_leader) == (5, 8, 1, 4, False)
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(UsageError, match="not numbers"):
        Ranks.from_environment()


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
        Ranks(rank=0, size=2).join("cpu", 0.1, init_method=f"file://{tmp_path / 'meeting'}")
    assert caught.value.where["cause"] == "rank 1 did not come"
    assert "GLOO_SOCKET_IFNAME" in str(caught.value.fix)
    assert "docs/launching.md" in str(caught.value.fix)
    assert not distributed.is_initialized()


@needs_torchrec
def test_a_different_config_or_other_data_is_an_error_on_all_ranks() -> None:
    config, data = zip(*run_ranks(2, "rank_states.unlike"))
    (error,) = set(config)
    assert error == ("ConfigError", "rank 1 has train.batch_size 65, rank 0 has 64", "train.batch_size", True)
    (error,) = set(data)
    assert error == ("DataError", "rank 1 has other data than rank 0", "digest 1", True)
