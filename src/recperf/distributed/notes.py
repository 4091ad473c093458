"""What each rank is doing, where its launcher can read it after the rank is gone: a few bytes of a mapped file.

RECPERF_RANKS names the folder; the launcher makes it. Without it nothing is noted.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

VARIABLE = "RECPERF_RANKS"
SIZE = 200

_page: mmap.mmap | None = None


def folder() -> Path | None:
    """Where the ranks of this run leave word; none where nobody reads it."""
    found = os.environ.get(VARIABLE)
    return Path(found) if found else None


def begin(rank: int) -> None:
    global _page
    place = folder()
    if place is not None:
        path = place / f"rank-{rank}.note"
        path.write_bytes(b"starting".ljust(SIZE))
        with path.open("r+b") as file:
            _page = mmap.mmap(file.fileno(), SIZE)


def note(text: str) -> None:
    """Costs a copy of some bytes; the system keeps them when the process dies."""
    if _page is not None:
        _page[:] = text.encode()[:SIZE].ljust(SIZE)


def noted(place: Path, rank: int) -> str | None:
    """What a rank was doing last."""
    try:
        return (place / f"rank-{rank}.note").read_bytes().decode(errors="replace").strip() or None
    except OSError:
        return None


def leave_word(rank: int, **facts: Any) -> None:
    """How a rank ended."""
    place = folder()
    if place is not None:
        draft = place / f"rank-{rank}.tmp"
        draft.write_text(json.dumps(facts))
        draft.replace(place / f"rank-{rank}.json")


def word(place: Path, rank: int) -> dict[str, Any] | None:
    try:
        found = json.loads((place / f"rank-{rank}.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
