"""Where recperf keeps things: the only settings that environment variables may make."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The user's cache folder for datasets and machine ceilings: $RECPERF_HOME, else the platform's cache folder."""
    chosen = os.environ.get("RECPERF_HOME")
    return Path(chosen).expanduser() if chosen else user_home()


def user_home() -> Path:
    """The platform's cache folder of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "recperf"


def dataset_folder(name: str) -> Path:
    """Where `recperf data get NAME` puts a dataset."""
    return home() / "data" / name
