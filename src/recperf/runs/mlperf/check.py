"""Checks logs of any program: the official checkers (compliance of each log, convergence of a set), and rules of the
benchmark that these do not check."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...config import ConfigValues, flatten
from ...errors import DataError, RecperfError
from ...folders import temporary_folder
from ..record import read_saved_config
from .lines import BENCHMARK, RULESET, RUNS, USAGE, Lines, captured_log, messages, official, read
from .rules import PINNED, Failure, failures, learning_rates, pinned


@dataclass(frozen=True, kw_only=True)
class LogVerdict:
    """The result of the official compliance checker, and of the rules it does not check, for one log."""

    log: Path
    passed: bool
    division: str | None
    failures: list[Failure]
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Rules that could not be checked, and why."""
    ruleset: str = RULESET


def verdict(path: Path) -> LogVerdict:
    """Run the official compliance checker. In the closed division the benchmark's learning rates, layers and history
    length are checked too."""
    lines = read(path)
    return _with_own_rules(_judged(path, lines), lines)


def _with_own_rules(verdict: LogVerdict, lines: Lines) -> LogVerdict:
    if verdict.division != "closed":
        return verdict
    config = _config_beside(verdict.log, lines)
    fields = pinned(config) if isinstance(config, dict) else f"{', '.join(PINNED)}: {config}"
    results = (learning_rates(lines), fields)
    broken = [failure for result in results if isinstance(result, list) for failure in result]
    return replace(
        verdict,
        passed=verdict.passed and not broken,
        failures=[*verdict.failures, *broken],
        unchecked=[result for result in results if isinstance(result, str)],
    )


def _config_beside(log: Path, lines: Lines) -> ConfigValues | str:
    """The fields of the config that the log names and recperf wrote beside it, or why they are not known."""
    name = lines.first("config_filename")
    name = Path(name).name if isinstance(name, str) and name else "config.json"
    if not (log.parent / name).exists():
        return f"there is no {name} of recperf beside the log"
    try:
        return flatten(read_saved_config(log.parent / name).config)
    except RecperfError as error:
        return error.what


def _recorder(compliance: Any) -> Any:
    """The official checker, changed to keep all messages: it keeps one per key, so a second fault hides the first."""

    class Recorder(compliance.ComplianceChecker):  # type: ignore[misc]
        received: list[tuple[str | None, str]]

        def put_message(self, msg: str, key: str | None = None) -> None:
            self.received.append((key, msg))
            super().put_message(msg, key)

        def overwrite_messages(self, keys: dict[str, object]) -> None:
            self.received = [(key, message) for key, message in self.received if key not in keys]
            super().overwrite_messages(keys)

    checker = Recorder(USAGE, RULESET, False, False)
    checker.received = []
    return checker


def _judged(path: Path, lines: Lines) -> LogVerdict:
    compliance = official("compliance_checker.mlp_compliance")
    checker, aborted = _recorder(compliance), None
    try:
        with captured_log():
            passed, *_ = compliance.main(str(path), f"{USAGE}_{RULESET}/common.yaml", checker)
    except (Exception, SystemExit) as error:
        passed, aborted = False, error
    finally:
        # A list of the module: what an aborted check leaves there would be checked with the next log.
        compliance.enqueued_configs.clear()
    broken = failures([entry for entry in checker.received if not entry[1].startswith("Log lines had parsing errors")])
    if lines.faults:
        fault = lines.faults[0]
        broken.append(Failure(rule="log: lines", text=f"line {fault.number} {fault.what}"))
        passed = False
    name = lines.first("submission_benchmark")
    if aborted is not None and name != BENCHMARK:
        broken = [failure for failure in broken if not failure.rule.startswith("submission_benchmark")]
        broken.insert(0, Failure(rule="submission_benchmark: known", text=_unknown(name)))
    elif aborted is not None and not lines.faults:
        broken.append(
            Failure(rule="checker: done", text=f"the checker failed: {type(aborted).__name__}: {aborted}"[:300])
        )
    return LogVerdict(
        log=path,
        passed=bool(passed),
        division=lines.first("submission_division"),
        failures=broken,
        warnings=[" ".join(text.split()) for text in checker.warnings.values()],
    )


