"""The fast path on a GPU: every switch against the plain path, graphs by bits, the public DLRM's numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import dlrm_paths as paths
import pytest
import torch
from golden_cases import cases

from recperf.data.random_bags import RandomBags
from recperf.data.rows.imports import import_clicks
from recperf.data.rows.options import ClickOptions
from recperf.models.mlp import FastArithmetic
from recperf.ops.table_rules import RULES
from recperf.train.config import PLAIN, FastConfig
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.dlrm.build import DLRMTrial, PreparedDLRM
from recperf.workloads.dlrm.config import DLRMDataConfig, DLRMModelConfig, DLRMTrainConfig, DLRMWorkloadConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

STEPS = 10
FAST = FastConfig(precision="float32")
"""All that is fused, in a graph, without a change of precision."""
OPTIMIZERS = [*RULES]


def made(
    fast: FastConfig, *, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **train: Any
) -> DLRMWorkloadConfig:
    """A small dlrm. The rate has few bits, so that it is the same number in float32 and in Python; the large eps keeps
    Adagrad's first steps from dividing rounding errors by themselves."""
    rate = 0.5 if train.get("optimizer", "sgd") == "sgd" else 2.0**-6
    fields = {"batch_size": 256, "learning_rate": rate, "eps": 1e-2} | train
    return DLRMWorkloadConfig(
        data=DLRMDataConfig(**({"ids_per_bag": 6, "batches": 2 * STEPS, "held_out_batches": 2} | (data or {}))),
        model=DLRMModelConfig(
            **({"rows": (50, 3, 1000), "dim": 16, "bottom": (13, 32, 16), "top": (64, 32, 1)} | (model or {}))
        ),
        train=DLRMTrainConfig(epochs=1, device="cuda", checkpoint_epochs=False, **fields),
        fast=fast,
    )


@dataclass(frozen=True)
class Outcome:
    prepared: PreparedDLRM
    trial: DLRMTrial
    losses: list[float]
    state: dict[str, torch.Tensor]


def run(config: DLRMWorkloadConfig, *, steps: int = STEPS, batches: Iterator[Any] | None = None) -> Outcome:
    prepared = PreparedDLRM(config)
    with applied(prepared.settings):
        trial = prepared.trial(1)
        given = trial.recipe.order.batches(0) if batches is None else batches
        losses = [float(take_step(trial.recipe, given, step)[0]) for step in range(steps)]
        torch.cuda.synchronize()
    return Outcome(prepared, trial, losses, copy.deepcopy(trial.model.state_dict()))


@cache
def plain(optimizer: str) -> Outcome:
    return run(made(PLAIN, optimizer=optimizer))


