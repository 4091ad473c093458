"""The peers in the benchmarks of dlrm do the arithmetic they stand for, and the scripts report what they found.

Shapes: V ids, B bags or samples, R table rows, D width.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from golden_numbers import REPOSITORY

from recperf.models.config import DLRMConfig
from recperf.ops.bag import reference
from recperf.workloads.dlrm.config import DLRMWorkloadConfig, experiment


def small() -> DLRMWorkloadConfig:
    """The experiment's batches and tables with MLPs of next to no work."""
    config = experiment()
    model = replace(config.model, dim=4, bottom=(512, 4), top=(8, 1))
    return replace(config, model=model, train=replace(config.train, device="cpu", threads=1))


def test_the_peer_is_the_public_model(script: Callable[[str], ModuleType]) -> None:
    case = "dlrm_dot_itself"
    shape = json.loads((REPOSITORY / "dlrm" / f"{case}.json").read_text())
    arrays = {name: torch.from_numpy(value) for name, value in np.load(REPOSITORY / "dlrm" / f"{case}.npz").items()}
    tables = range(len(shape["rows"]))
    config = DLRMConfig(
        features=tuple(f"feature_{i}" for i in tables),
        rows=tuple(shape["rows"]),
        dim=shape["m_spa"],
        bottom=tuple(shape["bot"]),
        top=tuple(shape["top"][1:]),
        interaction="dot",
        diagonal=shape["itself"],
    )
    model = script("dlrm_peer").PublicDLRM(config, np.random.RandomState(0))
    model.load_state_dict({n.removeprefix("param/"): v for n, v in arrays.items() if n.startswith("param/")})
    probability_B1 = model(
        arrays["in/dense"],
        torch.stack([arrays[f"in/sparse_offset/{i}"] for i in tables]),
        [arrays[f"in/sparse_index/{i}"] for i in tables],
    )
    close(probability_B1, arrays["out/prob"])
    torch.nn.BCELoss()(probability_B1, arrays["in/label"]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.is_sparse == name.startswith("emb_l")
        close(parameter.grad.to_dense(), arrays[f"grad/{name}"])


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-5 * float(theirs.abs().max()))


def test_the_peer_takes_a_step_of_sgd(script: Callable[[str], ModuleType]) -> None:
    config = small()
    loop = script("dlrm_peer").PublicLoop(config, "cpu")
    before = {name: value.detach().clone() for name, value in loop.model.named_parameters()}
    loss, seconds = loop.step()
    assert 0 < loss < 1
    assert seconds > 0
    for name, value in loop.model.named_parameters():
        gradient = value.grad.to_dense()
        assert gradient.abs().max() > 0
        torch.testing.assert_close(value, before[name] - config.train.learning_rate * gradient)


def test_steps_are_recorded_for_both_sides(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = script("dlrm_step")
    monkeypatch.setitem(step.PRESETS, "experiment", small)
    options = ["--device", "cpu", "--steps", "1", "--rounds", "2"]
    monkeypatch.setitem(step.GOAL_RATIO, "experiment", 0.0)
    assert step.main([*options, "--no-record"]) == 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(step.GOAL_RATIO, "experiment", 1e9)
    assert step.main(options) == 5
    rows = [json.loads(line) for line in (tmp_path / "dlrm_step.jsonl").read_text().splitlines()]
    recorded = {(row["variant"], row["metric"]): row for row in rows}
    ours, peer = "recperf, experiment", "public imitation, experiment"
    assert recorded[ours, "throughput"]["conditions"]["settings"]["threads"].startswith("1")
    whole, printed = recorded[peer, "throughput"]["conditions"]["ms_a_step"], recorded[peer, "as it prints"]["p50"]
    assert whole > 2 * printed, "making the batch is most of the small peer's step, and the peer does not print it"
    assert (
        recorded["recperf / public, experiment", "ratio"]["p50"]
        > recorded["recperf / public, experiment", "ratio, printed"]["p50"]
    )


@pytest.mark.parametrize("adagrad", [True, False])
def test_torchs_sparse_path_updates_as_the_reference_does(script: Callable[[str], ModuleType], adagrad: bool) -> None:
    fused, draw = script("fused_bag"), torch.Generator().manual_seed(3)
    table_RD, ids_V = torch.randn(7, 5, generator=draw), torch.randint(0, 7, (11,), generator=draw)
    offsets_B1 = torch.tensor([0, 4, 4, 9, 11])
    gradient_BD = torch.randn(4, 5, generator=draw)
    expected_RD, state_R = table_RD.clone(), torch.ones(7)
    reference.update(
        expected_RD, state_R if adagrad else None, reference.Grouped(ids_V, offsets_B1, 7), gradient_BD,
        rule="rowwise-adagrad" if adagrad else "sgd", rate=fused.RATE, eps=fused.EPS, decay=0.0, scale=1.0,
    )  # fmt: skip
    case = fused.Case(table_RD, torch.ones(7), ids_V, offsets_B1, gradient_BD, int(ids_V.unique().numel()))
    way = fused.TorchUpdate(case, adagrad=adagrad).way()
    way.before()
    way.work()
    torch.testing.assert_close(table_RD, expected_RD)
    torch.testing.assert_close(case.state_R, state_R)


@pytest.mark.parametrize("tables", [1, 3])
def test_fbgemms_tables_update_as_the_reference_does(script: Callable[[str], ModuleType], tables: int) -> None:
    fused, draw = script("fused_bag"), torch.Generator().manual_seed(3)
    if problem := fused.fbgemm_problem():
        pytest.skip(f"FBGEMM cannot be loaded here: {problem}")
    case = fused.make_case(torch.randn(tables * 7, 4, generator=draw), 2, draw, ids=tables * 10, tables=tables)
    expected_RD, state_R = case.table_RD.clone(), torch.zeros(tables * 7)
    peer = fused.fbgemm_of(case)
    pooled_BD = reference.bag_sum(expected_RD, case.ids_V, case.offsets_B1, case.starts_F)
    torch.testing.assert_close(peer.by_bag(peer.forward_only()), pooled_BD)
    grouped = reference.Grouped(case.ids_V, case.offsets_B1, tables * 7, case.starts_F)
    reference.update(
        expected_RD, state_R, grouped, case.gradient_BD,
        rule="rowwise-adagrad", rate=fused.RATE, eps=fused.EPS, decay=0.0, scale=1.0,
    )  # fmt: skip
    peer.forward()
    peer.backward()
    torch.testing.assert_close(peer.table_RD(), expected_RD)
