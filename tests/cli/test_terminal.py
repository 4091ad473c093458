"""The progress of a training without a terminal: a line every 30 seconds."""

from __future__ import annotations

import re

import pytest

from recperf.cli import terminal as terminal_room
from recperf.cli.terminal import Terminal


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
    assert re.fullmatch(r"seed 42  step 4\d\d/2,000 \(20%\)  loss 0.5000  2,5\d\d samples/s  2 min 40 s left", lines[0])
    quiet = Terminal(as_json=False, quiet=True)
    quiet.trial(42, 2000, 0)
    now[0] += 1000
    quiet.step(1, 0.5, 256)
    assert capsys.readouterr().out == ""
