"""The folder of a run: everything about one execution, written as it happens, and the code that it ran.

runs/micro-dlrm-20261115-031500-a1b2c3/
  config.json  machine.json  events.jsonl  trial-42.json  checkpoints/  result.json
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any

from msgspec.structs import replace

from .. import jsonfile
from ..config import ConfigValues
from ..errors import DataError, MachineError, RecperfError, UsageError
from ..files import (
    append,
    digest_of,
    end_of_lines,
    make_folder,
    open_regular,
    reading,
    write_atomic,
    write_json,
    writing,
)
from ..folders import MARK, alone
from ..jsonfile import as_json
from ..learn.records import QualityEvidence
from .schemas import (
    LEARNING,
    BadEvent,
    Event,
    Progress,
    SavedConfig,
    SavedLearning,
    Step,
    Timing,
    event_of,
    parse_events,
    read_file,
)

CONFIG_SCHEMA = 1
BENCH = "bench.json"
PROFILE_MARK = ".profile"
"""Marks a folder as one for a profile."""
JOB = ".torchrun"
"""File that names the torchrun job working on a run."""
START_FOLDER = "start"
"""Folder of what a run started from: another run's checkpoint, and which of its rows go where."""
MEASURED = ("profile.json", "pair.json", "peaks.json")
"""The files of a run that describe its machine's speed."""
OWN_FILES = (
    "config.json",
    "progress.json",
    "data.json",
    "machine.json",
    "baselines.json",
    "scores.json",
    "events.jsonl",
    "start.json",
    ".lock",
    JOB,
    MARK,
)
"""The files that a run writes before it trains."""
PACKAGES = ("recperf", "torch", "numpy", "triton", "pyarrow", "duckdb", "scikit-learn")
"""Packages whose versions a result states."""
_FIRST = b'{"kind": '
"""How every event begins."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Busy(MachineError):
    """Another process is using the run folder."""


def new_folder(name: str) -> Path:
    """A path for a run or a profile that no other has: runs/<name>-<time>-<id>."""
    return Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


class Run:
    """One run folder, held by one process at a time."""

    def __init__(self, folder: Path, *, made: bool = False) -> None:
        self.folder = folder
        self._made = made
        """Whether this process created the folder."""
        self._began = monotonic()
        self._digest, self._digested = hashlib.sha256(), 0
        """Of the log up to a byte."""
        self._lock = hold(folder)
        try:
            self._events = self._open_events()
        except BaseException:
            os.close(self._lock)
            raise

    @classmethod
    def create(cls, workload: str, config: ConfigValues, *, folder: Path | None, task: str = "", job: str = "") -> Run:
        """A new folder, by default runs/<workload>-<time>-<id>. An existing run is never overwritten.

        `task`: what the workload predicts; `job`: torchrun's id of the job that creates it.
        """
        if folder is None:
            folder = new_folder(workload)
        if (folder / PROFILE_MARK).exists() and (folder / "profile.json").exists():
            raise UsageError(
                "the folder already holds a profile", where={"folder": folder}, fix="choose another --run-dir"
            )
        if (folder / "config.json").exists() and not (folder / PROFILE_MARK).exists():
            raise UsageError(
                "the run folder already holds a run",
                where={"folder": folder},
                fix=f"recperf run --resume {folder}, or another --run-dir",
            )
        made = not folder.exists()
        with writing(folder):
            make_folder(folder)
        with alone(folder, what="starting a run in this folder", ours=".*"):
            run = cls(folder, made=made)
        # A folder with a config is a run; a job that is restarted must know it as its own from then on.
        run.note_job(job)
        saved = SavedConfig(schema=CONFIG_SCHEMA, workload=workload, config=config, task=task)
        write_json(folder / "config.json", saved)
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open an existing run to resume it."""
        read_config(folder)
        if (folder / PROFILE_MARK).exists():
            raise UsageError(
                "this folder holds a profile, not a run",
                where={"folder": folder},
                fix=f"recperf run --config {folder} trains with its config",
            )
        return cls(folder)

    def _open_events(self) -> int:
        path = self.folder / "events.jsonl"
        with writing(path):
            handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            # A power cut can leave zeros in the place of what was written.
            if not _FIRST.startswith(os.pread(handle, len(_FIRST), 0).rstrip(b"\0")):
                os.close(handle)
                raise DataError("events.jsonl is not the log of a run", where={"file": path}, fix="move it away")
            # A crash can leave half a line at the end; whole lines stay.
            whole = end_of_lines(handle)
            if whole != os.fstat(handle).st_size and not self.finished:
                os.ftruncate(handle, whole)
        return handle

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line, with a single write where the system completes it, so that a kill leaves whole lines."""
        line = json.dumps({"kind": kind, "t": round(monotonic() - self._began, 3), **fields}, allow_nan=False)
        with writing(self.folder / "events.jsonl"):
            append(self._events, line.encode() + b"\n")

    @property
    def event_bytes(self) -> int:
        """The length of the log; a checkpoint stores it, so that a resumed run does not log a step twice."""
        return os.fstat(self._events).st_size

    def sync_events(self) -> None:
        """Sync the log to disk: after a power cut it must not be shorter than a checkpoint says."""
        with writing(self.folder / "events.jsonl"):
            os.fsync(self._events)

    def event_digest(self, size: int | None = None) -> str:
        """Digest of the first bytes of the log, or of all; a checkpoint stores it, so that a changed log is noticed.

        Each save reads only what was logged since the last one.
        """
        end = self.event_bytes if size is None else size
        if end < self._digested:
            self._digest, self._digested = hashlib.sha256(), 0
        with reading(self.folder / "events.jsonl"):
            while block := os.pread(self._events, min(end - self._digested, 1 << 20), self._digested):
                self._digest.update(block)
                self._digested += len(block)
        return self._digest.hexdigest()

    def _lines(self, start: int = 0) -> Iterator[bytes]:
        """The lines of the log from a byte on, with their ends."""
        path = self.folder / "events.jsonl"
        with reading(path), open(open_regular(path), "rb") as file:
            file.seek(start)
            yield from file

    def log_fault(self, size: int, digest: str) -> str | None:
        """Why the log is not the one that a checkpoint saw; None if it is."""
        if size > self.event_bytes:
            return "events.jsonl is shorter than the checkpoint says"
        return None if self.event_digest(size) == digest else "events.jsonl has changed since the checkpoint was saved"

    def rewind_events(self, size: int, *, step: int | None = None) -> None:
        """Cut the log back to a checkpoint: the resumed training logs the later steps again.

        How long saving the checkpoint of that `step` took could only be logged after it; that event stays.
        """
        after = self._lines(size) if step is not None else iter(())
        own = next((line for line in after if _is_save(line, step)), b"")
        with writing(self.folder / "events.jsonl"):
            os.ftruncate(self._events, size)
            if self._digested > size:
                self._digest, self._digested = hashlib.sha256(), 0
            append(self._events, own)

    def events(self) -> Iterator[Event]:
        """The log so far."""
        try:
            yield from parse_events(self._lines())
        except BadEvent as error:
            raise DataError(str(error), where={"folder": self.folder}, fix="start a new run") from None

    def forget_events(self, seed: int) -> None:
        """Drop what a training without a checkpoint logged: it starts over and logs its steps again."""
        size = 0
        for line in self._lines():
            try:
                if jsonfile.decode(line).get("seed") == seed:
                    break
            except (ValueError, AttributeError):
                raise DataError(
                    "events.jsonl has a line that is not an event",
                    where={"file": self.folder / "events.jsonl", "byte": size},
                    fix="start a new run",
                ) from None
            size += len(line)
        self.rewind_events(size)

    def digest(self, name: str) -> str | None:
        """Digest of a file of the run; None if it does not exist."""
        path = self.folder / name
        if not os.path.lexists(path):
            return None
        with reading(path), open(open_regular(path), "rb") as file:
            return digest_of(file)

    def write(self, name: str, value: Any) -> None:
        write_json(self.folder / name, value)

    def remove(self, *names: str) -> None:
        """Remove files of the run; those that do not exist are no error."""
        for name in names:
            with writing(self.folder / name):
                (self.folder / name).unlink(missing_ok=True)

    def read(self, name: str, kind: Any = dict, *, reader: Callable[[Path], Any] | None = None) -> Any | None:
        """The content of a JSON file of the run as `kind`, or as its own `reader` returns it; None if it was not
        written yet."""
        path = self.folder / name
        if not os.path.lexists(path):
            return None
        return reader(path) if reader else read_file(path, kind, what="is damaged", fix="start a new run")

    def note_learning(self, seed: int, evidence: QualityEvidence) -> None:
        """Write what the training with a seed showed, beside that of others."""
        saved = self.read(LEARNING, SavedLearning) or SavedLearning()
        self.write(LEARNING, as_json(SavedLearning(seeds={**saved.seeds, str(seed): evidence})))

    def ever_saved(self, seed: int) -> bool:
        """Whether a seed had a checkpoint. Where progress.json does not say, one that logged steps may have had one."""
        progress: Progress | None = self.read("progress.json", Progress)
        if progress and progress.saved is not None:
            return seed in progress.saved
        return any(isinstance(event, Step) and event.seed == seed for event in self.events())

    def note_saved(self, seed: int) -> None:
        """Remember outside the checkpoints that a seed has one."""
        progress: Progress | None = self.read("progress.json", Progress)
        saved = (progress and progress.saved) or ()
        if seed not in saved:
            self.note_progress(saved=(*saved, seed))

    def note_job(self, job: str) -> None:
        """Record which torchrun job works on the run, if one does."""
        if job:
            write_atomic(self.folder / JOB, job.encode())

    def note_progress(self, **fields: Any) -> None:
        """Change fields of progress.json."""
        progress: Progress = self.read("progress.json", Progress) or Progress(started=now(), resumes=0)
        self.write("progress.json", replace(progress, **fields))

    def note_waited(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of phases to those of earlier processes; nothing before the start and once the run is
        sealed."""
        progress: Progress | None = None
        with contextlib.suppress(RecperfError):
            progress = None if self.finished else self.read("progress.json", Progress)
        if progress is not None:
            names = {**progress.waited, **seconds}
            self.note_progress(waited={name: progress.waited.get(name, 0.0) + seconds.get(name, 0.0) for name in names})

    @property
    def finished(self) -> bool:
        """Whether the run is finished: sealing is the last thing that a run does."""
        return os.path.lexists(self.folder / "seal.json")

    @property
    def began(self) -> bool:
        """Whether any training has started."""
        return self.event_bytes > 0 or (self.folder / "checkpoints").exists()

    def discard(self, *also: str) -> None:
        """Remove the files of a run that could not start, and those in `also`; a folder that existed before stays."""
        for name in (*OWN_FILES, *also):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / START_FOLDER, ignore_errors=True)
        if self._made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def close(self) -> None:
        os.close(self._events)
        os.close(self._lock)


