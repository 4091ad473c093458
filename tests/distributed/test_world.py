from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rank_pool import needs_torchrec, run_ranks
from torch import distributed

from recperf.distributed.ranks import Ranks
from recperf.distributed.rendezvous import agree_on_round
from recperf.distributed.world import RendezvousError, World
from recperf.errors import UsageError
from recperf.train.metrics import Tally


def test_without_torchrun_one_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert World.from_environment() == World()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert World.from_environment().size == 1


def test_torchrun_says_who_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    world = World.from_environment()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.is_leader) == (5, 8, 1, 4, False)
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(UsageError, match="not numbers"):
        World.from_environment()


def test_alone_nothing_is_sent() -> None:
    world, tally = Ranks(), Tally()
    world.join("cpu", 1)
    assert not torch.distributed.is_initialized()
    tally.add(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert world.merge_tally(tally).metrics() == tally.metrics()
    assert (world.maximum(3), world.broadcast("x"), world.any_true(False), world.any_true(True)) == (
        3,
        "x",
        False,
        True,
    )
    assert world.leader_first(lambda: 7) == world.on_leader(lambda: 7) == 7


def test_ranks_that_do_not_meet(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"the ranks did not meet within 0\.1 s") as found:
        World(rank=0, size=2).join("cpu", 0.1, init_method=f"file://{tmp_path / 'meeting'}")
    assert found.value.where["cause"] == "rank 1 did not come"
    assert "GLOO_SOCKET_IFNAME" in str(found.value.fix)
    assert "docs/launching.md" in str(found.value.fix)
    assert not distributed.is_initialized()


def test_ranks_started_again_meet_in_a_round_of_their_own() -> None:
    """The store has what the ranks before them left, and they come one after the other."""
    store, rounds = distributed.HashStore(), []  # type: ignore[attr-defined]

    def meet(rank: int) -> str:
        time.sleep(0.1 * rank)
        return agree_on_round(store, rank, 3, 20)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            (found,) = set(pool.map(meet, range(3)))
            rounds.append(found)
    assert len(set(rounds)) == 3
    # One that went again is not counted among those that are there.
    with pytest.raises(TimeoutError, match="is gone"):
        agree_on_round(store, 0, 3, 0.2)


@needs_torchrec
def test_ranks_with_another_config_or_other_data_are_named_by_all() -> None:
    config, data = zip(*run_ranks(2, "rank_states.unlike"))
    (told,) = set(config)
    assert told == ("ConfigError", "rank 1 has train.batch_size 65, rank 0 has 64", "train.batch_size", True)
    (told,) = set(data)
    assert told == ("DataError", "rank 1 has other data than rank 0", "digest 1", True)
