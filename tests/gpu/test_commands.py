"""What judges commands on a GPU machine can fail: tried with programs that end badly, on any machine."""

from __future__ import annotations

from pathlib import Path

import gpu_commands as commands
import pytest


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("print('fine')", ""),
        ("import os; os.abort()", "exit -6, expected [0]"),
        ("import sys; sys.exit(5)", "exit 5, expected [0]"),
        ("import sys; sys.stderr.write('double free or corruption (!prev)')", "stderr: 'double free'"),
        ("import atexit; atexit.register(lambda: 1 / 0)", "stderr: 'Exception ignored'"),
    ],
)
def test_an_end_is_judged_by_exit_code_and_stderr(program: str, problem: str, tmp_path: Path) -> None:
    lane = commands.Lane("runs", "one", [commands.Command(["-c", program], python=True)] * 2)
    rows = commands.run(lane, tmp_path / "ceilings")
    assert rows[0].problem.splitlines()[:1] == ([problem] if problem else [])
    # After a failure nothing else of the lane is tried.
    assert len(rows) == (1 if problem else 2)


def test_a_command_is_stopped_as_soon_as_its_file_exists(tmp_path: Path) -> None:
    program = "import pathlib, time; pathlib.Path('made').touch(); time.sleep(60)"
    lane = commands.Lane("commands", "one", [commands.Command(["-c", program], {-15}, stop_when="made", python=True)])
    (row,) = commands.run(lane, tmp_path / "ceilings")
    assert (row.code, row.problem) == (-15, "")
    assert row.seconds < 30
