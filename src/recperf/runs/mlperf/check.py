"""Reads logs of any program and checks them: by the official compliance checker, and by rules of the benchmark that it
does not check.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ...config import ConfigValues, flatten
from ...errors import DataError, MachineError, RecperfError
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
        raise MachineError("checking MLPerf logs needs mlperf-logging", fix="pip install 'recperf[mlperf]'") from None


USAGE = "training"

PINNED = {"model.hstu.layers": 3, "data.history.length": 4086}
"""Fields of a config that the rules of the closed division fix."""


@dataclass(frozen=True, kw_only=True)
class LogVerdict:
    """The result of the official compliance checker, and of the rules it does not check, for one log."""

    log: Path
    passed: bool
    division: str | None
    failures: dict[str, str]
    """What is wrong, in one line, by the key of the event or field."""
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Rules that could not be checked, and why."""
    ruleset: str = RULESET


def verdict(path: Path) -> LogVerdict:
    """Run the official compliance checker. In the closed division the rates that were used, layers and history length
    are checked too."""
    lines = read(path)
    passed, broken, texts = _judged(path, lines)
    division, unchecked = lines.first("submission_division"), []
    if division == "closed":
        config = _config_beside(path, lines)
        fields = pinned(config) if isinstance(config, dict) else f"{', '.join(PINNED)}: {config}"
        results = (learning_rates(lines), fields)
        own = {key: text for result in results if isinstance(result, dict) for key, text in result.items()}
        passed, broken = passed and not own, {**broken, **own}
        unchecked = [result for result in results if isinstance(result, str)]
    return LogVerdict(log=path, passed=passed, division=division, failures=broken, warnings=texts, unchecked=unchecked)


def _config_beside(log: Path, lines: Lines) -> ConfigValues | str:
    """The fields of the config that the log names and recperf wrote beside it, or why they are not known."""
    name = lines.first("config_filename")
    name = Path(name).name if isinstance(name, str) and name else "config.json"
    if not (log.parent / name).exists():
        return f"there is no {name} of recperf beside the log"
    from ..record import read_saved_config

    try:
        return flatten(read_saved_config(log.parent / name).config)
    except RecperfError as error:
        return error.what


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Nothing that the checker prints or logs through the root logger reaches the terminal.

    Its logging functions add a handler to a root logger that has none, so it gets one here meanwhile.
    """
    root = logging.getLogger()
    before, level = root.handlers, root.level
    root.handlers, silence = [logging.NullHandler()], io.StringIO()
    root.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers = before
        root.setLevel(level)


def _judged(path: Path, lines: Lines) -> tuple[bool, dict[str, str], list[str]]:
    """Whether the official checker accepts a log, what fails by the key of its event, and its warnings."""
    compliance = official("compliance_checker.mlp_compliance")
    checker, aborted = compliance.ComplianceChecker(USAGE, RULESET, False, False), None
    try:
        with silenced():
            passed, *_ = compliance.main(str(path), f"{USAGE}_{RULESET}/common.yaml", checker)
    except (Exception, SystemExit) as error:
        passed, aborted = False, error
    finally:
        # A list of the module: what an aborted check leaves there would be checked with the next log.
        compliance.enqueued_configs.clear()
    broken = {key: _line(message) for key, message in checker.overwritable.items()}
    general = [_line(text) for text in checker.not_overwritable if not text.startswith("Log lines had parsing errors")]
    general += [f"line {number} {what}" for number, what in lines.faults[:1]]
    name = lines.first("submission_benchmark")
    if aborted is not None and name != BENCHMARK:
        unknown = f"the log calls its benchmark {name!r}; ruleset {RULESET} has no rules of that name"
        broken = {**broken, "submission_benchmark": unknown}
    elif aborted is not None and not lines.faults:
        general.append(f"the checker failed: {type(aborted).__name__}: {aborted}"[:300])
    if general:
        broken["log"] = "; ".join(general)
    return bool(passed) and not lines.faults, broken, [_line(text) for text in checker.warnings.values()]


def _line(message: str) -> str:
    """A message of the official checker in one line; of a failed check the rule comes before the event."""
    rule_first = re.sub(r":\n(.*)\nfailed test: (.*)\n[\s\S]*", r" breaks the rule \2: \1", message)
    return " ".join(rule_first.split())[:300]


def pinned(config: Mapping[str, Any]) -> dict[str, str]:
    """Fields of a run's config, by their dotted names, that differ from what the rules fix."""
    return {
        name: f"is {config.get(name)!r}: it must be {value}"
        for name, value in PINNED.items()
        if config.get(name) != value
    }


def learning_rates(lines: Lines) -> dict[str, str] | str:
    """Steps whose logged rate is not that of the linear warm-up which the log declares, or why this cannot be checked.
    The official checker has rules for the declared rate and warm-up, not for the rates that were used."""
    keys = ("global_batch_size", "opt_base_learning_rate", "opt_learning_rate_warmup_steps")
    declared = [lines.first(key) for key in keys]
    if not all(type(value) in (int, float) and value > 0 for value in declared):
        # The official checker says so.
        return {}
    batch, base, warm_up = declared
    outside, stated = [], 0
    for line in lines.good:
        rate = line.metadata.get("lr")
        if line.key == "train_loss" and line.samples is not None and isinstance(rate, int | float):
            stated += 1
            # A loss is logged after its step; the first step has rate 0.
            step = line.samples / batch
            least, most = (base * min(1.0, max(0.0, one) / warm_up) for one in (step - 1, step))
            if not least * (1 - 1e-6) <= rate <= most * (1 + 1e-6):
                outside.append(f"{rate:.4g} after {line.samples:,} samples: it must be {least:.4g} to {most:.4g}")
    if not stated:
        return "learning rate: the log states no rates"
    more = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
    return {"train_loss": f"lr is {outside[0]}{more}"} if outside else {}
