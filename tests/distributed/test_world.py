from __future__ import annotations

import pytest
import torch

from recperf.distributed.world import World
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
    assert (world.rank, world.size, world.local_rank, world.local_size, world.leads) == (5, 8, 1, 4, False)
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(UsageError, match="no numbers"):
        World.from_environment()


def test_alone_nothing_is_sent() -> None:
    world, tally = World(), Tally()
    world.join("cpu", 1)
    assert not torch.distributed.is_initialized()
    tally.add(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert world.merged(tally).metrics() == tally.metrics()
    assert (world.largest(3), world.told("x"), world.all_true(False), world.any_true(True)) == (3, "x", False, True)
    assert world.first_alone(lambda: 7) == world.of_first(lambda: 7) == 7
