"""dlrm and micro-dlrm trained by 1, 2 and 4 ranks."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click_jobs import dlrm
from rank_pool import home, needs_torchrec, run_ranks, start

from recperf.cli import main
from recperf.config import from_json, to_json
from recperf.data.config import MovieLensConfig
from recperf.distributed.config import DistributedConfig
from recperf.errors import ConfigError
from recperf.plan.devices import KNOWN
from recperf.plan.predict import predict
from recperf.plan.sharding import parallelism_of
from recperf.workloads import find
from recperf.workloads.dlrm.config import DLRMWorkloadConfig
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig
from recperf.workloads.micro_dlrm.config import default as micro_default

STEPS = 12
TOLERANCE = 1e-4
"""Relative, of a loss: ranks add gradients up in another order."""
MIXED = "t1=row,t2=table,t3=data-parallel"
COLUMNS = "t1=column,t2=column,t3=row,t4=data-parallel"


def micro(**options: Any) -> MicroDLRMConfig:
    default = micro_default()
    train = replace(default.train, device="cpu", threads=1, batch_size=251)
    return replace(
        default, data=MovieLensConfig(source="embedded"), train=train, distributed=DistributedConfig(**options)
    )


def everywhere(kind: str) -> str:
    return ",".join(f"t{index}={kind}" for index in range(1, 5))


def configs() -> dict[str, Any]:
    return {
        "sgd": dlrm("sgd", MIXED),
        "adagrad": dlrm("adagrad", COLUMNS),
        "rowwise": dlrm("rowwise-adagrad", "t1=row,t2=data-parallel"),
        "adam": dlrm("adam", everywhere("data-parallel"), learning_rate=0.01),
        "one id": dlrm("sgd", ids=1),
        "adamw": dlrm("adamw", learning_rate=0.01, weight_decay=0.1, table_weight_decay=0.5),
        "micro": micro(),
    }


@functools.cache
def trained(ranks: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(ranks, "click_jobs.trainings", configs=configs(), steps=STEPS)


def close(ours: list[float], theirs: list[float], tolerance: float = TOLERANCE) -> bool:
    return len(ours) == len(theirs) and all(abs(a - b) <= tolerance * abs(a) for a, b in zip(ours, theirs))


def same(ours: Any, theirs: Any, **how: Any) -> None:
    """Two states, number by number; to the bit where no tolerance is given."""
    torch.testing.assert_close(ours, theirs, **(how or {"rtol": 0, "atol": 0}))


@needs_torchrec
@pytest.mark.parametrize("name", configs())
def test_losses_weights_and_scores_are_those_of_a_single_process(name: str) -> None:
    one, results = trained(1)[0][name], [told[name] for told in trained(2)]
    first, *others = results
    # Initial weights are equal to the bit, however they are sharded.
    same(first["first"], one["first"])
    assert close(one["losses"], first["losses"]), (one["losses"], first["losses"])
    assert len(set(one["losses"])) == STEPS
    same(first["state"], one["state"], rtol=1e-3, atol=1e-5)
    same(first["logits"], one["logits"], rtol=1e-3, atol=1e-4)
    assert first["metrics"]["auc"] == pytest.approx(one["metrics"]["auc"], abs=2e-3)
    for told in results:
        assert told["samples"] == one["samples"]
        # The same rows, each scored once.
        assert torch.equal(told["labels"].float(), one["labels"].float())
    for told in others:
        assert (told["losses"], told["metrics"], told["plan"]) == (first["losses"], first["metrics"], first["plan"])
        assert (told["first"], told["state"]) == ({}, {})
        same(told["dense"], first["dense"])
    # Ranks looked up what one process did, each its own part.
    assert sorted(torch.cat([told["rows"] for told in results]).tolist()) == sorted(one["rows"].tolist())
    tables = "embeddings.weight_RD" if name in ("adamw", "micro") else "embeddings.table_RD"
    assert not torch.allclose(one["state"]["model"][tables], one["first"]["model"][tables], atol=1e-3)


@functools.cache
def overlapped(ranks: int, overlap: str = "on") -> list[dict[str, dict[str, Any]]]:
    """Of models whose gradients fill some buckets."""
    crossed = dlrm("sgd", MIXED)
    cases = {
        "cross": replace(crossed, model=replace(crossed.model, interaction="dcn", cross_rank=4)),
        "dot": dlrm("rowwise-adagrad", "t1=row,t2=data-parallel"),
        "micro": micro(),
    }
    cases = {
        name: replace(config, distributed=replace(config.distributed, overlap=overlap))
        for name, config in cases.items()
    }
    return run_ranks(ranks, "click_jobs.losses", configs=cases, steps=50, bucket_bytes=500)


@pytest.mark.long
@needs_torchrec
def test_gradients_are_summed_during_the_backward_pass() -> None:
    one, two, afterwards = overlapped(1)[0], overlapped(2), overlapped(2, overlap="off")
    for name, alone in one.items():
        first, second = two[0][name], two[1][name]
        assert close(alone["losses"], first["losses"], 1e-6), (name, alone["losses"], first["losses"])
        assert first["losses"] == second["losses"] == afterwards[0][name]["losses"], name
        same(first["dense"], second["dense"])
        # Two numbers have one sum, in whichever message they are.
        same(first["dense"], afterwards[0][name]["dense"])
        assert first["sent"] == first["buckets"] > 1, name
        assert (afterwards[0][name]["sent"], afterwards[0][name]["buckets"]) == (0, 1)


@pytest.mark.long
@needs_torchrec
def test_three_ranks_resume_to_the_bit() -> None:
    """Among them the order of a sum depends on its message: a resumed run sends the same ones from its first step."""
    narrow = dlrm("sgd", MIXED)
    wide = replace(
        narrow,
        model=replace(narrow.model, bottom=(6, 64, 64, 8), top=(64, 64, 1)),
        distributed=replace(narrow.distributed, overlap="on"),
    )
    straight, again = run_ranks(3, "click_jobs.resumed", config=wide, steps=5, bucket_bytes=10_000)[0]
    same(again, straight)


@pytest.mark.long
@needs_torchrec
def test_a_state_resumes_with_other_ranks_and_sharding() -> None:
    straight, turns = trained(1)[0], (2, 1, 2)
    shardings = {"sgd": ("", COLUMNS), "adagrad": (MIXED, "t1=table,t3=column"), "rowwise": ("t1=table", "t3=row")}
    shardings["adam"] = (everywhere("data-parallel"),) * 2
    states: dict[str, Any] = dict.fromkeys(configs())
    losses: dict[str, list[float]] = {name: [] for name in states}
    steps = STEPS // len(turns)
    for turn, ranks in enumerate(turns):
        divided = {
            name: replace(config, distributed=DistributedConfig(sharding=shardings.get(name, ("", ""))[turn % 2]))
            for name, config in configs().items()
        }
        told = run_ranks(
            ranks, "click_jobs.going_on", configs=divided, steps=steps, states=states, done=steps * turn
        )  # fmt: skip
        for name, result in told[0].items():
            if turn:
                # What was loaded is what was saved, to the bit.
                same(result["first"], states[name])
            states[name] = result["state"]
            losses[name] += result["losses"]
    for name, state in states.items():
        assert close(straight[name]["losses"], losses[name]), name
        same(state, straight[name]["state"], rtol=1e-3, atol=1e-5)


@needs_torchrec
def test_the_plan_says_which_rank_holds_what_and_why() -> None:
    plans = {name: told["plan"] for name, told in trained(2)[0].items()}
    lines = [line.split() for line in plans["sgd"].splitlines()]
    said = {(line[0], line[1]): (line[2], line[3], line[-1]) for line in lines[1:]}
    requested = "--distributed.sharding"
    assert said["0", "t1"] == said["1", "t1"] == ("row", "fused", requested)
    assert said["0", "t3"] == said["1", "t3"] == ("data-parallel", "copy", requested)
    assert [kind for (_, table), kind in said.items() if table == "t2"] == [("table", "fused", requested)]
    assert [kind for (_, table), (kind, _, _) in said.items() if table == "t4"] == ["table"]
    # 200 rows of 8 numbers of 4 bytes: SGD remembers nothing, Adagrad every number of a rank's 100 rows, row-wise
    # Adagrad one for each row of the whole table.
    assert "6,400" in next(line for line in plans["sgd"].splitlines() if " t3 " in line)
    assert "6,400" in next(line for line in plans["adagrad"].splitlines() if " t3 " in line)
    assert "7,200" in next(line for line in plans["rowwise"].splitlines() if " t3 " in line)
    assert all("AdamW changes every row" in line for line in plans["micro"].splitlines()[1:])
    assert len(plans["micro"].splitlines()) == 1 + 2 * 3


@needs_torchrec
@pytest.mark.parametrize("name", configs())
def test_a_run_prints_the_placement_that_recperf_plan_predicts(name: str) -> None:
    config = configs()[name]
    workload = find("micro-dlrm" if name == "micro" else "dlrm").planned(config)
    plan = predict(workload, 2, KNOWN["h200"], parallelism=parallelism_of(config.distributed))
    expected = {
        (str(rank), one.table.name, one.kind, f"{one.weight_R[rank] + one.state_R()[rank]:,}")
        for one in plan.placed
        for rank in range(2)
        if one.width_R[rank]
    }
    lines = [re.split(r" {2,}", line.strip()) for line in trained(2)[0][name]["plan"].splitlines()[1:]]
    assert {(rank, table, kind, held) for rank, table, kind, _, _, _, held, _ in lines} == expected


@needs_torchrec
def test_impossible_options_fail_on_every_rank() -> None:
    cases = {
        "AdamW changes every row": dlrm("adamw", "t1=row"),
        "distributed.sharding user=column": micro(sharding="user=column"),
        "distributed.placement item=host": micro(placement="item=host"),
        "no rows are sent": micro(all_to_all="fp16"),
        "fp16: every rank has a copy": dlrm("sgd", everywhere("data-parallel"), all_to_all="fp16"),
        "needs a GPU": dlrm("sgd", placement="t1=cached-host"),
        "in one piece": dlrm("sgd", micro_batches=2),
        "model.dim is 6": replace(dlrm("sgd"), model=replace(dlrm("sgd").model, dim=6, bottom=(6, 6))),
    }
    results = run_ranks(2, "click_jobs.refused", configs=list(cases.values()))
    for told in results:
        for what, (kind, text) in zip(cases, told):
            assert kind == "ConfigError", what
            assert what in text


@pytest.mark.long
@needs_torchrec
def test_fewer_samples_than_ranks() -> None:
    cases = {"sgd": dlrm("sgd", MIXED, batch=1), "adamw": dlrm("adamw", batch=1)}
    (one,), results = (run_ranks(n, "click_jobs.trainings", configs=cases, steps=STEPS) for n in (1, 2))
    for name in cases:
        assert close(one[name]["losses"], results[0][name]["losses"], 1e-3), name
        assert torch.equal(results[1][name]["labels"], one[name]["labels"])


@pytest.mark.long
@needs_torchrec
def test_messages_in_half_precision() -> None:
    cases = ("row", "table", "column")
    half = {kind: dlrm("sgd", everywhere(kind), all_to_all="fp16") for kind in cases}
    results, one = run_ranks(2, "click_jobs.trainings", configs=half, steps=STEPS)[0], trained(1)[0]["sgd"]
    for kind in cases:
        table = results[kind]["state"]["model"]["embeddings.table_RD"]
        exact = one["state"]["model"]["embeddings.table_RD"]
        assert not torch.allclose(table, exact, rtol=0, atol=1e-6), kind
        same(table, exact, rtol=0.01, atol=2e-3)
        assert close(one["losses"], results[kind]["losses"], 2e-3), kind


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 't1'"):
        dlrm("sgd", "t11=row")
    with pytest.raises(ConfigError, match="did you mean 'user'"):
        micro(sharding="users=data-parallel")


def test_a_config_without_the_distributed_section_is_read() -> None:
    saved = to_json(dlrm())
    del saved["distributed"]
    assert from_json(DLRMWorkloadConfig, saved) == dlrm()


def test_a_workload_without_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "micro-dlrm-dram", "--ranks", "2"]) == 2
    assert "runs in a single process" in capsys.readouterr().err


@pytest.mark.long
@needs_torchrec
def test_a_run_of_two_ranks_resumes_in_a_single_process(tmp_path: Path) -> None:
    arguments = [
        "run", "dlrm", "--data.batches", "6", "--model.bottom", "8", "64", "--model.top", "8", "1",
        "--distributed.sharding", "t1=row,t2=column", "--train.batch-size", "64", "--train.max-steps", "6",
        "--train.device", "cpu",
        "--train.threads", "1", "--train.checkpoint-steps", "3", "--target.beat", "none", "--no-peaks", "--no-report",
        "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    trouble = {"trouble": "fails", "at": 4, "how": "stop", "on": 1}
    ranks = start(2, arguments, tmp_path, home=str(home()), **trouble)
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [75, 75]
    assert "placement of the tables" in (tmp_path / "rank-0.log").read_text()
    assert (tmp_path / "rank-1.log").read_text() == ""
    assert main(["run", "--resume", str(tmp_path / "run"), "--no-peaks", "--no-report", "--quiet"]) == 0
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("step") == 6
