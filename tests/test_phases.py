"""The time of a command, divided among its phases."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from recperf import phases
from recperf.phases import Phases, phase, spent, working
from recperf.runs.derive import waited_of
from recperf.runs.report.formats import waited
from recperf.runs.result import Waited


def test_the_phases_add_up_to_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(phases, "monotonic", lambda: clock[0])
    with Phases(began=99.0).current() as measured:
        clock[0] += 2
        with phase("training"):
            clock[0] += 4
            with phase("baselines"):
                clock[0] += 8
                assert (spent("training"), spent("baselines")) == (4.0, 8.0)
            clock[0] += 16
        with phase("training"):
            clock[0] += 32
        clock[0] += 64
        measured.mark()
    assert measured.seconds == {"other": 1.0 + 2 + 64, "training": 4.0 + 16 + 32, "baselines": 8.0}
    assert spent("training") == 0.0, "outside of a command"


def test_only_work_that_takes_long_is_shown_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "AGAIN_S", 0.01)
    # Longer than a busy machine stops this thread between two lines.
    monkeypatch.setattr(phases, "PATIENCE_S", 1.0)
    shown: list[tuple[str, float]] = []
    seen = threading.Event()

    def show(text: str, seconds: float) -> None:
        shown.append((text, seconds))
        if text == "long":
            seen.set()

    with Phases(show).current(), phase("measuring", "short"):
        working("long")
        assert seen.wait(300)
    assert {text for text, _ in shown} == {"long", ""}
    assert shown[0][1] >= 1.0
    assert shown[-1] == ("", 0.0)
    assert threading.active_count() == len([one for one in threading.enumerate() if one.name != "recperf progress"])


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((2.1, 51.2, 0.3, 17.9, 9.9), "81 s: 2 training, 51 baselines, 18 measuring, 10 other"),
        ((1.4, 1.4, 1.4, 1.4, 4.5), "10 s: 2 training, 1 baselines, 1 scoring, 1 measuring, 5 other"),
        ((0.25, 0.26, 0.0, 0.0, 0.5), "1.0 s: 0.2 training, 0.3 baselines, 0.5 other"),
        ((119.4, 0, 0, 0, 0.5), "120 s: 119 training, 1 other"),
        ((150.0, 60.0, 0, 0, 6.0), "3.6 min: 2.5 training, 1.0 baselines, 0.1 other"),
        ((72_000.0, 0, 0, 0, 3600.0), "21 h: 20 training, 1 other"),
    ],
)
def test_rounded_parts_add_up_to_the_rounded_whole(parts: tuple[float, ...], text: str) -> None:
    said = waited(Waited(sum(parts), *parts))
    assert said == text
    whole, _, listed = said.partition(": ")
    assert sum(float(part.split()[0]) for part in listed.split(", ")) == pytest.approx(float(whole.split()[0]))


def test_a_phase_without_a_field_is_other_time() -> None:
    stated: Any = waited_of({"training": 1.0, "other": 2.0, "new": 4.0})
    assert (stated.seconds, stated.training_s, stated.other_s, stated.baselines_s) == (7.0, 1.0, 6.0, 0.0)
    assert waited_of({}) is None
