from __future__ import annotations

import timeit

import pytest

from recperf.measure import spans
from recperf.measure.spans import StepClock, listen, span


def test_parts_sum_to_the_wall_time_and_children_leave_their_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [7]
    monkeypatch.setattr(spans, "perf_counter_ns", lambda: now[0])
    clock = StepClock()
    clock.begin()
    with span("outer"):
        now[0] += 200
        with span("inner"):
            now[0] += 600
        now[0] += 50
    now[0] += 100
    assert clock.end() == (950, {"other": 100, "outer": 250, "inner": 600})


def test_nobody_listens_by_default_and_the_listener_is_put_back() -> None:
    assert spans._listener is None
    clock = StepClock()
    clock.begin()
    assert spans._listener is clock
    clock.end()
    assert spans._listener is None


def test_a_span_that_fails_still_ends() -> None:
    clock = StepClock()
    clock.begin()
    with pytest.raises(ValueError, match="x"), span("work"):
        raise ValueError("x")
    wall, parts = clock.end()
    assert sum(parts.values()) == wall


def test_off_spans_store_nothing() -> None:
    assert span("a") is span("b")
    listen(None)
    per_span = min(timeit.repeat("with span('a'): pass", globals={"span": span}, number=20_000, repeat=5)) / 20_000
    assert per_span < 5e-6
