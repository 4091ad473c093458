"""dlrm-v4 on 1, 2 and 4 ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_jobs import events, small
from rank_pool import home, needs_torchrec, run_ranks

from recperf.data.yambda.config import HistoryConfig, WindowConfig
from recperf.distributed.config import DistributedConfig
from recperf.models.dlrm_v4.config import HSTUConfig
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig, EvaluationConfig, EventsConfig, HistoryTrainConfig

pytestmark = needs_torchrec
STEPS = 12
TOLERANCE = 1e-4
"""Relative, of a loss: ranks add gradients up in another order."""


def config(*, sharding: str = "", dropout: float = 0.0, scale: str = "fixed", batch: int = 30) -> DLRMv4WorkloadConfig:
    data = EventsConfig(
        path=events(home() / "events"),
        history=HistoryConfig(length=6, scan=20),
        windows=WindowConfig(seconds=50 * 86_400, min_history=2),
        leftover="keep",
    )
    layers = HSTUConfig(
        dim=8,
        layers=1,
        heads=1,
        qk_dim=8,
        v_dim=8,
        max_length=16,
        dropout=dropout,
        attention_scale=scale,  # type: ignore[arg-type]
    )
    model = replace(
        small(), hstu=layers, input_dropout=dropout, encoder_hidden=8, item_hidden=8, head_hidden=8, positions=32,
        time_buckets=16,
    )  # fmt: skip
    train = HistoryTrainConfig(batch_size=batch, device="cpu", threads=1, warmup_steps=2)
    return DLRMv4WorkloadConfig(
        data=data,
        model=model,
        train=train,
        evaluate=EvaluationConfig(batch_size=50),
        distributed=DistributedConfig(sharding=sharding),
    )


@functools.cache
def trained(ranks: int, **options: Any) -> list[dict[str, Any]]:
    return run_ranks(ranks, "training", config=config(**options), steps=STEPS)


def close(ours: list[float], theirs: list[float], tolerance: float = TOLERANCE) -> bool:
    return len(ours) == len(theirs) and all(abs(a - b) <= tolerance * abs(a) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_are_those_of_a_single_process(ranks: int) -> None:
    (one,), found = trained(1), trained(ranks)
    assert close(one["losses"], found[0]["losses"]), (one["losses"], found[0]["losses"])
    assert len(set(one["losses"])) == STEPS
    assert close(one["norms"], found[0]["norms"], 1e-3), (one["norms"], found[0]["norms"])
    for told in found[1:]:
        assert told["losses"] == found[0]["losses"]
        assert told["samples"] == one["samples"]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(told["dense"], found[0]["dense"]))
    # The predictions of all ranks in training are counted together.
    assert found[0]["seen"] == found[1]["seen"]
    assert found[0]["seen"]["accuracy"] == pytest.approx(one["seen"]["accuracy"], abs=0.01)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_row_is_scored_whichever_rank_has_it(ranks: int) -> None:
    (one,), found = trained(1), trained(ranks)
    for told in found:
        assert torch.equal(told["labels"], one["labels"])
        torch.testing.assert_close(told["logits"], one["logits"], rtol=1e-3, atol=1e-4)
        assert told["metrics"] == found[0]["metrics"]
    assert found[0]["metrics"]["auc"] == pytest.approx(one["metrics"]["auc"], abs=2e-3)


def test_batches_with_fewer_samples_than_ranks() -> None:
    """Windows of some dozen anchors in batches of 3: the fourth rank never has a sample of its own."""
    (one,), found = trained(1, batch=3), trained(4, batch=3)
    assert close(one["losses"], found[0]["losses"], 1e-3)
    assert torch.equal(found[3]["labels"], one["labels"])


def test_the_longest_row_is_the_maximum_over_ranks() -> None:
    (one,), found = trained(1, scale="batch-max"), trained(2, scale="batch-max")
    assert close(one["losses"], found[0]["losses"])
    assert not close(one["losses"], trained(1)[0]["losses"])


def test_a_state_resumes_with_other_ranks_and_sharding() -> None:
    """1, 2 and 1 ranks, four steps each, against all steps in a single process."""
    (straight,) = trained(1)
    state, losses = None, []
    mixed = "item_id=row,uid=table,album_id=data-parallel"
    for done, (ranks, sharding) in enumerate(((1, ""), (2, mixed), (1, ""))):
        told = run_ranks(
            ranks, "training", config=config(sharding=sharding), steps=4, state=state, done=4 * done
        )  # fmt: skip
        losses += told[0]["losses"]
        state = told[0]["state"]
        assert all(other["state"] == {} for other in told[1:])
    assert close(straight["losses"], losses)
    assert state is not None
    ours, theirs = state["model"], straight["state"]["model"]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)
    counts = [saved["tallies"]["recent"]["counts"].sum() for saved in (state, straight["state"])]
    assert counts[0] == counts[1] == sum(straight["samples"])
