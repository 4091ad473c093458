"""Ranks: who this process is, how ranks meet, their options and their library; a single process sends nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import needs_torchrec, run_ranks
from torch import distributed

from recperf.cli import doctor
from recperf.distributed import library, ranks
from recperf.distributed.config import DistributedConfig
from recperf.distributed.ranks import Ranks, RendezvousError
from recperf.errors import ConfigError, MachineError, UsageError
from recperf.runs.resume import fixed_fields
from recperf.train.metrics import Tally
from recperf.workloads.dlrm_v4.config import laptop


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
    assert not distributed.is_initialized()


@needs_torchrec
def test_a_different_config_or_other_data_is_an_error_on_all_ranks() -> None:
    config, data = zip(*run_ranks(2, "rank_states.unlike"))
    (error,) = set(config)
    assert error == ("ConfigError", "rank 1 has train.batch_size 65, rank 0 has 64", "train.batch_size", True)
    (error,) = set(data)
    assert error == ("DataError", "rank 1 has other data than rank 0", "digest 1", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [("item_id=diagonal", "data-parallel"), ("item_id", "table=value"), ("=row", "table=value"),
     ("uid=row,uid=table", "listed twice"), ("uid=table-row", "row, column, table"), ("uid=row,table", "list it first"),
     ("row,table", "list it first")],
)  # fmt: skip
def test_an_unknown_sharding_names_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(sharding=text)


@pytest.mark.parametrize(
    ("option", "device", "threads", "reason"),
    [("auto", "cuda", 4, "on: a GPU sends while it computes"),
     ("auto", "cpu", 1, "on: the ranks of this host use 2 of 4"),
     ("auto", "cpu", 2, "off: the ranks of this host use 4 of 4"), ("on", "cpu", 2, "on: requested"),
     ("off", "cuda", 1, "off: requested")],
)  # fmt: skip
def test_gradients_are_summed_beside_the_backward_pass_where_something_is_free_to(
    monkeypatch: pytest.MonkeyPatch, option: Any, device: str, threads: int, reason: str
) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: 4)
    world = Ranks(local_size=2, device=device)
    overlap, why = world.overlaps(DistributedConfig(overlap=option), threads)
    assert why.startswith(reason)
    assert overlap == why.startswith("on")


def test_a_resumed_run_may_be_sharded_differently() -> None:
    other = replace(
        laptop(),
        distributed=DistributedConfig(sharding="uid=row", timeout_s=9, pipeline=False, overlap="off", balance=False),
    )
    assert fixed_fields(other) == fixed_fields(laptop())
    # The precision of messages changes results.
    half = replace(laptop(), distributed=DistributedConfig(all_to_all="fp16"))
    assert fixed_fields(half) != fixed_fields(laptop())


def test_a_missing_torchrec_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(library.importlib, "import_module", missing)
    with pytest.raises(MachineError, match="No module named 'fbgemm_gpu'") as caught:
        library.require_torchrec()
    assert "pip install --no-deps torchrec==" in str(caught.value.fix)


@pytest.mark.long
@needs_torchrec
def test_doctor_runs_an_fbgemm_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.distributed().state == doctor.OK
    monkeypatch.setattr(torch.ops.fbgemm, "asynchronous_complete_cumsum", lambda lengths: lengths)
    with pytest.raises(MachineError, match="wrong numbers"):
        doctor.distributed()
