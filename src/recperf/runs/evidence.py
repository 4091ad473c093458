"""The files of a run as evidence: read when first needed and validated as a whole, and sealed.

seal.json holds the size and digest of every evidence file, so that a later change is noticed.
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..errors import DataError
from ..files import digest_of, open_regular, write_json
from ..jsonfile import Problem, Struct, as_json, fit
from ..machine import fingerprint
from ..measure.peaks import SCHEMA as PEAKS_SCHEMA
from ..measure.peaks.records import Peaks
from ..measure.profile_records import PAIR_SCHEMA, SCHEMA, Pair, Profile
from ..train.config import chosen_evaluation, leading, merit
from .result import Data, Evaluation, Metrics, Result, Trial
from .schemas import BadEvent, Event, Progress, SavedConfig, Scores, Step, parse_events, read_file

T = TypeVar("T")
E = TypeVar("E", bound=Event)
Json = dict[str, Any]

SEAL_SCHEMA = 1
SEAL = "seal.json"
START = "start.json"
EVIDENCE = (
    "result.json", "events.jsonl", "config.json", "machine.json", "data.json", "baselines.json", "scores.json",
    "progress.json", START, "profile.json", "pair.json", "peaks.json",
)  # fmt: skip
"""The evidence files, together with every trial-<seed>.json."""

HOW_TO_MEASURE = {
    "profile.json": "recperf run",
    "pair.json": "recperf pair",
    "peaks.json": "recperf peaks, then recperf run",
}
"""The commands that write evidence which training alone does not write."""


class NoEvidence(DataError):
    """A file is missing, or does not hold what a claim needs."""


class Evidence:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[tuple[str, Any], Any] = {}

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def file(self, name: str, kind: type[T], *, schema: int | None = None) -> T:
        """The content of a JSON file as `kind`."""
        if (name, kind) not in self._files:
            self._require(name)
            try:
                self._files[name, kind] = read_file(self.folder / name, kind, schema)
            except DataError as error:
                raise NoEvidence(error.what) from None
        content: T = self._files[name, kind]
        return content

    def _require(self, name: str) -> None:
        if not os.path.lexists(self.folder / name):
            command = f" (measure it with {HOW_TO_MEASURE[name]})" if name in HOW_TO_MEASURE else ""
            raise NoEvidence(f"{name} is missing{command}")

    @property
    def result(self) -> Result:
        return self.file("result.json", Result)

    @property
    def config(self) -> SavedConfig:
        return self.file("config.json", SavedConfig, schema=1)

    @property
    def data(self) -> Data:
        return self.file("data.json", Data)

    @property
    def baselines(self) -> dict[str, Metrics]:
        return self.file("baselines.json", dict[str, Metrics])

    @property
    def progress(self) -> Progress:
        return self.file("progress.json", Progress)

    @property
    def profile(self) -> Profile:
        return self.file("profile.json", Profile, schema=SCHEMA)

    @property
    def pair(self) -> Pair:
        return self.file("pair.json", Pair, schema=PAIR_SCHEMA)

    @property
    def peaks(self) -> Peaks:
        return self.file("peaks.json", Peaks, schema=PEAKS_SCHEMA)

    @property
    def fingerprint(self) -> str:
        """The fingerprint that follows from the facts in machine.json."""
        return own_fingerprint("machine.json", self.file("machine.json", dict[str, Any]))

    @cached_property
    def _events(self) -> list[Event]:
        self._require("events.jsonl")
        try:
            with open(open_regular(self.folder / "events.jsonl"), "rb") as file:
                return list(parse_events(file))
        except BadEvent as error:
            raise NoEvidence(str(error)) from None
        except OSError as error:
            raise NoEvidence(f"cannot read events.jsonl: {error.strerror or error}") from None

    def events(self, kind: type[E], *, seed: int | None = None) -> list[E]:
        """Events of a kind in their order, of all seeds or of one."""
        return [event for event in self._events if isinstance(event, kind) and seed in (None, event.seed)]

    def seeds(self) -> range:
        """The seeds that the config asks for; every one must have a trial."""
        config = self.config.config
        first, count = config.get("seed"), config.get("seeds")
        trials = [name for name in present(self.folder) if name.startswith("trial-")]
        if type(first) is not int or type(count) is not int:
            raise NoEvidence("config.json names no seeds")
        if len(trials) != count or count < 1:
            raise NoEvidence(f"config.json asks for {count} seeds, the run holds {len(trials)} trials")
        return range(first, first + count)

    def trials(self) -> list[Trial]:
        """The trial of every seed, which must be the chosen and the best evaluation in the log."""
        trials = []
        for seed in self.seeds():
            name, history = f"trial-{seed}.json", self._history(seed)
            trial = self.file(name, Trial)
            chosen = history[chosen_evaluation([entry.metrics for entry in history])]
            if (trial.seed, trial.metrics) != (seed, chosen.metrics):
                raise NoEvidence(f"{name}: seed or metrics differ from the evaluation in events.jsonl that counts")
            if trial.best != max(history, key=lambda entry: merit(entry.metrics)):
                raise NoEvidence(f"{name}: best is not the best evaluation in events.jsonl")
            trials.append(trial)
        return trials

    def _history(self, seed: int) -> list[Evaluation]:
        """The evaluations of a seed on validation rows."""
        history = []
        for event in self.events(Scores, seed=seed):
            if event.split == "valid":
                metrics = fit(event.metrics, Metrics)
                if isinstance(metrics, Problem) or leading(metrics) not in metrics or event.epoch is None:
                    raise NoEvidence(f"events.jsonl has an evaluation of seed {seed} that is damaged")
                history.append(Evaluation(step=event.step, epoch=event.epoch, metrics=metrics))
        if not history:
            raise NoEvidence(f"events.jsonl has no evaluation of seed {seed}")
        return history

    def losses(self, seed: int) -> list[float]:
        """The loss of every step of a seed; each step must be in the log exactly once."""
        steps = sorted(self.events(Step, seed=seed), key=lambda event: event.step)
        losses = [event.loss for event in steps if event.loss is not None]
        complete = [event.step for event in steps] == [*range(1, len(losses) + 1)]
        if len(losses) < 2 or not complete:
            raise NoEvidence(f"events.jsonl does not have every step of seed {seed} once")
        return losses


def own_fingerprint(place: str, machine: Json) -> str:
    """The fingerprint that follows from the facts of a machine; it must be the one that is stated."""
    derived = fingerprint({name: fact for name, fact in machine.items() if name != "fingerprint"})
    if machine.get("fingerprint") != derived:
        raise NoEvidence(f"{place} states {machine.get('fingerprint')!r}, its facts give {derived}")
    return derived


class SealedFile(Struct):
    bytes: int
    sha256: str


class Seal(Struct):
    """seal.json."""

    schema: int
    files: dict[str, SealedFile]


def seal(folder: Path) -> None:
    """Write seal.json over the evidence files in the folder; the last thing that a run does."""
    try:
        files = {name: _facts(folder / name, sync=True) for name in present(folder)}
    except OSError as error:
        where = {"file": error.filename or folder}
        raise DataError(f"cannot seal the run: {error.strerror or error}", where=where) from error
    write_json(folder / SEAL, as_json(Seal(schema=SEAL_SCHEMA, files=files)))


def _facts(path: Path, *, sync: bool = False) -> SealedFile:
    with open(open_regular(path), "rb") as file:
        if sync:
            # After a power cut there must be no seal of a log that is shorter than it says.
            os.fsync(file.fileno())
        return SealedFile(bytes=os.fstat(file.fileno()).st_size, sha256=digest_of(file))


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
        sealed, names = read_file(folder / SEAL, Seal, SEAL_SCHEMA, what="is damaged"), present(folder)
    except (DataError, OSError) as error:
        return {SEAL: str(error)}
    if not sealed.files:
        return {SEAL: f"{SEAL} lists no files"}
    texts = {name: _difference(folder, name, facts) for name, facts in sealed.files.items()}
    texts |= {name: f"{name} is not in {SEAL}" for name in names if name not in sealed.files}
    return {name: text for name, text in texts.items() if text}


def _difference(folder: Path, name: str, sealed: SealedFile) -> str:
    # Names are checked before they are opened: a seal must not point to files outside the folder.
    if not is_evidence(name):
        return f"{SEAL} lists {name!r}, which is not an evidence file"
    try:
        facts = _facts(folder / name)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"cannot read {name}: {error.strerror or error}"
    if facts.bytes != sealed.bytes:
        return f"{name} has {facts.bytes:,} bytes, the seal says {sealed.bytes:,}"
    return "" if facts.sha256 == sealed.sha256 else f"{name} was changed: its digest differs from the seal"
