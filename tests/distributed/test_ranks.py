"""dlrm-v4 on 1, 2 and 4 ranks, hstu and torch modules on 1 and 2."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from rank_jobs import events, small
from rank_pool import home, needs_torchrec, run_ranks

from recperf.data.config import MovieLensConfig
from recperf.data.streaming.config import HistoryConfig, WindowConfig
from recperf.distributed.config import DistributedConfig
from recperf.models.dlrm_v4.config import HSTUConfig
from recperf.workloads import find
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig, EvaluationConfig, EventsConfig, HistoryTrainConfig
from recperf.workloads.next_item.config import SequencesConfig
from recperf.workloads.torch_module import ItemModuleTrainConfig, ModuleTrainConfig

pytestmark = needs_torchrec
STEPS = 51
TOLERANCE = 1e-6
"""Relative, of a loss: ranks add gradients up in another order. Adam divides by the size of a gradient, so that the
rounding of tiny ones counts, the more the higher the learning rate: here 2e-7, and 7e-6 at rates of 3e-3 and 0.1."""


def config(
    *,
    sharding: str = "",
    dropout: float = 0.1,
    scale: str = "fixed",
    batch: int = 12,
    balance: bool = True,
    optimizer: Any = "rowwise-adagrad",
) -> DLRMv4WorkloadConfig:
    data = EventsConfig(
        path=events(home() / "events"),
        history=HistoryConfig(length=6, scan=20),
        windows=WindowConfig(seconds=50 * 86_400, min_history=2),
        leftover="carry",
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
    train = HistoryTrainConfig(
        batch_size=batch, device="cpu", threads=1, warmup_steps=10, learning_rate=4e-4, table_learning_rate=4e-3,
        table_optimizer=optimizer,
    )  # fmt: skip
    return DLRMv4WorkloadConfig(
        data=data,
        model=model,
        train=train,
        evaluate=EvaluationConfig(batch_size=50),
        distributed=DistributedConfig(sharding=sharding, balance=balance, overlap="on"),
    )


@functools.cache
def trained(ranks: int, **options: Any) -> list[dict[str, Any]]:
    return run_ranks(ranks, "training", config=config(**options), steps=STEPS)


def close(ours: list[float], theirs: list[float], tolerance: float = TOLERANCE) -> bool:
    return len(ours) == len(theirs) and all(abs(a - b) <= tolerance * abs(a) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_losses_are_those_of_a_single_process(ranks: int) -> None:
    (one,), results = trained(1), trained(ranks)
    assert close(one["losses"], results[0]["losses"]), (one["losses"], results[0]["losses"])
    assert len(set(one["losses"])) == STEPS
    assert close(one["norms"], results[0]["norms"], 1e-5), (one["norms"], results[0]["norms"])
    for told in results[1:]:
        assert told["losses"] == results[0]["losses"]
        assert told["samples"] == one["samples"]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(told["dense"], results[0]["dense"]))
    # The predictions of all ranks in training are counted together.
    assert results[0]["seen"] == results[1]["seen"]
    assert results[0]["seen"]["accuracy"] == pytest.approx(one["seen"]["accuracy"], abs=0.01)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_row_is_scored_whichever_rank_has_it(ranks: int) -> None:
    (one,), results = trained(1), trained(ranks)
    for told in results:
        assert torch.equal(told["labels"], one["labels"])
        torch.testing.assert_close(told["logits"], one["logits"], rtol=1e-5, atol=1e-5)
        assert told["metrics"] == results[0]["metrics"]
    assert results[0]["metrics"]["auc"] == pytest.approx(one["metrics"]["auc"], abs=2e-3)


MIXED = "item_id=row,uid=table,album_id=data-parallel"


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "mixed"), [("rowwise-adagrad", MIXED), ("adagrad", MIXED), ("rowwise-adam", "data-parallel")]
)
def test_a_state_resumes_with_other_ranks_and_sharding(optimizer: str, mixed: str) -> None:
    """1, 2 and 1 ranks, a third of the steps each, against all steps in a single process."""
    (straight,) = trained(1, optimizer=optimizer)
    state, losses, steps = None, [], STEPS // 3
    for done, (ranks, sharding) in enumerate(((1, ""), (2, mixed), (1, ""))):
        told = run_ranks(
            ranks, "training", config=config(sharding=sharding, optimizer=optimizer), steps=steps, state=state,
            done=steps * done,
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


@pytest.mark.long
@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_two_ranks_of_hstu_train_as_one_process_does(loss: str) -> None:
    """Also what is drawn: dropout, and the negatives."""
    default = find("hstu").presets["default"]()
    data = replace(default.data, users=60, groups=4, group_items=10)
    model = replace(default.model, items=40, loss=loss, negatives=16)
    config = replace(
        default, data=data, model=model, train=replace(default.train, batch_size=7, device="cpu", threads=1)
    )
    ((one,), (first, second)) = (run_ranks(ranks, "training", config=config, steps=6) for ranks in (1, 2))
    assert close(one["losses"], first["losses"], 1e-5), (one["losses"], first["losses"])
    assert first["samples"] == one["samples"]
    for ours, theirs, single in zip(first["dense"], second["dense"], one["dense"]):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, single, rtol=1e-3, atol=1e-4)
    assert torch.equal(first["ranks"], second["ranks"])
    assert (first["ranks"] == one["ranks"]).float().mean() > 0.9


def test_two_ranks_that_divide_the_catalogue_train_as_one_process_does() -> None:
    """Where each has some rows of the items. The state is that of one process, which either goes on from. Dropout makes
    gradients so small that what Adam divides them by is rounding."""
    default = find("next-item").presets["default"]()
    train = replace(default.train, batch_size=7, device="cpu", threads=1)
    data = replace(default.data, users=60, groups=4, group_items=10)
    model = replace(default.model, items=40, dropout=0.0)
    config = replace(default, data=data, model=model, train=train)
    divided = replace(config, distributed=DistributedConfig(sharding="row"))
    (one,), (first, second) = (run_ranks(ranks, "training", config=divided, steps=6) for ranks in (1, 2))
    assert one["losses"] == pytest.approx(first["losses"], rel=1e-6), (one["losses"], first["losses"])
    assert first["losses"] == second["losses"]
    assert first["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert "20 on rank 0, 21 on rank 1" in first["plan"]
    for name, tensor in one["state"]["model"].items():
        torch.testing.assert_close(first["state"]["model"][name], tensor, rtol=1e-3, atol=1e-4)
    assert torch.equal(first["ranks"], second["ranks"])
    assert (first["ranks"] == one["ranks"]).float().mean() > 0.9
    alone = run_ranks(1, "training", config=config, steps=2, state=first["state"], done=6)
    together = run_ranks(2, "training", config=divided, steps=2, state=one["state"], done=6)
    assert together[0]["losses"] == pytest.approx(alone[0]["losses"], rel=1e-4)


@pytest.mark.parametrize("kind", ["clicks", pytest.param("items", marks=pytest.mark.long)])
def test_two_ranks_train_a_torch_module_as_one_process_does(kind: str) -> None:
    train: dict[str, Any] = {"device": "cpu", "threads": 1, "epochs": 1}
    if kind == "clicks":
        rows, clicks = MovieLensConfig(source="embedded"), ModuleTrainConfig(batch_size=2048, **train)
        config = import_module("wide_and_deep").WideAndDeepConfig(data=rows, train=clicks)
    else:
        # A batch is one sequence: one of the ranks has none.
        data, items = SequencesConfig(users=10, groups=4, group_items=10), ItemModuleTrainConfig(batch_size=1, **train)
        config = import_module("gru4rec").GRU4RecConfig(data=data, train=items, dropout=0, dim=8)
    ((one,), (first, second)) = (run_ranks(ranks, "training", config=config, steps=4) for ranks in (1, 2))
    assert close(one["losses"], first["losses"], 1e-5), (one["losses"], first["losses"])
    assert first["samples"] == one["samples"]
    for ours, theirs, single in zip(first["dense"], second["dense"], one["dense"]):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, single, rtol=1e-3, atol=1e-4)
    for scores in ("logits", "ranks"):
        if first[scores] is not None:
            assert torch.equal(first[scores], second[scores])
            torch.testing.assert_close(first[scores].float(), one[scores].float(), rtol=1e-3, atol=1e-4)
