"""Helpers beside the tests are imported by name, here and in child processes."""

from __future__ import annotations

import sys
from pathlib import Path

# Tests are imported by path, so these folders are not on it by themselves; tests with ranks use the other one's.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
