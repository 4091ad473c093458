"""Tests of MLPerf logs need the official package, whose checkers are the oracle."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """The maker of logs beside this file."""
    pytest.importorskip("mlperf_logging", reason="mlperf-logging is not installed: pip install 'recperf[mlperf]'")
    spec = importlib.util.spec_from_file_location("made", Path(__file__).with_name("made.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("made", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write(made: ModuleType, tmp_path: Path) -> Callable[..., Path]:
    """A whole log at the real sizes; `last` is the block that reaches the target."""

    def write(name: str = "mlperf.log", **options: object) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        log: Path = made.write(path, **options)
        return log

    return write
