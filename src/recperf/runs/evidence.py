"""The files of a run, read when first needed and validated as a whole; and seal.json, which reveals later changes.

seal.json holds the size and digest of every evidence file.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..errors import DataError
from ..files import digest_of, open_regular, reading, write_json
from ..jsonfile import Problem, Struct, as_json, fit, read, require, require_unchanged
from ..measure.peaks import SCHEMA as PEAKS_SCHEMA
from ..measure.peaks import require_own
from ..measure.peaks.records import Peaks
from ..measure.profile import KIND, StepProfile
from ..measure.profile import SCHEMA as PROFILE_SCHEMA
from ..measure.profile_records import PAIR_SCHEMA, Component, Pair, WorkloadFigures
from ..measure.trace.file import looks_like_trace
from ..tasks import Task, named, of
from ..train.checkpoint_folder import StoredFile, file_fault
from .record import BENCH, PROFILE_MARK, Run, read_saved_config
from .result import SCHEMA, Data, Evaluation, Metrics, Result, TrialResult
from .schemas import LEARNING, BadEvent, Event, Machine, Progress, SavedConfig, Scores, Step, parse_events, read_file

T = TypeVar("T")
E = TypeVar("E", bound=Event)
Series = dict[int, list[tuple[int, float]]]
"""Pairs of step and value by seed."""

SEAL_SCHEMA = 1
SEAL = "seal.json"
START = "start.json"
EVIDENCE = (
    "result.json", "events.jsonl", "config.json", "machine.json", "data.json", "baselines.json", "scores.json",
    "progress.json", START, LEARNING, "profile.json", "pair.json", "peaks.json",
)  # fmt: skip
"""The evidence files, together with every trial-<seed>.json."""


class Evidence:
    """The files of one run. A file that is missing, damaged or of another run is a DataError; what a run need not have
    measured is None."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[tuple[str, Any], Any] = {}

    def has(self, name: str) -> bool:
        return os.path.lexists(self.folder / name)

    def file(self, name: str, kind: type[T], *, schema: int | None = None) -> T:
        """The content of a JSON file as `kind`."""
        if (name, kind) not in self._files:
            self._require(name)
            self._files[name, kind] = read_file(self.folder / name, kind, schema)
        content: T = self._files[name, kind]
        return content

    def _require(self, name: str) -> None:
        if not self.has(name):
            raise DataError(f"{name} is missing", where={"folder": self.folder}, fix="name the folder of a whole run")

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

    @cached_property
    def config(self) -> SavedConfig:
        if not self.has("config.json"):
            what = f"there is no such run{': config.json is missing' if self.folder.is_dir() else ''}"
            raise DataError(what, where={"folder": self.folder}, fix="name a run's folder, such as runs/<name>")
        return read_saved_config(self.folder / "config.json")

    @property
    def workload(self) -> str:
        return self.config.workload

    @cached_property
    def task(self) -> Task:
        """What the model predicts."""
        return named(self.config.task) if self.config.task else task_of(self.log)

    @cached_property
    def result(self) -> Result:
        path, workload = self.folder / "result.json", self.workload
        if not self.has("result.json") and self.has(PROFILE_MARK):
            fix = "name its profile.json; recperf compare compares two profiles"
            raise DataError("this folder holds a profile, not a run", where={"folder": self.folder}, fix=fix)
        if not self.has("result.json"):
            fix = f"recperf run --resume {shlex.quote(str(self.folder))}"
            what = "the run is not finished: result.json is missing"
            raise DataError(what, where={"folder": self.folder}, fix=fix)
        result = read_file(path, Result, SCHEMA)
        if result.workload != workload:
            what = f"result.json is of workload {result.workload!r}, config.json of {workload!r}"
            raise DataError(what, where={"file": path})
        named(result.task)
        return result

    @property
    def data(self) -> Data:
        return self.file("data.json", Data)

    @property
    def baselines(self) -> dict[str, Metrics]:
        return self.file("baselines.json", dict[str, Metrics])

    @property
    def progress(self) -> Progress:
        return self.file("progress.json", Progress)

    @cached_property
    def machine(self) -> dict[str, Any]:
        self.file("machine.json", Machine)
        return self.file("machine.json", dict[str, Any])

    @cached_property
    def profile(self) -> StepProfile | None:
        return read_profile(self.folder / "profile.json") if self.has("profile.json") else None

    @property
    def figures(self) -> WorkloadFigures | None:
        """What only the profile of a workload has; None where the run has no profile."""
        if self.profile is None:
            return None
        if self.profile.workload is None:
            what = "the profile of this run is that of another step"
            raise DataError(what, where={"file": self.folder / "profile.json"}, fix="restore the file")
        return self.profile.workload

    @cached_property
    def pair(self) -> Pair | None:
        if not self.has("pair.json"):
            return None
        pair = self.file("pair.json", Pair, schema=PAIR_SCHEMA)
        for name, arm in (("hot", pair.hot), ("cold", pair.cold)):
            _require_shares(self.folder / "pair.json", arm.components, f"{name}.components")
        return pair

    @cached_property
    def peaks(self) -> Peaks | None:
        return read_peaks(self.folder / "peaks.json", self.machine) if self.has("peaks.json") else None

    @cached_property
    def log(self) -> list[Event]:
        """Every event of events.jsonl. A kill can leave half a line at the end; without its newline it is no event."""
        self._require("events.jsonl")
        path = self.folder / "events.jsonl"
        try:
            with reading(path), open(open_regular(path), "rb") as file:
                return list(parse_events(line for line in file if line.endswith(b"\n")))
        except BadEvent as error:
            raise DataError(str(error), where={"file": path, "line": error.line}) from None

    def events(self, kind: type[E], *, seed: int | None = None) -> list[E]:
        """Events of a kind in their order, of all seeds or of one."""
        return [event for event in self.log if isinstance(event, kind) and seed in (None, event.seed)]

    def seeds(self) -> range:
        """The seeds that the config asks for; every one must have a trial."""
        config = self.config.config
        first, count = config.get("seed"), config.get("seeds")
        trials = [name for name in present(self.folder) if name.startswith("trial-")]
        if type(first) is not int or type(count) is not int:
            raise DataError("config.json names no seeds")
        if len(trials) != count or count < 1:
            raise DataError(f"config.json asks for {count} seeds, the run holds {len(trials)} trials")
        return range(first, first + count)

    def trials(self) -> list[TrialResult]:
        """The trial of every seed, which must be the chosen and the best evaluation in the log."""
        trials = []
        for seed in self.seeds():
            name, history = f"trial-{seed}.json", self._history(seed)
            trial = self.file(name, TrialResult)
            chosen = history[self.task.chosen([entry.metrics for entry in history])]
            best = max(history, key=lambda entry: self.task.merit(entry.metrics))
            if (trial.seed, trial.metrics, trial.best) != (seed, chosen.metrics, best):
                raise DataError(f"{name}: seed or metrics differ from the evaluation in events.jsonl that counts")
            trials.append(trial)
        return trials

    def _history(self, seed: int) -> list[Evaluation]:
        """The evaluations of a seed on validation rows."""
        history = []
        for event in self.events(Scores, seed=seed):
            if event.split == "valid":
                metrics = fit(event.metrics, Metrics)
                if isinstance(metrics, Problem) or self.task.leading not in metrics or event.epoch is None:
                    raise DataError(f"events.jsonl has an evaluation of seed {seed} that is damaged")
                history.append(Evaluation(step=event.step, epoch=event.epoch, metrics=metrics))
        if not history:
            raise DataError(f"events.jsonl has no evaluation of seed {seed}")
        return history

    def losses(self, seed: int) -> list[float]:
        """The loss of every step of a seed; each step must be in the log exactly once."""
        steps = sorted(self.events(Step, seed=seed), key=lambda event: event.step)
        losses = [event.loss for event in steps if event.loss is not None]
        if len(losses) < 2 or [event.step for event in steps] != [*range(1, len(losses) + 1)]:
            raise DataError(f"events.jsonl does not have every step of seed {seed} once")
        return losses


