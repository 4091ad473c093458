"""Neighbours that child processes import too are found by name."""

from __future__ import annotations

import sys
from pathlib import Path

# Tests are imported by path, so this folder is not on it by itself.
sys.path.insert(0, str(Path(__file__).parent))
