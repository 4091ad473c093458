"""The job that this rank belongs to: torchrun's, or that of `recperf run --ranks`, which uses the same agent.

The agent names an error file for each rank, <job>/attempt_<n>/<local rank>/error.json, in TORCHELASTIC_ERROR_FILE. A
rank records there how it ended, in torch's format, so that torchrun prints it. Beside the attempts lies the path of the
run, so that ranks that are restarted resume it. Ranks that were started by hand have no such folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..jsonfile import load

LAUNCHER = "recperf-ranks-"
"""Prefix of the job ids of `recperf run --ranks`, whose launcher reports how ranks ended."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a rank ended."""

    code: int
    lost: bool = False
    """Whether it only lost another rank, which closed its connection or did not answer in time."""
    collective: str = ""
    """Where it waited for that rank."""
    waited_s: float = 0.0
    """How long it waited there; 0 where the connection was closed."""
    out_of_memory: bool = False
    message: str = ""
    time: float = field(default_factory=time.time)


def job() -> str:
    """torchrun's id of its job, the same on all hosts; empty where torchrun did not start this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def launched() -> bool:
    """Whether `recperf run --ranks` started this rank, and reports how it ended."""
    return job().startswith(LAUNCHER)


def restarted() -> bool:
    """Whether torchrun has restarted the ranks of this host; an agent counts only failures of its own ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def same_job(other: str) -> bool:
    """Whether a recorded job id means this job. torchrun calls every job without --rdzv-id "none"."""
    return bool(other) and other == job() and (other != "none" or restarted())


def _error_file() -> Path | None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(path) if path else None


def meeting() -> str:
    """Where ranks meet: in a file that only this user can read, if `recperf run --ranks` started them, else in
    torchrun's store."""
    path = _error_file()
    return f"file://{path.parents[1] / 'store'}" if launched() and path else "env://"


def record_exit(end: Exit) -> None:
    """Write how this rank ends to its error file."""
    path = _error_file()
    if path is not None:
        details = {"message": end.message, "extraInfo": {"timestamp": str(int(end.time)), "recperf": asdict(end)}}
        with contextlib.suppress(OSError):
            _replace(path, json.dumps({"message": details}))


def read_exit(path: Path) -> Exit | None:
    """How the rank of an error file ended; None where it could not say."""
    try:
        return Exit(**load(path)["message"]["extraInfo"]["recperf"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def remember_run(run: Path) -> None:
    """Record on this host which run the job is at."""
    path = _error_file()
    if path is not None:
        with contextlib.suppress(OSError):
            _replace(path.parents[2] / "run", str(run.resolve()))


def remembered_run() -> Path | None:
    """The run that the ranks of this job on this host were at before they were restarted."""
    path = _error_file()
    try:
        return Path((path.parents[2] / "run").read_text()) if path else None
    except (OSError, ValueError):
        return None


def _replace(path: Path, text: str) -> None:
    # Several ranks of a host may write the same file.
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(text)
    draft.replace(path)
