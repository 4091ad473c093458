"""The official package, imported where it is used, with its printing and logging captured."""

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
"""Logs that a submission needs."""


def official(name: str) -> Any:
    """A module of mlperf-logging."""
    try:
        return importlib.import_module(f"mlperf_logging.{name}")
    except ImportError:
        raise MachineError("MLPerf logs need mlperf-logging", fix="pip install 'recperf[mlperf]'") from None


class _Capture(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def captured_log() -> Iterator[list[logging.LogRecord]]:
    """What the checkers log through the root logger; nothing of it reaches the terminal.

    Their logging functions add a handler to a root logger that has none, so it gets one here meanwhile.
    """
    root, capture = logging.getLogger(), _Capture()
    before, level = root.handlers, root.level
    root.handlers, silence = [capture], io.StringIO()
    root.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield capture.records
    finally:
        root.handlers = before
        root.setLevel(level)


def messages(records: list[logging.LogRecord], level: int = logging.ERROR) -> list[str]:
    """The messages of a level or above, each on one line."""
    return [" ".join(record.getMessage().split()) for record in records if record.levelno >= level]