def same_bits(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.state.keys() == other.state.keys()
    for name, value in one.state.items():
        assert torch.equal(value, other.state[name]), name


def close(one: Outcome, other: Outcome, *, loss: float = 1e-4, weights: float = 1e-4) -> None:
    assert one.losses == pytest.approx(other.losses, rel=loss)
    assert one.state.keys() == other.state.keys()
    for name, value in one.state.items():
        torch.testing.assert_close(value, other.state[name], rtol=weights, atol=weights, msg=lambda m, n=name: n + m)


def near(one: Outcome, other: Outcome, *, loss: float, weights: float) -> None:
    """Each tensor as a whole, not number by number. A bias that sums cancelling gradients to nearly nothing, the last
    layer's single number above all, is held against a typical size instead of its own."""
    assert one.losses == pytest.approx(other.losses, rel=loss)
    for name, value in one.state.items():
        expected = other.state[name].float()
        size = float(expected.norm()) + 0.03 * expected.numel() ** 0.5
        assert float((value.float() - expected).norm()) <= weights * size, name


def is_on(name: str, outcome: Outcome) -> bool:
    """Whether the trial is really made that way, not only said to be."""
    trial: Any = outcome.trial
    return bool(
        {
            "input": lambda: isinstance(trial.recipe.order, RandomBags) and trial.recipe.order.device == "cuda",
            "graph": lambda: trial.recipe.whole_step is not None,
            "embedding": lambda: trial.model.embeddings.bag.__name__.endswith(".triton"),
            "interaction": lambda: trial.model.interaction.body.__name__.endswith(".triton"),
            "mlp": lambda: isinstance(trial.model.arithmetic, FastArithmetic),
            "optimizer": lambda: not trial.optimizer.dense.plain,
        }[name]()
    )


WITH_STREAMS = replace(paths.COPIES, streams=True)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("bodies", [paths.PLAIN, paths.SPARSE, paths.TRITON, paths.COPIES, WITH_STREAMS], ids=str)
@pytest.mark.parametrize("path", cases("dlrm"))
def test_every_implementation_gives_the_public_numbers(path: Path, bodies: paths.Bodies, graph: bool) -> None:
    if bodies.bag != "triton" and graph:
        pytest.skip("these lookups read sizes on the host")
    case = paths.load(path, "cuda")
    model = paths.build(case, bodies, "cuda")
    loss = (paths.step_as_graph if graph else paths.step)(model, case.batch)
    paths.agree(model, loss, case)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_switches_together_give_the_plain_paths_numbers(optimizer: str) -> None:
    outcome = run(made(FAST, optimizer=optimizer))
    close(outcome, plain(optimizer))
    assert all(is_on(field, outcome) for field in ("graph", "embedding", "interaction", "mlp", "optimizer"))
    with applied(outcome.prepared.settings):
        scores = [one.trial.metrics(one.trial.predictions()) for one in (outcome, plain(optimizer))]
    assert scores[0] == pytest.approx(scores[1], abs=5e-3)


SHAPES: dict[str, dict[str, Any]] = {
    "diagonal": {"model": {"diagonal": True}},
    "concat": {"model": {"interaction": "concat"}},
    "dcn": {"model": {"interaction": "dcn", "cross_layers": 2, "cross_rank": 8}},
    "one id a bag": {"data": {"ids_per_bag": 1}},
    "distinct ids": {"data": {"distinct": True}},
    "26 tables": {"model": {"rows": tuple(range(2, 28))}},
    "odd widths": {"model": {"dim": 7, "bottom": (5, 9, 7), "top": (11, 1)}, "batch_size": 37},
    "odd dcn": {"model": {"dim": 7, "bottom": (5, 9, 7), "interaction": "dcn", "cross_layers": 2, "cross_rank": 8}},
    "weighted": {"loss": "wbce", "loss_weights": (0.5, 2.0)},
    "warm-up": {"schedule": "warmup-decay", "warmup_steps": 4, "decay_start": 5, "decay_steps": 5},
}


@pytest.mark.parametrize(("precision", "loss", "weights"), [("float32", 1e-4, 1e-4), ("bfloat16", 1e-2, 0.1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes_give_the_plain_paths_numbers(shape: str, precision: Any, loss: float, weights: float) -> None:
    # Drawn on the device by both: what a power law draws may differ by an id between devices.
    expected = run(made(replace(PLAIN, input="device"), **SHAPES[shape]))
    alike = close if precision == "float32" else near
    alike(run(made(replace(FAST, precision=precision), **SHAPES[shape])), expected, loss=loss, weights=weights)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_graph_takes_the_same_steps(optimizer: str, precision: Any) -> None:
    """By bits, but for Adam: in a graph its bias corrections are computed on the GPU, in float32."""
    fast = FastConfig(precision=precision)
    graph, eager = (run(made(replace(fast, graph=on), optimizer=optimizer)) for on in ("on", "off"))
    assert is_on("graph", graph)
    assert not is_on("graph", eager)
    if RULES[optimizer].counts:
        close(graph, eager, weights=1e-5)
    else:
        same_bits(graph, eager)


@pytest.mark.parametrize(
    ("source", "precision"), [("device", "float32"), ("pinned", "float32"), ("device", "bfloat16")]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_graph_run_goes_on_to_the_same_bits(optimizer: str, source: Any, precision: Any) -> None:
    """In bfloat16 a step draws the batch of the next: the restored run begins with one of its own."""
    config = made(FastConfig(input=source, precision=precision), optimizer=optimizer)
    whole, half = run(config), run(config, steps=STEPS // 2)
    state = copy.deepcopy(half.trial.state())
    prepared = PreparedDLRM(config)
    with applied(prepared.settings):
        trial = prepared.trial(1)
        trial.restore(state)
        batches = trial.recipe.order.batches(0, STEPS // 2)
        losses = [float(take_step(trial.recipe, batches, step)[0]) for step in range(STEPS // 2, STEPS)]
    same_bits(Outcome(prepared, trial, half.losses + losses, trial.model.state_dict()), whole)


def test_a_log_whose_last_batch_is_short_trains_to_its_end(tmp_path: Path) -> None:
    """600 rows in batches of 256: the last has 88, and a graph's shapes are those of 256."""
    lines = (f"{row % 7},{row % 11},{row % 2}" for row in range(700))
    (tmp_path / "log.csv").write_text("\n".join(["shop,city,clicked", *lines]) + "\n")
    import_clicks(ClickOptions(clicks=tmp_path / "log.csv", categorical="shop,city", hash=30), tmp_path / "clicks")
    data = {"source": "clicks", "path": tmp_path / "clicks", "holdout": 1 / 7, "ids_per_bag": 1}
    model = {"features": ("shop", "city"), "rows": (30, 30), "bottom": (1, 32, 16)}
    outcome = []
    for fast in (FAST, replace(PLAIN, embedding="fused")):
        config = made(fast, data=data, model=model)
        outcome.append(run(config, steps=len(PreparedDLRM(config).order(1))))
    assert len(outcome[0].losses) in (2, 3)
    assert outcome[0].losses == pytest.approx(outcome[1].losses[: len(outcome[0].losses)], rel=1e-4)
    if len(outcome[0].losses) == len(outcome[1].losses):
        close(*outcome)
