"""Reads the MLLOG lines of a log that any program wrote, and imports the official package where it is used."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ...errors import DataError, MachineError
from ...files import open_regular, reading
from ...jsonfile import Meta, Problem, Struct, decode, fit

BENCHMARK = "dlrmv4"
RULESET = "6.1.0"
USAGE = "training"
RUNS = 10
"""Logs that a submission needs."""
TOKEN = b":::MLLOG "
LOG_NAME = "mlperf.log"


class _Event(Struct):
    key: str
    value: Any
    time_ms: Annotated[float, Meta(ge=-(1 << 60), le=1 << 60)]
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Line:
    key: str
    value: Any
    time_ms: int
    metadata: dict[str, Any]
    end: int
    """Bytes of the log up to the end of this line."""

    @property
    def samples(self) -> int | None:
        count = self.metadata.get("samples_count")
        return int(count) if isinstance(count, (int, float)) and not isinstance(count, bool) else None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A line that is not an MLLOG event."""

    number: int
    """Line number, from 1."""
    what: str


@dataclass(frozen=True, kw_only=True)
class Lines:
    good: list[Line]
    faults: list[Fault]

    def first(self, key: str) -> Any:
        """The value of the first line with that key; None if there is none."""
        return next((line.value for line in self.good if line.key == key), None)


def scan(content: bytes, *, mixed: bool = False) -> Lines:
    """Every line of a log. In a `mixed` log, lines without the MLLOG token are other output and are skipped."""
    good: list[Line] = []
    faults: list[Fault] = []
    end = 0
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        end += len(raw)
        start = raw.rfind(TOKEN)
        if start < 0 or (start > 0 and not mixed):
            if not mixed:
                faults.append(Fault(number=number, what="has no :::MLLOG token"))
            continue
        line = _parse(raw[start + len(TOKEN) :], end)
        if isinstance(line, Line):
            good.append(line)
        else:
            faults.append(Fault(number=number, what=line))
    return Lines(good=good, faults=faults)


def _parse(text: bytes, end: int) -> Line | str:
    try:
        value = decode(text)
    except ValueError:
        return "is not JSON after its token"
    event = fit(value, _Event)
    if isinstance(event, Problem):
        return f"is not an event: {event}"
    return Line(key=event.key, value=event.value, time_ms=int(event.time_ms), metadata=event.metadata, end=end)


def read(path: Path) -> Lines:
    """The lines of a log, which may be mixed with other output and end in half a line; it must have an MLLOG line."""
    with reading(path):
        lines = scan(path.read_bytes(), mixed=True)
    if not lines.good:
        raise DataError("this is not an MLPerf log: it has no :::MLLOG line", where={"file": path})
    return lines


def logs_in(paths: list[Path]) -> list[Path]:
    """The logs that files and folders name: the log of a run, or every log and result file of a folder.

    A log that the user names may be a link or a pipe; the log of a run may not.
    """
    logs: list[Path] = []
    for path in paths:
        if not path.is_dir():
            logs.append(path)
            continue
        own = path / LOG_NAME
        if os.path.lexists(own):
            with reading(own):
                os.close(open_regular(own))
            logs.append(own)
            continue
        inside = sorted({*path.glob("result_*.txt"), *path.glob("*.log")})
        if not inside:
            raise DataError(
                f"no MLPerf log in this folder: it has neither {LOG_NAME} nor result_*.txt",
                where={"folder": path},
                fix="recperf run dlrm-v4 --mlperf writes one",
            )
        logs += inside
    return logs


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
