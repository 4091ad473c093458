"""Losses are logged in groups; one that is not a number names its step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recperf.errors import GateFailed
from recperf.train.loop import Position
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
