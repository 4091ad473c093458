"""A run's evidence: which files count as it, how they are read, and seal.json, which shows when one was altered."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import sha256, write_json

SCHEMA = 1
NAME = "seal.json"

EVIDENCE = (
    "result.json",
    "events.jsonl",
    "config.json",
    "machine.json",
    "data.json",
    "baselines.json",
    "progress.json",
    "profile.json",
    "pair.json",
    "peaks.json",
)
"""Beside these, every trial-<seed>.json."""

LARGEST = 1e100
"""No measurement is larger; beyond it arithmetic overflows."""

MEASURE = {
    "profile.json": "recperf run",
    "pair.json": "recperf run, ids hot and cold",
    "peaks.json": "recperf peaks, then recperf run",
}
"""How to come by evidence that a training alone does not leave."""


def seal(folder: Path) -> None:
    """Write seal.json over the evidence that is there now; the last thing a run does."""
    try:
        files = {name: _facts(folder / name) for name in present(folder)}
    except OSError as error:
        where = {"file": error.filename or folder}
        raise DataError(f"cannot seal the run: {error.strerror or error}", where=where) from error
    write_json(folder / NAME, {"schema": SCHEMA, "files": files})


def present(folder: Path) -> list[str]:
    """Names of the evidence files in a run's folder."""
    return [name for name in sorted(path.name for path in folder.iterdir()) if is_evidence(name)]


def is_evidence(name: str) -> bool:
    return name in EVIDENCE or re.fullmatch(r"trial-\d+\.json", name) is not None


