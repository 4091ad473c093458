"""Where recperf keeps things: the only settings that environment variables may make."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import MachineError


def home() -> Path:
    """The user's cache folder for datasets and machine ceilings: $RECPERF_HOME, else the platform's cache folder."""
    chosen = os.environ.get("RECPERF_HOME")
    if not chosen:
        return user_home()
    try:
        folder = Path(chosen).expanduser()
        problem = None if stat.S_ISDIR(folder.stat().st_mode) else "it is a file, not a folder"
    except FileNotFoundError:
        return folder
    except (OSError, RuntimeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    if problem:
        raise MachineError(
            f"RECPERF_HOME cannot be used: {problem}",
            where={"RECPERF_HOME": chosen},
            fix="set RECPERF_HOME to a folder you may write, or unset it",
        )
    return folder


def user_home() -> Path:
    """The platform's cache folder of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "recperf"


def dataset_folder(name: str) -> Path:
    """Where `recperf data get NAME` puts a dataset."""
    return home() / "data" / name
