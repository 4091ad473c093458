"""Steps as CUDA graphs, as far as no GPU is needed: what they read and what a failed capture leaves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recperf.data.config import MovieLensConfig, RandomBagsConfig
from recperf.data.random_bags import RandomBags
from recperf.data.streaming.config import HistoryConfig, WindowConfig
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.mlp import FastArithmetic
from recperf.models.streams import SideStreams
from recperf.models.tables import SparseTables
from recperf.ops.mlp import reference as relu
from recperf.train.feeds import CopiedFeed
from recperf.train.graph import GraphStep, tensors_in
from recperf.train.loop import Recipe, take_step
from recperf.train.optim import SparseRows, SplitOptimizer, make_dense
from recperf.workloads.dlrm_v4 import config as dlrm_v4
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.micro_dlrm.build import PreparedClicks
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig

CPU = torch.device("cpu")


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that executes at once, and on which every capture fails after the step was recorded."""

    class Stream:
        def __init__(self, *, priority: int = 0) -> None: ...

        def wait_stream(self, other: Any) -> None: ...

    @contextmanager
    def capture(graph: Any, **_: Any) -> Any:
        # A capture launches nothing: a step that it sees must leave no trace.
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    for name, fake in {
        "Stream": Stream, "current_stream": Stream, "stream": lambda _: nullcontext(), "synchronize": lambda: None,
        "set_stream": lambda _: None, "CUDAGraph": object, "graph": capture,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)


class Recorded(GraphStep):
    """Records instead of capturing: the step inside a capture does nothing on a device."""

    recording = False

    def _record(self, clock: Any, *, norm: bool) -> Any:
        self.recording = True
        try:
            return super()._record(clock, norm=norm)
        finally:
            self.recording = False

    def _step(self, *, norm: bool = False) -> None:
        if not self.recording:
            super()._step(norm=norm)


def trained(recipe: Recipe, steps: int, *, start: int = 0) -> list[float]:
    batches = recipe.order.batches(0, start)
    return [float(take_step(recipe, batches, step)[0]) for step in range(start, start + steps)]


def clicks(graph: bool) -> Any:
    config = MicroDLRMConfig(data=MovieLensConfig(source="embedded"))
    prepared = PreparedClicks(replace(config, train=replace(config.train, device="cpu", batch_size=900)))
    prepared.graph = graph
    return prepared


