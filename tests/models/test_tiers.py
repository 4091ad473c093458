"""Tables in tiers train to the same bits as tables on the device."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recperf.errors import MachineError
from recperf.models.tiers.cache import Placed, TieredRows
from recperf.models.tiers.config import TablesConfig
from recperf.models.tiers.store import HostRows
from recperf.train.checkpoint import CheckpointStore
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.dlrm_v4.config import laptop


def config_of(tables: TablesConfig) -> Any:
    config = laptop()
    data = replace(config.data, events=8000, windows=replace(config.data.windows, min_history=8))
    train = replace(config.train, batch_size=32, max_steps=60, device="cpu")
    return replace(config, data=data, train=train, tables=tables)


def trained(tables: TablesConfig, steps: int) -> tuple[list[float], Any, Any]:
    prepared = PreparedHistories(config_of(tables))
    losses = []
    with applied(prepared.settings):
        trial = prepared.trial(1)
        trial.recipe.model.train()
        batches = trial.recipe.order.batches(0)
        for step in range(steps):
            losses.append(float(take_step(trial.recipe, batches, step)[0]))
        scores = trial.predictions().logits_N
    return losses, scores, trial


@pytest.fixture(scope="module")
def on_device() -> Any:
    return trained(TablesConfig(), 24)


@pytest.mark.parametrize(("depth", "eviction"), [pytest.param(1, "recent", marks=pytest.mark.long), (4, "frequent")])
def test_losses_and_scores_are_equal_to_the_bit(on_device: Any, depth: int, eviction: Any) -> None:
    losses, scores, trial = trained(
        TablesConfig(placement="file", resident="64KiB", depth=depth, eviction=eviction), 24
    )
    assert losses == on_device[0]
    assert torch.equal(scores, on_device[1])
    tiers = trial.model.tables.tiers
    assert 0 < tiers.traffic.hits < tiers.traffic.rows
    assert tiers.traffic.written_back > 0
    folder = tiers.store.paths[0].parent
    assert folder.is_dir()
    del trial, tiers
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("placements", [("file", "device"), pytest.param(("device", "file"), marks=pytest.mark.long)])
def test_a_checkpoint_resumes_into_another_placement(
    on_device: Any, tmp_path: Path, placements: tuple[str, str]
) -> None:
    """Two saves; then a new process would load it and train on."""
    first, second = (TablesConfig(placement=name, resident="64KiB") for name in placements)  # type: ignore[arg-type]
    store = CheckpointStore(folder=tmp_path, notice=pytest.fail)
    losses: list[float] = []
    for tables, start, stop in ((first, 0, 12), (second, 12, 24)):
        prepared = PreparedHistories(config_of(tables))
        with applied(prepared.settings):
            trial = prepared.trial(1)
            if start:
                state = CheckpointStore(folder=tmp_path, notice=pytest.fail).load(into={"trial": trial.state()})
                assert state is not None
                trial.restore(state["trial"])
            trial.recipe.model.train()
            batches = trial.recipe.order.batches(0, start)
            for step in range(start, stop):
                losses.append(float(take_step(trial.recipe, batches, step)[0]))
                if step in (5, 11):
                    store.save(step, {"trial": trial.state()}, best=False)
            scores = trial.predictions().logits_N if start else None
    assert losses == on_device[0]
    assert torch.equal(scores, on_device[1])


class Failing(HostRows):
    """A store whose disk is full for a while."""

    full = False

    def write(self, rows_N: Any, values_NW: Any) -> None:
        if self.full:
            raise MachineError("the disk is full")
        super().write(rows_N, values_NW)


def small(slots: int, store: HostRows) -> TieredRows:
    tiers = TieredRows(
        {"a": store.rows}, store, dim=2, slots=slots, config=TablesConfig(), device=torch.device("cpu")
    )  # fmt: skip
    tiers.initial = lambda name, rows_U: torch.zeros(len(rows_U), 2)
    return tiers


def rows(*numbers: int) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor(numbers)}


def test_after_a_failed_write_nothing_is_read() -> None:
    store = Failing(100, 3)
    tiers = small(4, store)
    placed = tiers.place(rows(1, 2, 3), 0)
    tiers.cache_SD[placed.slots["a"]] = 7.0
    tiers.finish(placed)
    store.full = True
    with pytest.raises(MachineError, match="the disk is full"):
        tiers.place(rows(4, 5, 6), 0)
    store.full = False
    for call in (lambda: tiers.records(rows(1)), lambda: tiers.place(rows(7), 0)):
        with pytest.raises(MachineError, match="the disk is full"):
            call()


def test_a_batch_that_waits_keeps_what_it_found_in_the_cache() -> None:
    """Another owner places while it waits, and takes no slot of a batch in flight."""
    tiers = small(4, HostRows(100, 3))
    first = tiers.place(rows(0, 1), "a")
    other = tiers.place(rows(2, 3), "b")
    done: list[Placed] = []
    waiting = threading.Thread(target=lambda: done.append(tiers.place(rows(0, 5), "a")))
    waiting.start()
    time.sleep(0.05)
    assert not done
    tiers.finish(other)
    waiting.join(300)
    assert done
    assert tiers.slots.row_S[done[0].slots["a"].numpy()].tolist() == [0, 5]
    assert tiers.slots.row_S[first.slots["a"].numpy()].tolist() == [0, 1]
    with pytest.raises(MachineError, match="hold rows of other batches"):
        tiers.place(rows(10, 11, 12, 13), "c")


class FakeEvent:
    """An event that a device reaches when told."""

    def __init__(self) -> None:
        self.reached, self.waits = False, 0

    def query(self) -> bool:
        return self.reached

    def record(self) -> None: ...

    def wait(self) -> None:
        self.waits += 1


def test_events_are_forgotten_once_the_device_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row ever leaves, so that no placing waits for an event. Without a GPU only the events are those of one."""
    tiers, events = small(8, HostRows(100, 3)), []

    def place_and_finish(*numbers: int) -> None:
        placed = tiers.place(rows(*numbers), "a")
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "Event", lambda: events.append(FakeEvent()) or events[-1])
            patch.setattr(tiers, "cuda", True)
            tiers.finish(placed)

    for batch in range(50):
        place_and_finish(batch % 4, 5)
        # The device is three batches behind.
        for event in events[:-3]:
            event.reached = True
        assert len(tiers._ends) <= 4
    place_and_finish(0, 1)
    tiers.place(rows(2), "a")
    assert [tiers._ends[number] for number in sorted(tiers._ends)] == events[-4:]
    # What leaves waits for the last batch that used it, which is still known.
    monkeypatch.setattr(tiers, "cuda", True)
    tiers._wait_for_device(tiers.slots.of(np.array([1])))
    assert [event.waits for event in events[-4:]] == [0, 0, 0, 1]
    assert not tiers._ends
