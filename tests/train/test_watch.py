"""Logging of losses and timing of steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recperf.errors import GateFailed
from recperf.train.loop import Position
from recperf.train.timing import StepTimer, budget, performance
from recperf.train.watch import LossLog


class Emitted:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def test_losses_are_logged_in_groups_and_none_is_lost() -> None:
    emitted = Emitted()
    log = LossLog(emit=emitted, seed=1, group=4)
    for step in range(1, 8):
        log.after_step(Position(step=step), torch.tensor(float(step)))
    assert [event["step"] for event in emitted.events] == [1, 2, 3, 4]
    log.flush()
    assert [event["loss"] for event in emitted.events] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_loss_names_its_step(bad: float) -> None:
    log = LossLog(emit=Emitted(), seed=1)
    log.after_step(Position(step=6), torch.tensor(0.5))
    log.after_step(Position(step=7), torch.tensor(bad))
    with pytest.raises(GateFailed, match="at step 7"):
        log.flush()


def timed(steps: int, every: int = 2) -> StepTimer:
    timer = StepTimer(emit=Emitted(), seed=1, every=every, warmup=2)
    timer.before_epoch()
    for step in range(steps):
        timer.before_step(step)
        timer.after_step(Position(step=step + 1), 10)
    return timer


def test_warm_up_does_not_count() -> None:
    timer = timed(20)
    assert timer.steps == 20
    assert len(timer.step_ns) + len(timer.parts) == 18
    assert timer.samples == 200


def test_too_few_steps_are_not_reported() -> None:
    speed = performance([timed(3)])
    assert speed["step_ms"] is None
    assert speed["budget"] is None
    assert performance([])["samples_per_s"] is None


def test_the_budget_sums_to_one_and_shuffling_is_data() -> None:
    timer = timed(30)
    timer.parts = [(100, {"data": 10, "backward": 60, "interaction": 20, "other": 10})] * 10
    timer.setup_ns = 30 * 50
    shares = budget([timer])
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["data"] == pytest.approx(60 / 150)
    assert shares["interaction"] == pytest.approx(20 / 150)
    assert shares["other"] == pytest.approx(10 / 150)
    assert "top" not in shares