def broken(folder: Path) -> list[str]:
    """Every difference between the evidence and its seal; empty when there is none."""
    try:
        sealed = json.loads((folder / NAME).read_bytes())
    except FileNotFoundError:
        return [f"{NAME} is missing"]
    except OSError as error:
        return [f"{NAME} cannot be read: {error.strerror or error}"]
    except (ValueError, RecursionError):
        return [f"{NAME} is not JSON"]
    schema = sealed.get("schema") if isinstance(sealed, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        return [f"{NAME} has schema {schema!r}; this recperf reads {SCHEMA}"]
    files = sealed.get("files")
    if not isinstance(files, dict) or not files:
        return [f"{NAME} lists no files"]
    try:
        here = present(folder)
    except OSError as error:
        return [f"the folder cannot be read: {error.strerror or error}"]
    found = [_difference(folder, name, stated) for name, stated in files.items()]
    found += [f"{name} is not in {NAME}" for name in here if name not in files]
    return [text for text in found if text]


def _difference(folder: Path, name: str, stated: Any) -> str:
    # A name is only looked up once it is known to be one: a seal must not send us to other folders.
    if not is_evidence(name):
        return f"{NAME} lists {name!r}, which is no evidence of a run"
    if not isinstance(stated, dict):
        return f"{NAME} says nothing about {name}"
    try:
        found = _facts(folder / name)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    if found["bytes"] != stated.get("bytes"):
        return f"{name} has {found['bytes']:,} bytes, {stated.get('bytes')!r} were sealed"
    return "" if found["sha256"] == stated.get("sha256") else f"{name} was altered: its digest is not the sealed one"


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


class NoEvidence(Exception):
    """A file that is missing, or one that does not hold what a claim needs."""


def printable(text: str) -> str:
    """Text out of a file that may be damaged, without what a terminal would obey or could not show."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


@dataclass(frozen=True)
class Part:
    """A value inside an evidence file. It knows its place, so that what is missing or of another type can be named."""

    value: Any
    file: str
    path: str = ""

    def __getitem__(self, key: str) -> Part:
        self._require(isinstance(self.value, dict), "an object")
        if key not in self.value:
            raise NoEvidence(f"{self.file} has no {self._inside(key)}")
        return Part(self.value[key], self.file, self._inside(key))

    def object(self) -> dict[str, Part]:
        self._require(isinstance(self.value, dict), "an object")
        return {key: Part(inner, self.file, self._inside(key)) for key, inner in self.value.items()}

    def array(self) -> list[Part]:
        self._require(isinstance(self.value, list), "an array")
        return [Part(inner, self.file, self._inside(str(index))) for index, inner in enumerate(self.value)]

    def text(self) -> str:
        self._require(isinstance(self.value, str), "a string")
        return str(self.value)

    def flag(self) -> bool:
        self._require(isinstance(self.value, bool), "true or false")
        return bool(self.value)

    def whole(self) -> int:
        fits = isinstance(self.value, int) and not isinstance(self.value, bool) and abs(self.value) < 1 << 53
        self._require(fits, "a whole number")
        return int(self.value)

    def number(self) -> float:
        fits = isinstance(self.value, (int, float)) and not isinstance(self.value, bool) and abs(self.value) < LARGEST
        self._require(fits, "a finite number")
        return float(self.value)

    def positive(self) -> float:
        self._require(self.number() > 0, "above 0")
        return self.number()

    def numbers(self) -> dict[str, float]:
        return {key: inner.number() for key, inner in self.object().items()}

    @property
    def place(self) -> str:
        return f"{self.file}: {self.path}" if self.path else self.file

    def _inside(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _require(self, fits: bool, wanted: str) -> None:
        if not fits:
            kinds: dict[type, str] = {dict: "an object", list: "an array"}
            shown = kinds.get(type(self.value)) or repr(self.value)[:60]
            raise NoEvidence(f"{self.place} should be {wanted}, is {shown}")


class Evidence:
    """The files of one run, each read when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Part] = {}
        self._events: list[Part] | None = None

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def file(self, name: str, *, schema: int | None = None) -> Part:
        """A JSON file of the run, refused when it should have a schema and has another."""
        if name not in self._files:
            try:
                self._files[name] = Part(json.loads(self._bytes(name)), name)
            except (ValueError, RecursionError):
                raise NoEvidence(f"{name} is not JSON") from None
        part = self._files[name]
        if schema is not None and part["schema"].whole() != schema:
            raise NoEvidence(f"{name} has schema {part['schema'].value}; this recperf reads {schema}")
        return part

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            how = f" (measure it with {MEASURE[name]})" if name in MEASURE else ""
            raise NoEvidence(f"{name} is missing{how}") from None
        except OSError as error:
            raise NoEvidence(f"{name} cannot be read: {error.strerror or error}") from None

    @property
    def result(self) -> Part:
        return self.file("result.json")

    @property
    def config(self) -> Part:
        """The whole file: schema, workload and, under config, the fields."""
        return self.file("config.json", schema=1)

    @property
    def machine(self) -> Part:
        return self.file("machine.json")

    @property
    def profile(self) -> Part:
        return self.file("profile.json", schema=1)

    @property
    def pair(self) -> Part:
        return self.file("pair.json", schema=1)

    @property
    def peaks(self) -> Part:
        return self.file("peaks.json", schema=1)

    def events(self, kind: str | None = None, *, seed: int | None = None) -> list[Part]:
        """Lines of events.jsonl in their order: all, or those of a kind and of a seed."""
        if self._events is None:
            self._events = [self._event(*line) for line in enumerate(self._bytes("events.jsonl").splitlines(), 1)]
        events = self._events if kind is None else [event for event in self._events if event.value["kind"] == kind]
        return events if seed is None else [event for event in events if event["seed"].whole() == seed]

    def _event(self, number: int, line: bytes) -> Part:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
            raise NoEvidence(f"events.jsonl line {number} is not an event")
        return Part(event, f"events.jsonl line {number}")

    def seeds(self) -> range:
        """The seeds the config asks for; a run that left one out is not whole."""
        config = self.config["config"]
        first, count = config["seed"].whole(), config["seeds"].whole()
        trials = [name for name in present(self.folder) if name.startswith("trial-")]
        if len(trials) != count or count < 1:
            raise NoEvidence(f"config.json asks for {count} seeds, the run holds {len(trials)} trials")
        return range(first, first + count)

    def trials(self) -> list[Part]:
        return [self.file(f"trial-{seed}.json") for seed in self.seeds()]

    def history(self, seed: int) -> list[dict[str, Any]]:
        """The evaluations of a seed on validation rows: step, epoch and metrics, in the shape a trial keeps them."""
        about = ("kind", "t", "seed", "step", "epoch", "split")
        found = []
        for event in self.events("metric", seed=seed):
            if event["split"].value == "valid":
                event["auc"].number()
                metrics = {name: part.number() for name, part in event.object().items() if name not in about}
                found.append({"step": event["step"].whole(), "epoch": event["epoch"].whole(), "metrics": metrics})
        if not found:
            raise NoEvidence(f"events.jsonl has no evaluation of seed {seed}")
        return found

    def losses(self, seed: int) -> list[float]:
        """The loss of every step of a seed, each of which must be in the log once."""
        events = self.events("step", seed=seed)
        losses = {event["step"].whole(): event["loss"].number() for event in events}
        if len(events) < 2 or len(losses) != len(events) or sorted(losses) != list(range(1, len(events) + 1)):
            raise NoEvidence(f"events.jsonl does not have every step of seed {seed} once")
        return [losses[step] for step in sorted(losses)]
