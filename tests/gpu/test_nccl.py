"""Two ranks between GPUs, by NCCL: what tests/distributed tries between CPUs. Each runs between CPUs too, by gloo, so
that the tests themselves are tried where there is no GPU.

Two ranks share one GPU: each says that it is alone on its host. How fast they are means nothing.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_hosts import Hosts
from rank_jobs import dlrm
from rank_pool import needs_torchrec, run_ranks
from test_bags import MIXED, close, everywhere, micro, same
from test_rank_tiers import configs as tiered_configs
from test_ranks import config as history_config

from recperf.cli import main
from recperf.distributed.config import DistributedConfig
from recperf.models.tiers.config import TablesConfig
from recperf.workloads import find

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
DEVICES = [pytest.param("cuda", marks=needs_gpu), pytest.param("cpu", marks=pytest.mark.long)]
STEPS = 8
HOST = TablesConfig(placement="host", device_bytes="64KiB", resident="64KiB")
TABLES = {
    "device": ("--distributed.sharding", "t1=row,t2=column"),
    "file": (
        "--distributed.sharding", "t1=row,t2=table", "--model.rows", "60000", "40000", "20000", "--data.no-distinct",
        "--tables.placement", "file", "--tables.device-bytes", "1MiB", "--tables.resident", "1MiB",
    ),
}  # fmt: skip
NAMED_S = 150.0
"""Seconds within which a rank that is gone ends the other one, whose timeout is 20."""
ENDED = (4, -signal.SIGABRT)
"""Exit codes of a rank that lost another one: gloo raises an error, torch's watchdog of NCCL aborts the process."""
Start = Callable[..., Hosts]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start ranks in a folder of their own."""

    def begin(name: str, size: int = 2, **request: Any) -> Hosts:
        return Hosts(tmp_path / name, size, **request)

    return begin


def on(config: Any, device: str) -> Any:
    """A config for a device, in float32: rounded products would hide differences."""
    fast = {"fast": replace(config.fast, precision="float32")} if hasattr(config, "fast") else {}
    return replace(config, train=replace(config.train, device=device), **fast)


def cases(device: str) -> dict[str, Any]:
    """dlrm and micro-dlrm with every sharding, optimizer and memory."""
    configs = {
        "row": dlrm("rowwise-adagrad", everywhere("row")),
        "column": dlrm("adagrad", everywhere("column")),
        "table": dlrm("sgd", everywhere("table")),
        "mixed": dlrm("sgd", MIXED),
        "fp16": dlrm("sgd", everywhere("row"), all_to_all="fp16"),
        "copies": micro(),
    }
    if device == "cuda":
        configs["host"] = dlrm("rowwise-adagrad", everywhere("row"), tables=HOST)
    return {name: on(config, device) for name, config in configs.items()}


@needs_torchrec
@pytest.mark.parametrize("device", DEVICES)
def test_losses_of_every_sharding_are_those_of_a_single_process(device: str, start: Start) -> None:
    """And states move between ranks on GPUs and on CPUs: what one side saved the other resumes, to the bit."""
    configs = cases(device)
    told: dict[str, Any] = {"job": "trainings", "device": device}
    two = start("two", **told, arguments={"configs": configs, "steps": STEPS})
    one = start("one", 1, **told, arguments={"configs": configs, "steps": STEPS}).results()[0]
    ranks = two.results()
    for name in configs:
        first, second = (told[name] for told in ranks)
        tolerance = 2e-3 if name == "fp16" else 1e-4
        assert close(one[name]["losses"], first["losses"], tolerance), (name, one[name]["losses"], first["losses"])
        assert (first["losses"], first["samples"], first["plan"]) == (
            second["losses"], second["samples"], second["plan"],
        ), name  # fmt: skip
        same(first["first"], one[name]["first"])
        if name != "fp16":
            same(first["state"], one[name]["state"], rtol=1e-3, atol=1e-5)
        assert torch.equal(first["labels"].float(), one[name]["labels"].float())
        same(second["dense"], first["dense"])
        memory = {line.split()[3] for line in first["plan"].splitlines()[1:]}
        assert memory == {"host" if name == "host" else "device"}, first["plan"]
    # The states of GPU ranks are resumed by CPU ranks, with other shardings, and theirs by GPU ranks again.
    moved = {"row": MIXED, "column": "t1=table,t3=row", "mixed": everywhere("column")}
    states = {name: ranks[0][name]["state"] for name in moved}
    for place in ("cpu", device):
        divided = {name: on(dlrm(configs[name].train.optimizer, moved[name]), place) for name in moved}
        arguments: dict[str, Any] = {"configs": divided, "steps": 1, "states": states, "done": STEPS}
        if place == "cpu" and device != "cpu":
            resumed = run_ranks(2, "going_on", **arguments)
        else:
            resumed = start(f"resumed-{place}", job="going_on", device=place, arguments=arguments).results()
        for name in moved:
            same(resumed[0][name]["first"], states[name])
        states = {name: resumed[0][name]["state"] for name in moved}


@needs_torchrec
@pytest.mark.parametrize("device", DEVICES)
def test_histories_train_as_in_a_single_process(device: str, start: Start) -> None:
    """dlrm-v4 with every sharding and memory, the ids of the next batch sent ahead in a stream of their own."""
    plain = on(history_config(), device)
    tables = tuple(plain.model.tables)

    def all_tables(kind: str, **options: Any) -> Any:
        sharding = ",".join(f"{name}={kind}" for name in tables)
        return replace(plain, distributed=replace(plain.distributed, sharding=sharding, **options))

    configs = {"planned": plain, **{kind: all_tables(kind) for kind in ("row", "column", "table")}}
    configs["fp16"] = all_tables("row", all_to_all="fp16")
    if device == "cuda":
        configs["host"] = replace(all_tables("row"), tables=HOST)
    told: dict[str, Any] = {"job": "trainings", "device": device}
    two = start("two", **told, arguments={"configs": configs, "steps": STEPS})
    one = start("one", 1, **told, arguments={"configs": {"one": plain}, "steps": STEPS}).results()[0]["one"]
    assert len(set(one["losses"])) == STEPS
    ranks = two.results()
    for name in configs:
        first, second = (told[name] for told in ranks)
        # With columns each shard of a row has an Adagrad state of its own.
        tolerance = {"fp16": 2e-3, "column": 5e-2}.get(name, 1e-4)
        assert close(one["losses"][:2], first["losses"][:2], 1e-4 if name == "column" else tolerance), name
        assert close(one["losses"], first["losses"], tolerance), (name, one["losses"], first["losses"])
        assert (first["losses"], first["metrics"]) == (second["losses"], second["metrics"]), name
        if tolerance == 1e-4:
            same(first["state"]["model"], one["state"]["model"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_catalogue_that_ranks_divide_is_scored_as_by_a_single_process(device: str, start: Start) -> None:
    """The highest logarithms, sums of exponentials and gradients of users are reduced between GPUs."""
    default = find("next-item").presets["default"]()
    # On a GPU ranks draw another dropout than a single process does.
    data = replace(default.data, users=60, groups=4, group_items=10)
    model = replace(default.model, items=40, dropout=0.0)
    train = replace(default.train, batch_size=7, threads=1, graph="off", precision="float32")
    plain = on(replace(default, data=data, model=model, train=train), device)
    divided = replace(plain, distributed=DistributedConfig(sharding="row"))
    told: dict[str, Any] = {"job": "trainings", "device": device}
    two = start("two", **told, arguments={"configs": {"row": divided}, "steps": STEPS})
    one = start("one", 1, **told, arguments={"configs": {"row": plain}, "steps": STEPS}).results()[0]["row"]
    first, second = (rank["row"] for rank in two.results())
    assert first["losses"] == second["losses"]
    assert close(one["losses"], first["losses"], 1e-6 if device == "cpu" else 1e-5), (one["losses"], first["losses"])
    same(first["state"]["model"], one["state"]["model"], rtol=1e-3, atol=1e-4)


@needs_torchrec
@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_host_memory_or_files_train_as_rows_on_the_device(device: str, start: Start) -> None:
    """Behind a cache that holds less than half of them, to the bit."""
    places = ["device", "file", *(["host"] if device == "cuda" else [])]
    tables = {place: replace(HOST, placement=place) for place in places}  # type: ignore[arg-type]
    tiered = tiered_configs()
    if device == "cuda":
        train = replace(tiered["table"].train, optimizer="adam", learning_rate=0.01)
        tiered["adam"] = replace(tiered["table"], train=train)
    configs = {
        f"{name} {place}": on(replace(config, tables=tables[place]), device)
        for name, config in tiered.items()
        for place in places
    }
    ranks = start("two", job="trainings", device=device, arguments={"configs": configs, "steps": 12}).results(300)
    for name in tiered:
        expected = ranks[0][f"{name} device"]
        for place in places[1:]:
            result = ranks[0][f"{name} {place}"]
            assert result["losses"] == expected["losses"], (name, place)
            same(result["state"], expected["state"])
            moved = [told[f"{name} {place}"]["moved"] for told in ranks]
            assert any(min(one) > 0 for one in moved if one), (name, place, moved)


def clicks(run: Path, device: str, *more: str) -> list[str]:
    """A run of dlrm that ranks can begin within seconds."""
    return [
        "run", "dlrm", "--data.batches", "6", "--model.bottom", "8", "64", "--model.top", "8", "1",
        "--train.batch-size", "64", "--train.max-steps", "6",
        "--train.device", device, "--train.threads", "1", "--train.checkpoint-steps", "2", "--target.beat", "none",
        "--fast.precision", "float32", "--distributed.timeout-s", "20", "--no-peaks", "--no-report",
        "--run-dir", str(run), *more,
    ]  # fmt: skip


def losses(run: Path) -> dict[int, float]:
    logged = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in logged if event["kind"] == "step"}


@needs_torchrec
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_rank_ends_the_other_and_the_run_resumes(
    device: str, tables: str, start: Start, tmp_path: Path
) -> None:
    run, more = tmp_path / "run", TABLES[tables]
    killed = start("killed", words=clicks(run, device, *more), trouble="fails", how={"at": 6, "how": "kill"})
    first, second = killed.ended(NAMED_S)
    assert (first in ENDED, second) == (True, -signal.SIGKILL), killed.tails()
    assert "Traceback" not in killed.said(0), killed.tails()
    resumed = start("resumed", words=["run", "--resume", str(run), "--no-peaks", "--no-report"])
    assert resumed.ended() == [0, 0], resumed.tails()
    alone = tmp_path / "alone"
    assert main([*clicks(alone, device, *more), "--quiet"]) == 0
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    straight = tmp_path / "straight"
    unbroken = start("unbroken", words=clicks(straight, device, *more))
    assert unbroken.ended() == [0, 0], unbroken.tails()
    assert losses(run) == losses(straight), "to the bit"


@pytest.mark.parametrize("device", DEVICES)
def test_the_link_that_a_plan_is_calibrated_with_is_measured(device: str, start: Start) -> None:
    first, second = start("two", job="recperf.planning.link.between", device=device).results()
    assert first.backend == second.backend == {"cuda": "nccl", "cpu": "gloo"}[device]
    # No message between processes arrives within 100 ns or takes a second, and no memory is faster than 100 TB/s.
    assert 1e-7 < first.latency_s < 1
    assert 1e6 < first.bytes_per_s < 1e14
    assert first.late == second.late >= 0
