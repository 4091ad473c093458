"""Which config a command line means: a workload and preset, a saved config, or a run to go on with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import from_json
from ..errors import ConfigError, DataError, UsageError, closest
from ..execution.workload import Workload
from ..runs.record import read_config
from ..workloads import find, names

DEFAULT = "micro-dlrm"
FLAGS = ("json", "quiet", "dry-run", "peaks", "report", "quick", "try-fixes", "trace", "stalls", "mlperf")
SHORT = {"--mlperf": "--mlperf.log", "--no-mlperf": "--mlperf.no-log"}
"""Switches with a shorter name than their field's."""
SWITCHES = {"-h", "--help", *(f"--{no}{name}" for name in FLAGS for no in ("", "no-")), *SHORT.values()}
CHOOSERS = ("--preset", "--config", "--resume")


@dataclass(frozen=True)
class Choice:
    workload: Workload
    config: Any
    resume: Path | None
    rest: list[str]
    """The words that are left: overrides and options."""
    preset: str | None = None
    """The one named, or the workload's first; none for a saved config."""


def choose(words: list[str], *, default: str = DEFAULT) -> Choice:
    """Take the workload and the choosers out of the command line and read what they name."""
    found = _choose([SHORT.get(word, word) for word in words], default)
    if set(SHORT) & set(words) and not hasattr(found.config, "mlperf"):
        raise UsageError(
            f"workload {found.workload.name!r} has no MLPerf log to write", fix="recperf run dlrm-v4 --mlperf"
        )
    return found


def _choose(words: list[str], default: str) -> Choice:
    name, chosen, rest = _take(words)
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other")
    saved = chosen.get("--config") or chosen.get("--resume")
    if saved is None:
        workload = find(name or default)
        preset = chosen.get("--preset") or next(iter(workload.presets))
        return Choice(workload, _preset(workload, preset), None, rest, preset)
    path = Path(saved)
    if "--resume" in chosen and not path.is_dir():
        raise DataError("no run there", where={"folder": path}, fix="recperf run --resume runs/<name of the run>")
    saved_name, values = read_config(path)
    workload = find(saved_name)
    if name and name != saved_name:
        raise UsageError(f"the config is of workload {saved_name!r}, not {name!r}", where={"file": path})
    try:
        config: Any = from_json(workload.config, values)
    except ConfigError as error:
        raise ConfigError(error.what, where={**error.where, "file": path}, fix=error.fix) from None
    return Choice(workload, config, path if "--resume" in chosen else None, rest)


def _preset(workload: Workload, name: str) -> Any:
    if name not in workload.presets:
        guess = closest(name, workload.presets)
        raise UsageError(
            f"workload {workload.name!r} has no preset {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
            where={"known": ", ".join(workload.presets)},
        )
    return workload.presets[name]()


def _take(words: list[str]) -> tuple[str | None, dict[str, str], list[str]]:
    name: str | None = None
    chosen: dict[str, str] = {}
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if flag in CHOOSERS:
            if not equals:
                if not waiting:
                    raise UsageError(f"{flag} needs a value", fix="recperf run --help")
                value = waiting.pop(0)
            chosen[flag] = value
        elif word in names() and name is None and not _is_value(rest):
            name = word
        elif not rest and not chosen and name is None and not word.startswith("-"):
            find(word)
        else:
            rest.append(word)
    return name, chosen, rest


def _is_value(before: list[str]) -> bool:
    """Whether the next word belongs to the flag in front of it."""
    return bool(before) and before[-1].startswith("-") and "=" not in before[-1] and before[-1] not in SWITCHES
