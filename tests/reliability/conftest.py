"""Helpers beside the tests are imported by name, here and in child processes."""

from __future__ import annotations

import sys
from pathlib import Path

# Tests are imported by path, so these folders are not on it by themselves.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("reliability", "distributed", "train")]
