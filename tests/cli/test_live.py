"""The progress of a training: lines without a terminal, the live view, and what is left of it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from recperf.cli import live
from recperf.cli import terminal as terminal_room
from recperf.cli.live import LOSSES, Training, duration, sparkline, view
from recperf.cli.terminal import Terminal


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which only moves when a test changes it."""
    time = [1000.0]
    monkeypatch.setattr(live, "monotonic", lambda: time[0])
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


def at_40_percent(now: list[float]) -> Training:
    training = Training("seed 42", 3130, 0)
    for step in range(0, 1260, 10):
        now[0] += 0.01
        training.samples += 2560
        training.mark(now[0], step, 1.0 - step / 2000)
    training.limit = "backward 47%, update 13%, top 8% of the time of 12 steps; verdict after training"
    return training


def test_the_view_fits_its_terminal(now: list[float]) -> None:
    training = at_40_percent(now)
    wide = [line.plain for line in view(training, 100, ascii_only=False)]
    assert wide[0].startswith("seed 42 ━")
    assert wide[0].endswith("  39%  2 s left  step 1,250/3,130")
    assert re.fullmatch(r"loss   0.3750 █+▇+▆+▅+▄+▃+▂+▁+", wide[1])
    assert wide[2] == "speed  256,000 samples/s, 1.01 ms a step"
    assert wide[4] == "score  not evaluated yet"
    for width in (100, 40, 37, 12, 1):
        for ascii_only in (False, True):
            lines = view(training, width, ascii_only=ascii_only)
            assert all(line.cell_len <= width for line in lines), width
            assert not ascii_only or all(line.plain.isascii() for line in lines)
    assert view(training, 37, ascii_only=True)[0].plain == "seed 42 ######--------  39%  2 s left"


def test_a_sparkline_of_many_losses_keeps_their_shape() -> None:
    assert sparkline([3.0, 2.0, 1.0], 10, "abc") == "cba"
    assert sparkline([float(value) for value in range(1000)], 4, "abcd") == "abcd"
    assert sparkline([1.0], 10, "abc") == "a"
    assert sparkline([], 10, "abc") == ""
    training = Training("seed 1", 10**6, 0)
    for step in range(5000):
        training.mark(float(step), step, float(step))
    assert len(training.losses) < LOSSES
    assert training.losses == sorted(training.losses)
    assert training.losses[0] < 100 < 4800 < training.losses[-1]


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 61, 3600, 7530, 90_000)] == [
        "0 s", "1 min 1 s", "1 h", "2 h 5 min", "1 d 1 h"
    ]  # fmt: skip


PROGRAM = """
import time
from recperf.cli.terminal import Terminal
terminal = Terminal(as_json=False, quiet=False)
terminal.trial(42, 10, 0)
for step in range(1, 11):
    time.sleep(0.06)
    terminal.step(step, 0.5, 256)
    if step == 7:
        terminal.notice("halfway")
terminal.close()
print("end")
"""


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_the_view_leaves_its_terminal_clean(kind: str) -> None:
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "TERM": kind,
        "COLUMNS": "60",
        "LINES": "20",
        "PYTHONIOENCODING": "ascii",
        "NO_COLOR": "1",
    }
    subprocess.run([sys.executable, "-c", PROGRAM], stdout=theirs, env=environment, check=True, timeout=60)
    os.close(theirs)
    written = os.read(ours, 1 << 16).decode()
    os.close(ours)
    lines = Screen(written).lines
    assert lines == ["note: halfway", "end"]
    assert ("100%" in written) == (kind == "xterm")
    assert written.rfind("\x1b[?25l") <= written.rfind("\x1b[?25h")
    assert written.isascii()
    assert not re.search(r"\x1b\[[\d;]*3\dm", written)


class Screen:
    """What a terminal shows of the sequences that are used here."""

    def __init__(self, written: str) -> None:
        self.rows, self.row, self.column = [""], 0, 0
        for sequence, character in re.findall(r"(\x1b\[[?\d;]*[A-Za-z])|(.)", written, re.DOTALL):
            self._control(sequence) if sequence else self._put(character)
        self.lines = [row.rstrip() for row in self.rows if row.strip()]

    def _control(self, sequence: str) -> None:
        if sequence.endswith("A"):
            self.row -= int(sequence[2:-1] or 1)
        elif sequence.endswith("K"):
            self.rows[self.row] = ""

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row += 1
            self.rows += [""] * (self.row - len(self.rows) + 1)
        else:
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1
