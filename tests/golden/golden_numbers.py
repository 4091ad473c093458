"""Where the golden numbers are: those of the repository, unpacked once, and those of the folder RECPERF_GOLDEN."""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from pathlib import Path

ARCHIVE = Path(__file__).with_name("numbers.tar.xz")


def unpacked() -> Path:
    """The folder of the repository's numbers, named after their digest; every worker of pytest-xdist asks for it."""
    digest = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"recperf-golden-{os.getuid()}-{digest}")
    if not folder.exists():
        draft = Path(tempfile.mkdtemp(dir=folder.parent))
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(draft, filter="data")
        try:
            draft.rename(folder)
        except OSError:
            # Another worker was first; this copy is as good, and goes with the other temporary files.
            return draft
    return folder


REPOSITORY = unpacked()


def golden(pattern: str) -> list[Path]:
    """Every path of this pattern among the golden numbers, the repository's first."""
    more = os.environ.get("RECPERF_GOLDEN")
    return [path for folder in (REPOSITORY, *([Path(more)] if more else [])) for path in sorted(folder.glob(pattern))]
