"""Small steps run as CUDA graphs by default: they train as without one, and the run's settings say what was chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from recperf.data.config import MovieLensConfig
from recperf.data.streaming.config import HistoryConfig, WindowConfig
from recperf.execution.measuring import measure_window
from recperf.tasks import of
from recperf.train.device import applied
from recperf.train.graph import GraphStep
from recperf.train.loop import take_step
from recperf.workloads.dlrm import config as dlrm
from recperf.workloads.dlrm.build import PreparedDLRM
from recperf.workloads.dlrm_v4 import config as dlrm_v4
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.micro_dlrm.build import PreparedClicks
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig
from recperf.workloads.next_item import hstu
from recperf.workloads.next_item.build import PreparedSequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def clicks(graph: Any = "auto") -> PreparedClicks:
    config = MicroDLRMConfig(data=MovieLensConfig(source="embedded"))
    return PreparedClicks(replace(config, train=replace(config.train, device="cuda", batch_size=900, graph=graph)))


def histories(graph: Any = "auto", **train: Any) -> PreparedHistories:
    config = dlrm_v4.laptop()
    windows = WindowConfig(seconds=100 * 86_400, min_history=3, shuffle=1.0)
    data = replace(config.data, events=3_000, history=HistoryConfig(length=12, scan=40), windows=windows)
    options = replace(config.train, device="cuda", batch_size=48, warmup_steps=2, graph=graph, **train)
    return PreparedHistories(replace(config, data=data, model=replace(config.model, row_scale=0.02), train=options))


def sequences(graph: Any = "auto", **model: Any) -> PreparedSequences:
    config = hstu.default()
    config = replace(
        config,
        data=replace(config.data, users=790, validation_users=0),
        model=replace(config.model, **{"dropout": 0.0, **model}),
        train=replace(config.train, device="cuda", graph=graph),
    )
    return PreparedSequences(hstu.resolve(config))


WORKLOADS: dict[str, Callable[..., Any]] = {
    "micro-dlrm": clicks,
    "dlrm-v4": histories,
    "hstu": sequences,
    "next-item": partial(sequences, encoder="transformer"),
}


def trained(
    prepared: Any, trial: Any, steps: int, *, start: int = 0, norms: list[torch.Tensor] | None = None
) -> list[float]:
    """The losses of some steps; the gradient norm of every second one is added to `norms`."""
    with applied(prepared.settings):
        batches = trial.recipe.order.batches(0, start)
        records = [norms.append if norms is not None and step % 2 == 0 else None for step in range(steps)]
        losses = [take_step(trial.recipe, batches, start + step, record)[0] for step, record in enumerate(records)]
        return torch.stack(losses).tolist()


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_default_is_a_graph_that_trains_as_without_one(name: str) -> None:
    """First steps, a restored state, and the end of the epoch, where the last batch is smaller."""
    graph, eager = WORKLOADS[name](), WORKLOADS[name]("off")
    assert eager.settings.reasons["graph"] == "off: requested"
    one, other = graph.trial(3), eager.trial(3)
    assert other.recipe.whole_step is None
    last = len(other.recipe.order) - 3
    norms: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    expected = trained(eager, other, 8, norms=norms[0]) + trained(eager, other, 3, start=last, norms=norms[0])
    actual = trained(graph, one, 8, norms=norms[1])
    resumed = graph.trial(3)
    resumed.restore(one.state())
    actual += trained(graph, resumed, 3, start=last, norms=norms[1])
    assert actual == pytest.approx(expected, rel=1e-3)
    assert torch.stack(norms[1]).tolist() == pytest.approx(torch.stack(norms[0]).tolist(), rel=2e-2)
    for trial in (one, resumed):
        assert isinstance(trial.recipe.whole_step, GraphStep)
        assert not trial.recipe.whole_step.failed, graph.settings.reasons["graph"]
    assert graph.settings.reasons["graph"].startswith("on: ")
    state = resumed.model.state_dict()
    for key, value in other.model.state_dict().items():
        assert float((state[key] - value).norm()) <= 1e-2 * float(value.norm()) + 1e-6, key
    with applied(graph.settings):
        scored = [one.metrics(one.predictions()) for one in (resumed, other)]
        name = of(scored[0]).leading
        assert scored[0][name] == pytest.approx(scored[1][name], abs=5e-3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_failed_capture_states_why_and_trains_without_a_graph(name: str) -> None:
    prepared = WORKLOADS[name]()
    one, other = prepared.trial(3), prepared.trial(3)
    expected = trained(prepared, one, 6)
    draw = other.recipe.whole_step.feed.draw

    def waits() -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        draw()

    other.recipe.whole_step.feed.draw = waits
    assert trained(prepared, other, 6) == pytest.approx(expected, rel=1e-3)
    assert other.recipe.whole_step.failed
    assert prepared.settings.reasons["graph"].startswith("off: the step could not be captured: ")


def test_drawn_negatives_of_sequences_are_those_of_steps_without_a_graph() -> None:
    """The warm-up before a capture draws too, and must leave the generator as it was."""
    losses = []
    for graph in ("on", "off"):
        prepared = sequences(graph, loss="sampled", negatives=64)
        trial = prepared.trial(3)
        torch.manual_seed(5)
        losses.append(trained(prepared, trial, 20))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_graph_drops_other_numbers_in_every_step_and_the_same_after_a_resume() -> None:
    prepared = sequences("on", dropout=0.3)
    one, resumed = prepared.trial(3), prepared.trial(3)
    torch.manual_seed(5)
    trained(prepared, one, 3)
    generator = torch.cuda.get_rng_state()
    resumed.restore(one.state())
    expected = trained(prepared, one, 4, start=3)
    torch.cuda.set_rng_state(generator)
    assert trained(prepared, resumed, 4, start=3) == pytest.approx(expected, rel=1e-5)
    with applied(prepared.settings):
        batches = [next(one.recipe.order.batches(0, 7)) for _ in range(2)]
        drops = [float(one.recipe.whole_step(iter([batch]), 0.0)[0]) for batch in batches]
    assert drops[0] != pytest.approx(drops[1], rel=1e-5)


def test_padded_steps_are_measured() -> None:
    prepared = sequences("on", dropout=0.3)
    trial = prepared.trial(3)
    trained(prepared, trial, 3)
    with applied(prepared.settings):
        profile = measure_window(prepared, trial, None, steps=20).profile
    assert not any("could not be observed" in note for note in profile.notes), profile.notes
    assert {"attention", "loss", "update"} <= {component.name for component in profile.components}


def test_capturing_a_graph_copies_no_state_of_tables() -> None:
    """Element-wise Adagrad: as large as the tables, which may fill nearly half of the memory."""
    config = dlrm.intended()
    options = replace(config.train, device="cuda", batch_size=64, optimizer="adagrad")
    prepared = PreparedDLRM(replace(config, train=options, fast=replace(config.fast, graph="on")))
    trial = prepared.trial(3)
    state = trial.optimizer.sparse.state
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trained(prepared, trial, 2)
    assert torch.cuda.max_memory_allocated() - before < state.nbytes
    assert float(state.sum()) > 0