@pytest.mark.usefixtures("all_ratings")
def test_a_step_that_cannot_be_captured_is_taken_without_a_graph(
    no_capture: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up leaves no trace, samples are gathered as before, a short batch comes last. Only the learning rate is
    rounded to float32, which later steps amplify; one step too many would change the first losses by 1e-4 and more."""
    monkeypatch.setattr("recperf.workloads.micro_dlrm.build.GraphStep", Recorded)
    plain, graph = clicks(False).trial(3), clicks(True)
    trial = graph.trial(3)
    early, steps = 25, len(plain.recipe.order)
    assert trained(trial.recipe, early) == pytest.approx(trained(plain.recipe, early), rel=1e-6)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(trial.model.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)
    later = trained(plain.recipe, steps - early, start=early)
    assert trained(trial.recipe, steps - early, start=early) == pytest.approx(later, rel=2e-5)
    assert graph.settings.reasons["graph"] == (
        "off: the step could not be captured: operation not permitted when stream is capturing"
    )


class LaunchOrder(TorchDispatchMode):
    """Streams that execute at once, and every read of a tensor whose last write its stream does not wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        order = self

        class Stream:
            def __init__(self, priority: int = 0) -> None:
                self.before: set[int] = set()

            def wait_stream(self, other: Stream) -> None:
                self.before |= other.before

        @contextmanager
        def current(stream: Stream) -> Iterator[None]:
            outer, order.stream = order.stream, stream
            yield
            order.stream = outer

        self.stream, self.number, self.early, self.alive = Stream(), 0, [], []
        self.writes: dict[int, int] = {}
        for name, fake in {"Stream": Stream, "current_stream": lambda: self.stream, "stream": current}.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.number += 1
        read = {address(one) for one in tensors_in([*args, *(kwargs or {}).values()])}
        self.early += [str(func) for one in read if self.writes.get(one, 0) not in {0} | self.stream.before]
        changed = [value for value, of in zip(args, func._schema.arguments) if of.alias_info and of.alias_info.is_write]
        made = [one for one in tensors_in([result]) if address(one) not in read]
        self.writes |= dict.fromkeys([address(one) for one in (*tensors_in(changed), *made)], self.number)
        self.stream.before.add(self.number)
        self.alive.append(result)  # No two tensors shall have one address.
        return result


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_no_side_stream_reads_what_it_does_not_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batches, a shorter one, a step whose ids are sorted late, and two backward passes before an update."""
    config = DLRMConfig(features=("a", "b"), rows=(30, 200), dim=4, bottom=(6, 8, 4), top=(8, 1))
    bags = RandomBags(
        keys=config.features, rows=config.rows, dense=6, batch_size=8, seed=1, device="cpu", config=RandomBagsConfig()
    )
    whole, short = bags.batch(0, 0), replace(bags, batch_size=5).batch(0, 0)
    order = LaunchOrder(monkeypatch)
    streams = SideStreams(enabled=True)
    tables = SparseTables(config.features, config.rows, config.dim, bag="reference")
    tables.streams = streams
    model = DLRM(config, embeddings=tables, arithmetic=FastArithmetic(relu=relu, streams=streams))
    dense = make_dense("sgd", [(model.dense_parameters(), 0.0)], plain=True)
    optimizer = SplitOptimizer(dense, SparseRows(tables, "rowwise-adagrad"), table_ratio=2.0, streams=streams)
    feed = CopiedFeed(copy.deepcopy(whole), pinned=False)
    step = GraphStep(model, optimizer, feed, device=CPU, reasons={}, requested_by=None, streams=streams)
    with order:
        for batch in (whole, short, whole):
            step.eager(iter([batch]), 0.1)
        model.eval()
        for batches in ([whole], [whole, short]):
            for batch in batches:
                model.loss(batch).backward()
            optimizer.step(0.1)
    assert order.early == []


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operator makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {address(one) for one in tensors_in([*args, *(kwargs or {}).values()])}
        made = [one.numel() for one in tensors_in([result]) if address(one) not in known]
        self.numbers = max([self.numbers, *made])
        return result


@pytest.mark.parametrize("rule", ["adagrad", "rowwise-adagrad", "adam"])
def test_a_warm_up_leaves_the_state_of_tables_and_copies_only_that_of_rows_in_use(rule: Any, no_capture: None) -> None:
    rows = (3_000, 2_000)
    config = DLRMConfig(features=("a", "b"), rows=rows, dim=4, bottom=(6, 8, 4), top=(8, 1))
    bags = RandomBags(
        keys=config.features, rows=rows, dense=6, batch_size=8, seed=1, device="cpu", config=RandomBagsConfig()
    )
    tables = SparseTables(config.features, rows, config.dim, bag="reference")
    model = DLRM(config, embeddings=tables)
    sparse = SparseRows(tables, rule)
    optimizer = SplitOptimizer(make_dense("adamw", [(model.dense_parameters(), 0.0)]), sparse)
    feed = CopiedFeed(bags.batch(0, 0), pinned=False)
    step = GraphStep(model, optimizer, feed, device=CPU, reasons={}, requested_by=None)
    step.eager(iter([bags.batch(0, 0)]), 0.1)
    before = copy.deepcopy((optimizer.state_dict(), tables.table_RD))
    with Largest() as largest:
        step._warm_up(norm=False)
    assert all(map(torch.equal, tensors_in((optimizer.state_dict(), tables.table_RD)), tensors_in(before)))
    assert largest.numbers < sum(rows)
    step.eager(iter([bags.batch(0, 1)]), 0.1)
    assert not torch.equal(optimizer.state_dict()["rows"], before[0]["rows"]), "steps count again afterwards"


def histories(graph: bool) -> PreparedHistories:
    config = dlrm_v4.laptop()
    windows = WindowConfig(seconds=100 * 86_400, min_history=3, shuffle=1.0)
    data = replace(config.data, events=3_000, history=HistoryConfig(length=12, scan=40), windows=windows)
    model = replace(config.model, row_scale=0.02)
    train = replace(config.train, device="cpu", batch_size=48, warmup_steps=2)
    prepared = PreparedHistories(replace(config, data=data, model=model, train=train))
    assert prepared.settings.reasons["graph"] == "off: no GPU"
    prepared.graph = graph
    return prepared


@pytest.mark.long
def test_padded_histories_train_as_plain_ones(no_capture: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one shape, the last one shorter; a checkpoint of one continues the other."""
    monkeypatch.setattr("recperf.workloads.dlrm_v4.build.GraphStep", Recorded)
    plain, padded = histories(False).trial(3), histories(True).trial(3)
    last = len(plain.recipe.order) - 2
    losses = trained(plain.recipe, 4) + trained(plain.recipe, 2, start=last)
    resumed = histories(True).trial(3)
    actual = trained(padded.recipe, 4)
    resumed.restore(padded.state())
    assert actual + trained(resumed.recipe, 2, start=last) == pytest.approx(losses, rel=1e-5)
    state = resumed.model.state_dict()
    for name, value in plain.model.state_dict().items():
        assert float((state[name] - value).norm()) <= 1e-4 * float(value.norm()), name
    assert resumed.stepped.seen() == pytest.approx(plain.stepped.seen(), rel=1e-4)
    batch = next(padded.recipe.order.batches(0))
    assert torch.equal(padded.rows_of(batch), plain.rows_of(next(plain.recipe.order.batches(0))))
