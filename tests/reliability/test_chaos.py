"""A minute of chaos.py; `make chaos MINUTES=30` goes on for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("chaos.py")
READY = ["damage: checkpoint", "damage: data", "damage: compiled code", "damage: trace", "damage: import"]


def test_a_minute_of_chaos() -> None:
    only = [word for kind in READY for word in ("--only", kind)]
    call = [sys.executable, str(PROGRAM), "--tries", "20", "--minutes", "10", "--jobs", "2", *only]
    done = subprocess.run(call, capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
