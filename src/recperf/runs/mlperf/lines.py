"""MLLOG lines read back, from any program's log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DataError

TOKEN = b":::MLLOG "
LOG_NAME = "mlperf.log"
_KINDS: dict[str, type | tuple[type, ...]] = {"key": str, "time_ms": (int, float), "metadata": dict}


@dataclass(frozen=True, kw_only=True)
class Line:
    key: str
    value: Any
    time_ms: int
    metadata: dict[str, Any]
    end: int
    """Bytes of the log up to and with this line."""

    @property
    def samples(self) -> int | None:
        count = self.metadata.get("samples_count")
        return int(count) if isinstance(count, (int, float)) and not isinstance(count, bool) else None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A line that is no MLLOG line."""

    number: int
    """Of the line, from 1."""
    what: str


@dataclass(frozen=True, kw_only=True)
class Lines:
    good: list[Line]
    faults: list[Fault]

    def first(self, key: str) -> Any:
        """The value of the first line with that key; none where there is none."""
        return next((line.value for line in self.good if line.key == key), None)


def scan(content: bytes, *, others: bool = False) -> Lines:
    """Every line of a log. With `others`, lines without the mark are another program's output and passed over."""
    good: list[Line] = []
    faults: list[Fault] = []
    end = 0
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        end += len(raw)
        start = raw.rfind(TOKEN)
        if start < 0 or (start > 0 and not others):
            if not others:
                faults.append(Fault(number=number, what="has no :::MLLOG mark"))
            continue
        found = _parsed(raw[start + len(TOKEN) :], end)
        if isinstance(found, Line):
            good.append(found)
        else:
            faults.append(Fault(number=number, what=found))
    return Lines(good=good, faults=faults)


def _parsed(text: bytes, end: int) -> Line | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "is not JSON after its mark"
    if not isinstance(value, dict) or "value" not in value:
        return "is no event: it needs key, value, time_ms and metadata"
    for name, kind in _KINDS.items():
        if not isinstance(value.get(name), kind) or isinstance(value[name], bool) or value[name] != value[name]:
            return f"is no event: its {name} is {_short(value.get(name))}"
    if abs(value["time_ms"]) > 1 << 60:
        return "is no event: its time_ms is no time"
    return Line(
        key=value["key"],
        value=value["value"],
        time_ms=int(value["time_ms"]),
        metadata=value["metadata"],
        end=end,
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def read(path: Path) -> Lines:
    """A log of this or another program, a torn end and lines between others' output included; a file without a single
    MLLOG line is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where={"file": path}) from None
    found = scan(content, others=True)
    if not found.good:
        raise DataError("this is no MLPerf log: it has no :::MLLOG line", where={"file": path})
    return found


def logs_in(paths: list[Path]) -> list[Path]:
    """The logs that files and folders name: a run's own, or every log and result file of a folder."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        own = path / LOG_NAME
        inside = [own] if own.exists() else sorted({*path.glob("result_*.txt"), *path.glob("*.log")})
        if not inside:
            raise DataError(
                f"no MLPerf log in this folder: it has neither {LOG_NAME} nor result_*.txt",
                where={"folder": path},
                fix="recperf run dlrm-v4 --mlperf writes one",
            )
        found += inside
    return found