def task_of(log: Iterable[Event]) -> Task:
    """What the model of a run from before runs named it predicts, by the metrics in its log."""
    return of(name for event in log if isinstance(event, Scores) for name in event.metrics)


def curve(log: Iterable[Event], name: str) -> Series:
    """A loss, a norm or an evaluated metric over the steps, by seed."""
    series: Series = {}
    for event in log:
        value = None
        if isinstance(event, Step):
            value = getattr(event, name, None)
        elif isinstance(event, Scores) and event.kind == "metric":
            value = event.metrics.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value) and event.seed is not None:
            series.setdefault(event.seed, []).append((event.step, float(value)))
    return series


def read_peaks(path: Path, machine: dict[str, Any] | None = None) -> Peaks | None:
    """The ceilings in a file, which must be those of the machine; None if there is no such file."""
    if not path.exists():
        return None
    peaks = read_file(path, Peaks, PEAKS_SCHEMA, what="is damaged", fix="recperf peaks")
    if machine is not None:
        require_own(peaks, machine, file=path)
    return peaks


def read_profile(path: Path) -> StepProfile:
    """The profile in a file; one of another version, or that was changed after it was written, is refused."""
    content = read(path, named=True)
    # Before schema 3, profiles of workloads had another form.
    if not isinstance(content, dict) or not (content.get("kind") == KIND or "observed" in content):
        fix = "name a profile.json that recperf run or recperf profile wrote"
        raise DataError("this file is not a profile of a step", where={"file": path}, fix=fix)
    if content.get("schema") != PROFILE_SCHEMA:
        what = f"{path.name} has schema {content.get('schema')!r}; this recperf reads {PROFILE_SCHEMA}"
        raise DataError(what, where={"file": path}, fix="measure again: recperf run and recperf profile write one")
    profile = require(content, StepProfile, path, what="does not fit its description")
    require_unchanged(content, path)
    if profile.workload is not None:
        _require_shares(path, profile.workload.components, "workload.components")
    return profile


