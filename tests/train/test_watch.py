"""Losses are logged in groups; one that is not a number names its step. When an evaluation or a save is due."""

from __future__ import annotations

import math
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recperf.errors import GateFailed
from recperf.tasks import NEXT_ITEM
from recperf.train import watch
from recperf.train.loop import Position
from recperf.train.watch import Evaluator, LossLog, Minutes, StepTimer, Watchers, either, every, never


def test_losses_are_logged_in_groups_and_none_is_lost() -> None:
    emitted: list[dict[str, Any]] = []
    log = LossLog(emit=lambda kind, **fields: emitted.append({"kind": kind, **fields}), seed=1, group=4)
    for step in range(1, 8):
        log.after_step(Position(step=step), torch.tensor(float(step)))
    assert [event["step"] for event in emitted] == [1, 2, 3, 4]
    log.flush()
    assert [event["loss"] for event in emitted] == [1, 2, 3, 4, 5, 6, 7]


def test_times_of_steps_are_held_for_a_bounded_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LONGEST", 10)
    emitted: list[dict[str, Any]] = []
    timer = StepTimer(emit=lambda kind, **fields: emitted.append(fields), seed=1, expected=40, sync=None, alone=True)
    timer.before_epoch()
    for step in range(1, 41):
        timer.before_step()
        timer.after_step(Position(step=step), 3)
    with timer.aside("evaluation", Position(step=40)):
        pass
    assert [(one["part"], one.get("steps"), len(one.get("step_ms", []))) for one in emitted] == [
        ("warmup", 8, 0), ("steady", 10, 10), ("steady", 10, 10), ("steady", 10, 10), ("steady", 2, 2),
        ("evaluation", None, 0),
    ]  # fmt: skip
    assert sum(one.get("samples", 0) for one in emitted) == 120


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_loss_names_its_step(bad: float) -> None:
    log = LossLog(emit=lambda kind, **fields: None, seed=1)
    log.after_step(Position(step=6), torch.tensor(0.5))
    log.after_step(Position(step=7), torch.tensor(bad))
    with pytest.raises(GateFailed, match="at step 7"):
        log.flush()


def at(step: int) -> Position:
    return Position(0, step, step)


def test_either_calls_all() -> None:
    """One that measures time must be called even if another is due."""
    now = 0.0
    minutes = Minutes(1, clock=lambda: now)
    due = either(every(5), never, minutes)
    assert [due(at(step)) for step in range(1, 6)] == [False] * 4 + [True]
    now = 60.0
    assert due(at(11))
    with minutes.saving():
        now = 61.0
    assert not due(at(12))
    now = 121.0
    assert due(at(13))


def test_a_save_that_costs_much_is_done_less_often() -> None:
    now, notices = 0.0, list[str]()
    minutes = Minutes(10, clock=lambda: now, notice=notices.append)
    for _ in range(2):
        with minutes.saving():
            now += 60.0
    assert notices == ["a save takes 60.0 s: the next is due after 1200 s, so that saves take at most 5 % of the time"]
    now += 20 * 60 - 1
    assert not minutes()
    now += 1
    assert minutes()


def test_what_watches_a_training_holds_no_more_after_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an evaluation and a gradient norm now and then: what is held is bounded, but for the log on disk."""
    monkeypatch.setattr(watch, "LONGEST", 100)
    monkeypatch.setattr(watch, "EVALUATIONS", 20)
    model = SimpleNamespace(train=lambda mode=True: None)
    recipe: Any = SimpleNamespace(
        model=model, order=range(1 << 40), steps=1 << 40, patience=0, evaluate_epochs=1, events_after=lambda at: [],
        training_metrics=lambda: None, evaluation_facts=lambda at: {},
    )  # fmt: skip
    emit = lambda kind, **fields: None  # noqa: E731
    merits = iter(math.sin(number) for number in range(1 << 20))
    evaluator = Evaluator(
        recipe=recipe, score=lambda at: {NEXT_ITEM.choosing: next(merits)}, emit=emit, seed=1, task=NEXT_ITEM,
    )  # fmt: skip
    watchers = Watchers(
        recipe=recipe, losses=LossLog(emit=emit, seed=1, norm_every=50),
        timer=StepTimer(emit=emit, seed=1, expected=1 << 40, sync=None, alone=False), evaluator=evaluator,
        save=lambda at, best: None, progress=lambda at, loss, samples: None, should_stop=lambda: False,
        stopped=lambda at: RuntimeError(), evaluate_due=every(10), save_due=every(1000),
    )  # fmt: skip
    watchers.before_epoch()
    held, loss = [], torch.tensor(0.5)
    tracemalloc.start()
    for step in range(1, 6001):
        if (record := watchers.before_step(step)) is not None:
            record(loss)
        watchers.after_step(Position(0, step, step), loss.clone(), 4)
        if step % 2000 == 0:
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert abs(held[2] - held[1]) < 20_000, held
    assert len(evaluator.history) == 20
    best = max(evaluator.history, key=lambda entry: entry["metrics"][NEXT_ITEM.choosing])
    assert evaluator.chosen is best
    assert best["metrics"][NEXT_ITEM.choosing] == max(math.sin(number) for number in range(600))
    assert evaluator.history[-1]["step"] == 6000


@pytest.mark.parametrize("patience", [3, 100])
def test_no_evaluation_since_the_chosen_one_is_forgotten(patience: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVALUATIONS", 5)
    values = [0.1, 0.2, 0.15, 0.3, 0.1, 0.9, *[0.5] * 8]
    model = SimpleNamespace(train=lambda mode=True: None)
    recipe: Any = SimpleNamespace(
        model=model, patience=patience, training_metrics=lambda: None, evaluation_facts=lambda at: {}
    )
    scores = iter(values)
    evaluator = Evaluator(
        recipe=recipe, score=lambda at: {NEXT_ITEM.choosing: next(scores)}, emit=lambda kind, **fields: None, seed=1,
        task=NEXT_ITEM,
    )  # fmt: skip
    met = []
    for step in range(len(values)):
        evaluator.run(Position(step=step))
        met.append(evaluator.met)
    assert met.index(True) == 8 if patience == 3 else not any(met)
    assert evaluator.chosen["step"] == 5
    assert [entry["step"] for entry in evaluator.history][-9:] == list(range(5, 14))