def _unknown(name: object) -> str:
    return f"the log calls its benchmark {name!r}; ruleset {RULESET} has no rules of that name"


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """The result of the official RCP checker for a set of logs: did they need as many samples as the reference?"""

    ran: bool
    passed: bool | None
    text: str
    """The checker's message, or why it did not run."""
    logs: int
    batch_size: int | None = None
    mean_samples: float | None = None
    """Samples to the target, without the fastest and the slowest log."""
    reference_mean: float | None = None
    least_mean: float | None = None
    """Below this mean the set converges faster than chance allows."""
    normalisation: float | None = None
    """Factor on the score if the set is faster than the reference but allowed."""
    ruleset: str = RULESET


def convergence(paths: list[Path]) -> Convergence:
    """Run the official RCP checker on a set of logs of one submission."""
    rcp = official("rcp_checker.rcp_checker")
    logs = [read(path) for path in paths]
    why = _no_set(logs)
    if why is not None:
        return Convergence(ran=False, passed=None, text=why, logs=len(logs))
    with temporary_folder() as folder:
        for index, path in enumerate(paths):
            shutil.copyfile(path, folder / f"result_{index}.txt")
        try:
            with captured_log() as records:
                passed, text, normalisation = rcp.check_directory(
                    str(folder), USAGE, RULESET, False, False, rcp_pass="pruned_rcps"
                )
        except (Exception, SystemExit) as error:
            raise DataError(
                f"the RCP checker failed: {type(error).__name__}: {error}"[:300],
                where={"logs": ", ".join(path.name for path in paths)},
                fix="recperf mlperf check LOG, one by one",
            ) from None
    return _figures(records, logs, bool(passed), str(text), float(normalisation))


def _no_set(logs: list[Lines]) -> str | None:
    """Why these logs cannot be judged as a set."""
    if len(logs) < 3:
        return (
            f"convergence leaves out the fastest and the slowest log, so it needs at least 3 ({RUNS} for a submission)"
        )
    for key in ("submission_benchmark", "submission_division", "global_batch_size"):
        values = sorted({repr(log.first(key)) for log in logs})
        if len(values) > 1:
            return f"the logs differ in {key}: {', '.join(values)}"
    if logs[0].first("submission_benchmark") != BENCHMARK:
        return _unknown(logs[0].first("submission_benchmark"))
    if logs[0].first("submission_division") != "closed":
        return "only the closed division is compared with the convergence of the reference"
    if type(logs[0].first("global_batch_size")) is not int:
        return "the logs name no global_batch_size"
    faulty = sum(1 for log in logs if log.faults)
    return f"{faulty} of the logs have lines that cannot be read" if faulty else None


def _figures(
    records: list[logging.LogRecord], logs: list[Lines], passed: bool, text: str, normalisation: float
) -> Convergence:
    """The checker reports its numbers only through its log."""
    record: dict[str, Any] = {}
    mean = None
    for entry in records:
        if entry.msg.startswith(" RCP Record") and isinstance(entry.args, dict):
            record = dict(entry.args)
        if entry.msg.startswith(" Submission mean epochs: ") and isinstance(entry.args, tuple):
            mean = float(entry.args[0])  # type: ignore[arg-type]
    least = float(record["RCP Mean"] / record["Max Speedup"]) if record else None
    plain = ""
    if mean is not None and least is not None:
        plain = "enough samples to the target" if passed else "fewer samples to the target than the reference allows"
    return Convergence(
        ran=True,
        passed=passed,
        text="; ".join(filter(None, [plain, text.strip(), *messages(records, logging.WARNING)])),
        logs=len(logs),
        batch_size=logs[0].first("global_batch_size"),
        mean_samples=mean,
        reference_mean=float(record["RCP Mean"]) if record else None,
        least_mean=least,
        normalisation=normalisation if passed else None,
    )
