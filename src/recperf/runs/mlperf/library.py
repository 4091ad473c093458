"""The official package, imported where it is used; what it prints, logs or leaves by stays inside."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from ...errors import MachineError

BENCHMARK = "dlrmv4"
RULESET = "6.1.0"
USAGE = "training"
RUNS = 10
"""Logs of a submission."""
TARGET = 0.75
"""AUC at which the benchmark is done."""


def official(name: str) -> Any:
    """A module of mlperf-logging."""
    try:
        return importlib.import_module(f"mlperf_logging.{name}")
    except ImportError:
        raise MachineError("MLPerf logs need mlperf-logging", fix="pip install 'recperf[mlperf]'") from None


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def overheard() -> Iterator[list[logging.LogRecord]]:
    """What the checkers say through the root logger, and nothing of it on the terminal.

    They log through functions that give a root logger without handlers one of its own, so it must have one meanwhile.
    """
    root, ear = logging.getLogger(), _Heard()
    before, level = root.handlers, root.level
    root.handlers, silence = [ear], io.StringIO()
    root.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield ear.records
    finally:
        root.handlers = before
        root.setLevel(level)


def spoken(records: list[logging.LogRecord], level: int = logging.ERROR) -> list[str]:
    """What was said at a level or above, each on one line."""
    return [" ".join(record.getMessage().split()) for record in records if record.levelno >= level]
