"""When an evaluation or a save is due."""

from __future__ import annotations

import pytest

from recperf.train.loop import Position
from recperf.train.stream import Evaluations
from recperf.train.watch import Minutes, either, every, never


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


@pytest.mark.parametrize(
    "due",
    [
        Evaluations(batches=20, steps=6),
        Evaluations(batches=20, steps=6, first_step=7),
        Evaluations(batches=20, steps=6, first_step=12),
        Evaluations(batches=20, seams=(3, 9, 20)),
        Evaluations(batches=20, seams=(3, 9, 20), first_step=4),
        Evaluations(batches=20, seams=(3, 9), first_step=24),
        Evaluations(batches=20),
    ],
)
def test_next_is_the_next_position_that_is_due(due: Evaluations) -> None:
    for epoch in (0, 1):
        places = [Position(epoch, batch, 20 * epoch + batch) for batch in range(20)]
        for place in places:
            later = [other for other in places if other.batch > place.batch and due(other)]
            assert due.next(place) == (later[0] if later else None)