def profile_of(run: Run) -> StepProfile | None:
    """The profile of a run; None if its steps were not measured yet. On several ranks, rank 0 sends what it reads."""
    profile: StepProfile | None = run.read("profile.json", reader=read_profile)
    return profile


def _require_shares(path: Path, components: list[Component], where: str) -> None:
    shares = [component.share for component in components]
    if not shares or min(shares) < 0 or abs(math.fsum(shares) - 1) > 0.01:
        raise DataError(f"{path.name} does not fit: the shares of {where} do not sum to 1", where={"file": path})


def kind_of(path: Path) -> str:
    """Whether a path is a `run`, a `profile`, a `bench`, a `trace` or a folder of `traces`."""
    if path.is_dir():
        if (path / BENCH).exists():
            return "bench"
        if (path / PROFILE_MARK).exists():
            return "profile"
        if any((path / name).exists() for name in ("config.json", "result.json")):
            return "run"
        if (path / "profile.json").exists():
            return "profile"
        return "traces" if any(path.glob("*.json")) or any(path.glob("*.json.gz")) else "run"
    if not path.is_file():
        what = "not a file" if path.exists() else "there is nothing at this path"
        raise DataError(what, where={"file": path}, fix="name a run, a profile or a trace")
    return "trace" if path.name.endswith(".gz") or looks_like_trace(path) else "profile"


class Seal(Struct):
    """seal.json."""

    schema: int
    files: dict[str, StoredFile]


def seal(folder: Path) -> None:
    """Write seal.json over the evidence files in the folder; the last thing that a run does."""
    files = {}
    try:
        for name in present(folder):
            with open(open_regular(folder / name), "rb") as file:
                # After a power cut there must be no seal of a log that is shorter than it says.
                os.fsync(file.fileno())
                files[name] = StoredFile(bytes=os.fstat(file.fileno()).st_size, sha256=digest_of(file))
    except OSError as error:
        where = {"file": error.filename or folder}
        raise DataError(f"cannot seal the run: {error.strerror or error}", where=where) from error
    write_json(folder / SEAL, as_json(Seal(schema=SEAL_SCHEMA, files=files)))


def present(folder: Path) -> list[str]:
    """Names of the evidence files in a run's folder."""
    return [name for name in sorted(path.name for path in folder.iterdir()) if is_evidence(name)]


def is_evidence(name: str) -> bool:
    return name in EVIDENCE or re.fullmatch(r"trial-\d+\.json", name) is not None


def differences(folder: Path) -> dict[str, str]:
    """How the evidence files differ from their seal, by the name of the file; where seal.json differs, no file could be
    compared."""
    if not os.path.lexists(folder / SEAL):
        return {SEAL: f"{SEAL} is missing"}
    try:
        sealed, names = read_file(folder / SEAL, Seal, SEAL_SCHEMA, what="is damaged").files, present(folder)
        # Names are checked before they are opened: a seal must not point to files outside the folder.
        foreign = [name for name in sealed if not is_evidence(name)]
        if foreign or not sealed:
            return {SEAL: f"{SEAL} lists {f'{foreign[0]!r}, which is not an evidence file' if foreign else 'no files'}"}
        faults = {name: file_fault(folder / name, stated) for name, stated in sealed.items()}
    except (DataError, OSError) as error:
        return {SEAL: str(error)}
    faults |= {name: f"is not in {SEAL}" for name in names if name not in sealed}
    return {name: f"{name} {fault}" for name, fault in faults.items() if fault}
