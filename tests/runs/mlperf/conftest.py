"""Tests of MLPerf logs need the official package, whose checkers are the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """The module that writes example logs."""
    pytest.importorskip("mlperf_logging", reason="mlperf-logging is not installed: pip install 'recperf[mlperf]'")
    import example_logs

    return example_logs


@pytest.fixture
def write(made: ModuleType, tmp_path: Path) -> Callable[..., Path]:
    """A whole log at the real sizes; `last` is the block that reaches the target."""

    def write(name: str = "mlperf.log", **options: object) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        log: Path = made.write(path, **options)
        return log

    return write
