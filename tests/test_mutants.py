"""The tool behind `make test-mutants` tells tested formulas from untested ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).with_name("mutants.py")
FORMULAS = """
LIMIT = 3

def beyond(value: int) -> bool:
    return value > LIMIT

def area(width: float, height: float) -> float:
    return width * height

def unchecked(value):
    return value + value

def unseen(value):
    return value - value
"""
TESTS = """
import pytest
from toy.room import formulas

@pytest.fixture(scope="module")
def sheet():
    return formulas.area(2, 3)

def test_first(sheet):
    formulas.unchecked(sheet)

def test_second(sheet):
    assert sheet == 6

def test_boundary():
    assert [formulas.beyond(value) for value in (2, 3, 4)] == [False, False, True]
"""
EXCUSED = """
[[excused]]
file = "src/toy/room/formulas.py"
function = "unchecked"
line = "return value + value"
change = "value + value → {}"
reason = "as an example"
"""


def test_changes_that_no_test_notices_are_listed(tmp_path: Path) -> None:
    files = {
        "src/toy/room/formulas.py": FORMULAS,
        "src/toy/room/__init__.py": "",
        "src/toy/__init__.py": "",
        "tests/room/test_formulas.py": TESTS,
        "tests/mutants_excused.toml": "".join(EXCUSED.format(change) for change in ("None", "value - value")),
        "pyproject.toml": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, TOOL, "--root", str(tmp_path), "--files", "room/formulas.py", "--count", "9"]
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 5, done.stdout + done.stderr
    progress, survivors = done.stdout.split("survivors:")
    assert set(re.findall(r"killed .*py:\d+ (\w+): .*\(.*::(\w+)\)", progress)) == {
        ("LIMIT", "test_boundary"),
        ("beyond", "test_boundary"),
        ("area", "test_second"),
    }
    assert re.findall(r"py:\d+ (\w+): .*\n.*\n +(.*)", survivors) == [
        ("unchecked", "excused: as an example"),
        ("unseen", "no test runs this line"),
    ]
    assert "3 of 5 killed (60.0%), 1 excused (20.0%)" in survivors
    assert (tmp_path / "src/toy/room/formulas.py").read_text() == FORMULAS
