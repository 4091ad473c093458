"""Some minutes of chaos.py; `make chaos MINUTES=30` goes on for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("chaos.py")


@pytest.mark.long
def test_trouble_of_every_kind_ends_bit_equal_or_in_one_line() -> None:
    """The same tries in every run; a failure says how to repeat it."""
    call = [sys.executable, str(PROGRAM), "--tries", "60", "--minutes", "30", "--jobs", "2"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
