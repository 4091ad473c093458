"""Rows of a user's file that cannot be read: an import leaves out as many as `--skip-bad` allows."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

from ...errors import DataError

_LISTED = 20
"""Rows that a description of the import lists."""


class BadRows:
    """Collects bad rows of a file; one more than `allowed` is an error. None: the command has no such option."""

    def __init__(self, path: Path, allowed: int | None = None) -> None:
        self.path, self.allowed = path, allowed
        self._rows: list[tuple[int, str]] = []
        self._not_loaded: list[int] = []

    @property
    def room(self) -> int:
        """How many more bad rows are allowed."""
        return (self.allowed or 0) - len(self._rows)

    def add(self, row: int, what: str, fix: str) -> None:
        """Leave out a row of the file, counted from 1, while it is read; `what` follows its number in a message."""
        self._record(row, what, fix)
        self._not_loaded.append(row)

    def add_loaded(self, place: int, what: str, fix: str) -> None:
        """Leave out a row that was loaded; `place` counts those that were from 0."""
        rows = self._not_loaded
        before = bisect_right(range(len(rows)), place, key=lambda index: rows[index] - index - 1)
        self._record(place + 1 + before, what, fix)

    def _record(self, row: int, what: str, fix: str) -> None:
        if self.room <= 0:
            hint = "" if self.allowed is None else "; --skip-bad N leaves out up to N bad rows"
            raise DataError(f"row {row:,}{what}", where={"file": self.path}, fix=fix + hint)
        self._rows.append((row, what))

    @property
    def facts(self) -> dict[str, Any]:
        """The number of rows left out and the first of them, for the description of an import; {} if there are none."""
        first = [f"row {row:,}{what}" for row, what in sorted(self._rows)[:_LISTED]]
        return {"skipped_rows": {"count": len(self._rows), "first": first}} if first else {}
