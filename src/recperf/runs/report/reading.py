"""A finished run as its folder holds it; every file is validated before anything is drawn from it."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import jsonfile
from ...config import ConfigValues
from ...errors import DataError
from ...files import open_regular, reading
from ...measure.peaks import SCHEMA as PEAKS_SCHEMA
from ...measure.peaks import require_own
from ...measure.peaks.records import Peaks
from ...measure.profile_records import PAIR_SCHEMA, Component, Pair, Profile
from ...measure.profile_records import SCHEMA as PROFILE_SCHEMA
from ...measure.trace.file import looks_like_trace
from ..record import PROFILE_MARK, read_config
from ..result import SCHEMA, Result
from ..schemas import BadEvent, Machine, Scores, Step, parse_events, read_file


@dataclass(frozen=True)
class Events:
    """What the training logged: pairs of step and loss, and of step and gradient norm, by seed, and the evaluations in
    their order."""

    losses: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    norms: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    metrics: list[Scores] = field(default_factory=list)

    def take(self, lines: Iterable[bytes]) -> None:
        """Add what lines of the log say."""
        for event in parse_events(lines):
            if isinstance(event, Step) and event.loss is not None:
                self.losses.setdefault(event.seed, []).append((event.step, event.loss))
                if event.gradient_norm is not None:
                    self.norms.setdefault(event.seed, []).append((event.step, event.gradient_norm))
            elif isinstance(event, Scores) and event.kind == "metric":
                self.metrics.append(event)

    def history(self, name: str) -> dict[int, list[tuple[int, float]]]:
        """The evaluations of a metric by seed, as pairs of step and value."""
        history: dict[int, list[tuple[int, float]]] = {}
        for event in self.metrics:
            value = event.metrics.get(name)
            if isinstance(value, (int, float)) and math.isfinite(value):
                history.setdefault(event.seed, []).append((event.step, float(value)))
        return history


@dataclass(frozen=True)
class Reading:
    """One finished run; what was not measured is None."""

    folder: Path
    workload: str
    config: ConfigValues
    machine: dict[str, Any]
    result: Result
    events: Events = field(default_factory=Events)
    peaks: Peaks | None = None
    profile: Profile | None = None
    pair: Pair | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def short_name(self) -> str:
        """The name without the time in it, if recperf chose the name: the random end is enough to tell runs apart."""
        return re.sub(r"-\d{8}-\d{6}-(\w{6})$", r" \1", self.name)

    @property
    def profile_command(self) -> str:
        """The command that measures a missing profile: a run profiles itself at its end."""
        return f"recperf run --config {shlex.quote(str(self.folder))}"


def kind_of(path: Path) -> str:
    """Whether a path is a `run`, a `profile`, a `trace` or a folder of `traces`."""
    if path.is_dir():
        if (path / PROFILE_MARK).exists():
            return "profile"
        if any((path / name).exists() for name in ("config.json", "result.json")):
            return "run"
        if (path / "profile.json").exists():
            return "profile"
        return "traces" if any(path.glob("*.json")) or any(path.glob("*.json.gz")) else "run"
    if not path.exists():
        raise DataError("there is nothing at this path", where={"file": path}, fix="name a run, a profile or a trace")
    if not path.is_file():
        raise DataError("not a file", where={"file": path}, fix="name a run, a profile or a trace")
    return "trace" if path.name.endswith(".gz") or looks_like_trace(path) else "profile"


def read(folder: Path) -> Reading:
    """Everything that a run's folder holds; an error names the file at fault."""
    if not os.path.lexists(folder / "config.json"):
        what = "there is no such run: config.json is missing" if folder.is_dir() else "there is no such run"
        raise DataError(what, where={"folder": folder}, fix="name a run's folder, such as runs/<name of the run>")
    workload, config = read_config(folder)
    result = read_result(folder, workload)
    path = folder / "machine.json"
    read_file(path, Machine, what="does not describe a machine")
    machine = jsonfile.read(path)
    return Reading(
        folder=folder,
        workload=workload,
        config=config,
        machine=machine,
        result=result,
        events=_events(folder / "events.jsonl"),
        peaks=read_peaks(folder / "peaks.json", machine),
        profile=read_profile(folder / "profile.json") if (folder / "profile.json").exists() else None,
        pair=read_pair(folder / "pair.json") if (folder / "pair.json").exists() else None,
    )


def read_result(folder: Path, workload: str) -> Result:
    path = folder / "result.json"
    if not path.exists() and (folder / PROFILE_MARK).exists():
        raise DataError(
            "this folder holds a profile, not a run",
            where={"folder": folder},
            fix="name its profile.json; recperf compare compares two profiles",
        )
    if not path.exists():
        raise DataError(
            "the run is not finished: result.json is missing",
            where={"folder": folder},
            fix=f"recperf run --resume {shlex.quote(str(folder))}",
        )
    result = read_file(path, Result, SCHEMA)
    if result.workload != workload:
        what = f"result.json is of workload {result.workload!r}, config.json of {workload!r}"
        raise DataError(what, where={"file": path})
    return result


def read_peaks(path: Path, machine: dict[str, Any] | None = None) -> Peaks | None:
    """The ceilings in a folder, which must be those of the machine; None if it has none."""
    if not path.exists():
        return None
    peaks = read_file(path, Peaks, PEAKS_SCHEMA, what="is damaged", fix="recperf peaks")
    if machine is not None:
        require_own(peaks, machine, file=path)
    return peaks


def read_profile(path: Path) -> Profile:
    profile = read_file(path, Profile, PROFILE_SCHEMA)
    _require_shares(path, profile.components, "components")
    return profile


def read_pair(path: Path) -> Pair:
    pair = read_file(path, Pair, PAIR_SCHEMA)
    _require_shares(path, pair.hot.components, "hot.components")
    _require_shares(path, pair.cold.components, "cold.components")
    return pair


def _require_shares(path: Path, components: list[Component], where: str) -> None:
    shares = [component.share for component in components]
    if not shares or min(shares) < 0 or abs(math.fsum(shares) - 1) > 0.01:
        raise DataError(f"{path.name} does not fit: the shares of {where} do not sum to 1", where={"file": path})


def _events(path: Path) -> Events:
    events = Events()
    if not os.path.lexists(path):
        return events
    try:
        with reading(path), open(open_regular(path), "rb") as file:
            # A kill can leave half a line at the end; without its newline it is no event.
            events.take(line for line in file if line.endswith(b"\n"))
    except BadEvent as error:
        raise DataError(str(error), where={"file": path, "line": error.line}) from None
    return events
