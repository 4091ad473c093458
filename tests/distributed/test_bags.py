"""dlrm and micro-dlrm trained by 1, 2 and 4 ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_jobs import dlrm
from rank_pool import needs_torchrec, run_ranks

from recperf.data.config import MovieLensConfig
from recperf.distributed.config import DistributedConfig
from recperf.errors import ConfigError
from recperf.models.tiers.config import TablesConfig
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig
from recperf.workloads.micro_dlrm.config import default as micro_default

STEPS = 12
TOLERANCE = 1e-4
"""Relative, of a loss: ranks add gradients up in another order."""
FILES = TablesConfig(placement="file", resident="64KiB")
MIXED = "t1=row,t2=table,t3=data-parallel"
COLUMNS = "t1=column,t2=column,t3=row,t4=data-parallel"


def micro(optimizer: Any = "adamw", **options: Any) -> MicroDLRMConfig:
    default = micro_default()
    train = replace(default.train, device="cpu", threads=1, batch_size=251, table_optimizer=optimizer)
    if optimizer != "adamw":
        train = replace(train, table_learning_rate=0.05, table_weight_decay=0.0)
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
        "micro, adagrad": micro("adagrad"),
        "micro, rowwise-adam": micro("rowwise-adam", sharding="data-parallel"),
    }


@functools.cache
def trained(ranks: int, name: str) -> list[dict[str, Any]]:
    return run_ranks(ranks, "training", config=configs()[name], steps=STEPS)


def close(ours: list[float], theirs: list[float], tolerance: float = TOLERANCE) -> bool:
    return len(ours) == len(theirs) and all(abs(a - b) <= tolerance * abs(a) for a, b in zip(ours, theirs))


def same(ours: Any, theirs: Any, **how: Any) -> None:
    """Two states, number by number; to the bit where no tolerance is given."""
    torch.testing.assert_close(ours, theirs, **(how or {"rtol": 0, "atol": 0}))


@needs_torchrec
@pytest.mark.parametrize(
    "name", ["sgd", *(pytest.param(name, marks=pytest.mark.long) for name in configs() if name != "sgd")]
)
def test_losses_weights_and_scores_are_those_of_a_single_process(name: str) -> None:
    one, results = trained(1, name)[0], trained(2, name)
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


@pytest.mark.long
@needs_torchrec
def test_impossible_options_fail_on_every_rank() -> None:
    cases = {
        "AdamW changes every row": dlrm("adamw", "t1=row"),
        "distributed.sharding user=column": micro(sharding="user=column"),
        "no rows are sent": micro(all_to_all="fp16"),
        "fp16: every rank has a copy": dlrm("sgd", everywhere("data-parallel"), all_to_all="fp16"),
        "t1=column: rows in tiers": dlrm("sgd", "t1=column", tables=FILES),
        "in one piece": dlrm("sgd", micro_batches=2),
        "model.dim is 6": replace(dlrm("sgd"), model=replace(dlrm("sgd").model, dim=6, bottom=(6, 6))),
    }
    results = run_ranks(2, "refused", configs=list(cases.values()))
    for told in results:
        for what, (kind, text) in zip(cases, told):
            assert kind == "ConfigError", what
            assert what in text


@pytest.mark.long
@needs_torchrec
def test_fewer_samples_than_ranks() -> None:
    cases = {"sgd": dlrm("sgd", MIXED, batch=1), "adamw": dlrm("adamw", batch=1)}
    (one,), results = (run_ranks(n, "trainings", configs=cases, steps=STEPS) for n in (1, 2))
    for name in cases:
        assert close(one[name]["losses"], results[0][name]["losses"], 1e-3), name
        assert torch.equal(results[1][name]["labels"], one[name]["labels"])


@pytest.mark.long
@needs_torchrec
def test_messages_in_half_precision() -> None:
    cases = ("row", "table", "column")
    half = {kind: dlrm("sgd", everywhere(kind), all_to_all="fp16") for kind in cases}
    results, one = run_ranks(2, "trainings", configs=half, steps=STEPS)[0], trained(1, "sgd")[0]
    for kind in cases:
        table = results[kind]["state"]["model"]["embeddings.table_RD"]
        exact = one["state"]["model"]["embeddings.table_RD"]
        assert not torch.allclose(table, exact, rtol=0, atol=1e-6), kind
        same(table, exact, rtol=0.01, atol=2e-3)
        assert close(one["losses"], results[kind]["losses"], 2e-3), kind


@pytest.mark.long
@needs_torchrec
def test_ids_that_are_sent_ahead_change_no_bit() -> None:
    ahead = dlrm("rowwise-adagrad", "t1=row,t2=column,t3=table,t4=data-parallel")
    cases = {"ahead": ahead, "in turn": replace(ahead, distributed=replace(ahead.distributed, pipeline=False))}
    for told in run_ranks(2, "trainings", configs=cases, steps=STEPS):
        assert told["ahead"]["losses"] == told["in turn"]["losses"]
        same(told["ahead"]["state"], told["in turn"]["state"])


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 't1'"):
        dlrm("sgd", "t11=row")
    with pytest.raises(ConfigError, match="did you mean 'user'"):
        micro(sharding="users=data-parallel")
