"""Reads the MLLOG lines of a log that any program wrote, and imports the official package where it is used."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ...errors import DataError, MachineError
from ...files import open_regular, reading
from ...jsonfile import Meta, Struct, decode, fit

BENCHMARK = "dlrmv4"
RULESET = "6.1.0"
TOKEN = b":::MLLOG "
LOG_NAME = "mlperf.log"


class Line(Struct):
    key: str
    value: Any
    time_ms: Annotated[float, Meta(ge=-(1 << 60), le=1 << 60)]
    metadata: dict[str, Any]
    end: int = 0
    """Bytes of the log up to the end of this line."""

    @property
    def samples(self) -> int | None:
        count = self.metadata.get("samples_count")
        return int(count) if isinstance(count, (int, float)) and not isinstance(count, bool) else None


class Lines(NamedTuple):
    good: list[Line]
    faults: list[tuple[int, str]]
    """Lines that are no MLLOG event: their number, from 1, and what is wrong."""

    def first(self, key: str) -> Any:
        """The value of the first line with that key; None if there is none."""
        return next((line.value for line in self.good if line.key == key), None)


def scan(content: bytes, *, mixed: bool = False) -> Lines:
    """Every line of a log. In a `mixed` log, lines without the MLLOG token are other output and are skipped."""
    lines, end = Lines([], []), 0
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        end += len(raw)
        start = raw.rfind(TOKEN)
        if start < 0 or (start > 0 and not mixed):
            if not mixed:
                lines.faults.append((number, "has no :::MLLOG token"))
            continue
        try:
            line = fit(decode(raw[start + len(TOKEN) :]), Line)
        except ValueError:
            lines.faults.append((number, "is not JSON after its token"))
            continue
        if isinstance(line, Line):
            line.end = end
            lines.good.append(line)
        else:
            lines.faults.append((number, f"is not an event: {line}"))
    return lines


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
                fix="recperf run dlrm-v4 --mlperf.log writes one",
            )
        logs += inside
    return logs


def official(name: str) -> Any:
    """A module of mlperf-logging."""
    try:
        return importlib.import_module(f"mlperf_logging.{name}")
    except ImportError:
        raise MachineError("MLPerf logs need mlperf-logging", fix="pip install 'recperf[mlperf]'") from None
