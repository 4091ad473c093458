"""Learning-rate schedules."""

from __future__ import annotations

import pytest

from recperf.train.config import DLRMTrainConfig
from recperf.train.optim import make_schedule, one_cycle, warmup_decay


class PublicPolicy:
    """The public DLRM's schedule with its state: it counts from 1 and holds the last rate."""

    def __init__(self, base: float, warmup: int, decay_start: int, decay_steps: int) -> None:
        self.base, self.warmup, self.decay_start, self.decay_steps = base, warmup, decay_start, decay_steps
        self.count, self.last = 0, base

    def next(self) -> float:
        self.count += 1
        if self.count < self.warmup:
            return self.base * (1.0 - (self.warmup - self.count) / self.warmup)
        if self.decay_start <= self.count < self.decay_start + self.decay_steps:
            gone = self.count - self.decay_start
            self.last = max(1e-7, self.base * ((self.decay_steps - gone) / self.decay_steps) ** 2)
            return self.last
        return self.last if self.decay_steps and self.count >= self.decay_start else self.base


@pytest.mark.parametrize(
    ("warmup", "decay_start", "decay_steps"),
    [(0, 0, 0), (5, 0, 0), (0, 3, 7), (8, 12, 20)],
)
def test_warm_up_and_decay_equal_the_public_ones(warmup: int, decay_start: int, decay_steps: int) -> None:
    peak = 0.1
    theirs = PublicPolicy(peak, warmup, decay_start, decay_steps)
    for step in range(60):
        ours = warmup_decay(step, peak=peak, warmup=warmup, decay_start=decay_start, decay_steps=decay_steps)
        assert ours == pytest.approx(theirs.next(), rel=1e-12)


def test_the_decay_stops_at_its_floor_and_never_raises_a_small_rate() -> None:
    assert warmup_decay(99, peak=1e-4, warmup=0, decay_start=1, decay_steps=100) == 1e-7
    assert warmup_decay(5000, peak=1e-4, warmup=0, decay_start=1, decay_steps=100) == 1e-7
    assert warmup_decay(99, peak=1e-9, warmup=0, decay_start=1, decay_steps=100) == 1e-9


def test_a_config_names_its_schedule() -> None:
    assert [make_schedule(DLRMTrainConfig(learning_rate=0.5), 10)(step) for step in (0, 9)] == [0.5, 0.5]
    cycle = make_schedule(DLRMTrainConfig(learning_rate=0.5, schedule="one-cycle"), 10)
    assert cycle(3) == one_cycle(3, 10, peak=0.5, rise=0.3)
    rising = make_schedule(
        DLRMTrainConfig(learning_rate=0.5, schedule="warmup-decay", warmup_steps=5, decay_start=8, decay_steps=4), 10
    )
    assert [rising(step) for step in (0, 4, 6, 9)] == [0.1, 0.5, 0.5, 0.125]
