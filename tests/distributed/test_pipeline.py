"""The ids of the next batch are sent while this one is computed, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from click_jobs import dlrm
from rank_jobs import STEPS, small
from rank_pool import needs_torchrec, run_ranks
from test_ranks import config

from recperf.distributed.config import DistributedConfig
from recperf.distributed.ranks import Ranks
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig

pytestmark = needs_torchrec
MIXED = "uid=column,item_id=table,album_id=data-parallel,artist_id=row"
ROWS = torch.float32
"""The type of rows in a message; ids and counts are integers."""


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_ids_are_sent_before_their_batch_is_looked_up() -> None:
    with_it, without = (run_ranks(2, "pipeline_jobs.looked_up", sharding=MIXED, following=how) for how in (True, False))
    for rank, plain in zip(with_it, without):
        # Three kinds of sharding send three messages each: counts, lengths and ids; then rows.
        assert [[kind for kind, _ in step].count(ROWS) for step in plain["told"]] == [3] * 2 * STEPS
        assert [len(step) for step in plain["told"]] == [12] * 2 * STEPS
        # The first lookup begins two batches, the last none, and an evaluation in between only its own.
        assert [len(step) for step in rank["told"]] == [21, 12, 12, 12, 3, 12]
        assert {kind for kind, _ in rank["told"][4]} == {ROWS}
        assert sorted(map(str, chain(*rank["told"]))) == sorted(map(str, chain(*plain["told"])))
        assert all(equal(ours, theirs) for ours, theirs in zip(rank["seen"], plain["seen"]))
        assert equal(rank["last"], plain["last"])


def trained(pipeline: bool, **options: Any) -> list[dict[str, Any]]:
    chosen = config(**options)
    chosen = replace(chosen, distributed=replace(chosen.distributed, pipeline=pipeline))
    return run_ranks(2, "pipeline_jobs.steps", config=chosen, count=8)


@pytest.mark.long
def test_training_is_the_same_to_the_bit() -> None:
    # With dropout, and a maximum that ranks agree on while they gather a batch.
    options = {"sharding": MIXED, "dropout": 0.5, "scale": "batch-max"}
    with_it, without = trained(True, **options), trained(False, **options)
    assert len(set(with_it[0]["losses"])) == 8
    for ours, theirs in zip(with_it, without):
        for name in ("losses", "samples", "metrics", "seen"):
            assert ours[name] == theirs[name], name
        assert all(torch.equal(a, b) for a, b in zip(ours["dense"], theirs["dense"]))
        assert equal(ours["tables"], theirs["tables"])


def order(chosen: DLRMv4WorkloadConfig) -> Any:
    """The batches of rank 1 of 2, without the others."""
    from recperf.workloads import find
    from recperf.workloads.dlrm_v4.ranks import RankTrial

    trial = RankTrial.__new__(RankTrial)
    trial.prepared, trial.world = find("dlrm-v4").prepare(chosen), Ranks(rank=1, size=2)
    return trial.inputs(trial.prepared.train_order())


def test_a_batch_knows_the_next_one() -> None:
    chosen = config(batch=60)
    batches = list(order(chosen).batches(0))
    assert len(batches) == len(order(chosen)) > 6
    for batch, after in zip(batches, batches[1:]):
        assert batch.following is after.inputs
    assert batches[-1].following is None
    # Resumed in the middle, the batches are the same.
    again = list(order(chosen).batches(0, 4))
    assert [batch.step for batch in again] == [batch.step for batch in batches[4:]]
    assert [len(batch) for batch in again] == [len(batch) for batch in batches[4:]]
    assert all(torch.equal(a.inputs.times_T, b.inputs.times_T) for a, b in zip(again, batches[4:]))


def test_no_batch_is_read_that_training_does_not_reach() -> None:
    chosen = config(batch=60)
    short = replace(chosen, train=replace(chosen.train, max_steps=3))
    batches = order(short).batches(0)
    assert [next(batches).following is None for _ in range(3)] == [False, False, True]
    # A window measured after training prefetches again.
    assert next(batches).following is not None
    off = order(replace(chosen, distributed=DistributedConfig(pipeline=False)))
    assert all(batch.following is None for batch in off.batches(0))


def test_windows_are_entered_with_their_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from recperf.workloads.dlrm_v4 import ranks as dlrm_v4_ranks

    entered: list[str] = []
    monkeypatch.setattr(dlrm_v4_ranks, "reached", entered.append)
    found = order(config(batch=60))
    for number, _ in enumerate(found.batches(0)):
        assert len(entered) == sum(first <= number for first in found.firsts)
    assert len(entered) > 1


def test_click_models_train_the_same_to_the_bit() -> None:
    chosen = dlrm("rowwise-adagrad", "t1=row,t2=column,t3=table,t4=data-parallel", max_steps=6)
    off = replace(chosen, distributed=replace(chosen.distributed, pipeline=False))
    ranks = run_ranks(2, "pipeline_jobs.clicks", configs={"with": chosen, "without": off}, count=6)
    for found in ranks:
        ours, theirs = found["with"], found["without"]
        assert len(set(ours["losses"])) == 6
        for name in ("losses", "samples", "metrics"):
            assert ours[name] == theirs[name], name
        assert equal(ours["tables"], theirs["tables"])
        # Counts, lengths and ids of three kinds of sharding; row-wise sums come back by another operation.
        assert theirs["told"] == [9] * 6
        assert ours["told"] == [18, 9, 9, 18, 9, 0]


def test_each_distinct_row_is_sent_once() -> None:
    ranks = run_ranks(2, "pipeline_jobs.repeated")
    for found in ranks:
        assert found["same"]
        assert found["distinct"] <= 6 * len(small().tables) < found["raw"] / 6
        for how, count in (("once", found["distinct"]), ("each", found["raw"])):
            assert max(numbers for kind, numbers in found[how] if kind == torch.int64) == count
    # All ranks together send as many rows back.
    for how, count in (("once", "distinct"), ("each", "raw")):
        rows = sum(numbers for found in ranks for kind, numbers in found[how] if kind == ROWS)
        assert rows == 16 * sum(found[count] for found in ranks)
