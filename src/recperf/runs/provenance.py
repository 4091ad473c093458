"""Where a result comes from: the commit of the code and the installed packages."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("recperf", "torch", "numpy", "triton", "tyro", "rich", "pooch")


def checkout(besides: str = "") -> dict[str, Any]:
    """Commit of the checkout and whether it has uncommitted changes, in other places than one; None if recperf does not
    run from its checkout."""
    source = Path(__file__).resolve().parents[3]
    unknown = {"commit": None, "dirty": None}
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