def hold(folder: Path, *, busy: str = "wait for it, or choose another --run-dir", refused: str | None = None) -> int:
    """Take the lock of a run folder, which the process has until it closes the handle.

    `busy` and `refused` say what to do if another process has it, or if the folder cannot be written.
    """
    with writing(folder / ".lock", fix=refused):
        handle = open_regular(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise Busy("another process is using this run folder", where={"folder": folder}, fix=busy) from None
    return handle


def _is_save(line: bytes, step: int | None) -> bool:
    """Whether a line of the log says how long saving the checkpoint of a step took; a damaged one does not."""
    try:
        event = event_of(jsonfile.decode(line))
    except ValueError:
        return False
    return isinstance(event, Timing) and (event.part, event.step) == ("save", step)


def read_config(path: Path) -> tuple[str, ConfigValues]:
    """The workload's name and the config values of a saved config; a folder stands for its config.json."""
    named = not path.is_dir()
    if not named:
        path = path / "config.json"
    if not os.path.lexists(path):
        raise DataError("no config there", where={"file": path}, fix="recperf show micro-dlrm --json > config.json")
    saved = read_saved_config(path, named=named)
    return saved.workload, saved.config


def read_saved_config(path: Path, *, named: bool = False) -> SavedConfig:
    return read_file(path, SavedConfig, CONFIG_SCHEMA, what="is not a config that recperf saved", named=named)


def checkout(besides: str = "") -> dict[str, str | bool | None]:
    """Commit of the checkout and whether it has uncommitted changes, in other places than one; None if recperf does not
    run from its checkout."""
    source = Path(__file__).resolve().parents[3]
    unknown: dict[str, str | bool | None] = {"commit": None, "dirty": None}
    if not (source / ".git").exists() or not (source / "src" / "recperf").is_dir():
        return unknown
    commit = _git(source, "rev-parse", "HEAD")
    if commit is None:
        return unknown
    places = [".", f":(exclude){besides}"] if besides else ["."]
    status = _git(source, "status", "--porcelain", "--", *places)
    return {"commit": commit, "dirty": status is None or bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def packages() -> dict[str, str]:
    """Installed versions of the packages that a result may depend on."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def runs_on(dataset: str, folder: Path) -> list[str]:
    """The runs of a folder, also those of benches in it, that were trained on a dataset of this name."""
    found = []
    for path in sorted((*folder.glob("*/data.json"), *folder.glob("*/*/data.json"))):
        with contextlib.suppress(DataError, MachineError):
            if jsonfile.read(path).get("name") == dataset:
                found.append(str(path.parent))
    return found
