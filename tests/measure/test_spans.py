from __future__ import annotations

import pytest

from recperf.errors import ConfigError
from recperf.measure import spans
from recperf.measure.clocks import EventClock, components
from recperf.measure.cost import Cost
from recperf.measure.spans import StepClock, budget_part, declare, kind_of, phase_of, span


def test_parts_sum_to_the_wall_time_and_exclude_inner_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [7]
    monkeypatch.setattr(spans, "perf_counter_ns", lambda: now[0])
    clock = StepClock()
    clock.begin()
    with span("update"):
        now[0] += 200
        with span("dense_update"):
            now[0] += 600
        now[0] += 50
    now[0] += 100
    assert clock.end() == (950, {"other": 100, "update": 250, "dense_update": 600})


def test_events_are_in_the_stream_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that is entered while another stream is current must not be timed there: the clocks of two streams
    are not in order, and times below zero come out."""
    now = {"main": 0, "side": 0}
    current = ["main"]

    class Event:
        def __init__(self, **_: bool) -> None:
            self.time = 0

        def record(self, stream: str | None = None) -> None:
            self.time = now[stream or current[0]]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return (end.time - self.time) / 1e6

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: current[0])
    clock = EventClock()
    clock.begin()
    now["main"] += 300
    current[0] = "side"
    with span("embedding"):
        now["side"] += 100
    current[0] = "main"
    with span("exchange"):
        now["main"] += 50
    assert clock.end() == (350, {"other": 300, "embedding": 0, "exchange": 50})


def test_an_undeclared_name_is_an_error_once_something_listens() -> None:
    clock = StepClock()
    clock.begin()
    with pytest.raises(ConfigError, match="'tower' is not declared"), span("tower"):
        pass
    clock.end()
    assert budget_part("tower", default="forward") == "forward"


def test_a_workload_declares_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_declared", dict(spans._declared))
    declare("forward", "tower")
    names = ("tower", "tower_backward", "tower_exchange")
    assert [phase_of(name) for name in names] == ["forward", "backward", "communication"]
    names = ("tower", "tower_backward", "sparse_update", "hash", "recompute", "embedding_exchange")
    parts = ["tower", "backward", "update", "embedding", "recompute", "embedding_exchange"]
    assert [budget_part(name) for name in names] == parts
    assert (kind_of("sparse_update"), kind_of("tower"), kind_of("unknown")) == ("tables", "", "")
    with pytest.raises(ConfigError, match="unknown phase 'fast'"):
        declare("fast", "tower")


def test_shares_agree_with_the_medians_beside_them() -> None:
    """One step in five is disturbed: its mean would give the first part 77 % of a step that it takes half of."""
    clocked = [(10, {"embedding": 5, "backward": 5})] * 4 + [(55, {"embedding": 50, "backward": 5})]
    assert [part.share for part in components(clocked, {})] == [0.5, 0.5]


def test_no_counted_work_is_lost() -> None:
    """Work without a timed span of its own counts for the span of its phase; an undeclared name is an error."""
    clocked = [(100, {"other": 20, "embedding": 30, "backward": 50})]
    costs = {"embedding": Cost(1, 2), "embedding_backward": Cost(3, 4), "sparse_update": Cost(5, 6)}
    work = {part.name: (part.flops, part.bytes) for part in components(clocked, costs)}
    assert work == {"other": (5, 6), "embedding": (1, 2), "backward": (3, 4)}
    with pytest.raises(ConfigError, match="'tower' is not declared"):
        components(clocked, {"tower": Cost(1, 1)})
