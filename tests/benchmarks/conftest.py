"""The scripts of benchmarks/, imported by name; what they record goes into a folder of the test."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    rows = importlib.import_module("_rows")
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    # Tests run in a checkout with changes too.
    monkeypatch.setattr(rows, "unclean", lambda found: "")
    return importlib.import_module
