"""recperf peaks as a user types it, and progress without a terminal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from recperf import terminal as terminal_room
from recperf.cli import peaks as cli
from recperf.measure import peaks
from recperf.measure.peaks import sampling
from recperf.terminal import Terminal


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.0)
    monkeypatch.setattr(sampling, "QUICK", sampling.TINY)
    monkeypatch.setattr(sampling, "FULL", replace(sampling.TINY, knee_points=2))


def test_the_ceilings_are_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.command([]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "product of float32",
        "read + write",
        "random rows",
        "2048 B",
        "time of a lookup by table size",
        "#",
    ):
        assert expected in printed
    stored = peaks.load()
    assert stored is not None
    assert stored.quick is False
    assert f"written to {peaks.path_of(stored.machine)}" in printed
    assert "in place of" not in printed


def test_a_disturbed_measurement_is_shown_but_not_stored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.command(["--quiet"])
    first = peaks.load()
    assert cli.command(["--quick"]) == 0
    assert "beside 0% other work are better than quick ones" in capsys.readouterr().out
    monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.4)
    assert cli.command([]) == 0
    assert "are better than full ones beside 40% other work" in capsys.readouterr().out
    assert peaks.load() == first


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which only moves when a test changes it."""
    time = [1000.0]
    monkeypatch.setattr(terminal_room, "monotonic", lambda: time[0])
    return time


def test_without_a_terminal_there_is_a_line_every_30_seconds(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal(as_json=False, quiet=False)
    terminal.trial(42, 2000, 100)
    for step in range(101, 1001):
        now[0] += 0.1
        terminal.step(step, 0.5, 256)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(
        r"seed 42  step 4\d\d/2,000 \(20%\)  loss 0.5000  2,5\d\d samples/s  2\.[67]\d min left", lines[0]
    )
    quiet = Terminal(as_json=False, quiet=True)
    quiet.trial(42, 2000, 0)
    now[0] += 1000
    quiet.step(1, 0.5, 256)
    assert capsys.readouterr().out == ""
