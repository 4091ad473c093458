"""A user's file after inspection, and the errors that are about it."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import DataError

LONGEST_LINE = (1 << 20) - 4
"""Most characters of a row: without a bound, one line of a small gzip file could take any memory."""
BOM = b"\xef\xbb\xbf"
READ_ERRORS = (OSError, EOFError, zlib.error)
"""What reading a damaged file raises, gzip among them."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A user's file after inspection."""

    path: Path
    size: int
    state: tuple[int, int, int]
    """Inode, size and time of the last change when it was inspected."""
    format: str = "csv"
    """The name of one in `formats.py`."""
    names: list[str] = field(default_factory=list)
    """Names of the columns; empty strings where a file has no header."""
    columns: dict[str, int] = field(default_factory=dict)
    """Position of the column that serves each role."""
    gzipped: bool = False
    delimited: bool = False
    """Whether rows are fields with a delimiter between them, which may be in quotes."""
    delimiter: str = ","
    has_header: bool = False
    time_by_values: bool = False
    """Whether the column of the time was recognised by its values, not by its name."""

    def require_unchanged(self) -> None:
        """Refuse a file that changed since it was inspected: what was imported must be what was hashed."""
        if self.has_changed():
            what = "the file changed while it was imported"
            raise bad_file(self.path, what, "import it when it is complete, or import a copy")

    def has_changed(self) -> bool:
        """Whether the file was written to, replaced or removed since it was inspected."""
        try:
            return self.state != state_of(self.path.stat())
        except OSError:
            return True


def state_of(facts: os.stat_result) -> tuple[int, int, int]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def bad_file(path: Path, what: str, fix: str) -> DataError:
    return DataError(what, where={"file": path}, fix=fix)


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for a file that is damaged or cut short."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return bad_file(path, f"the file is damaged or cut short: {lines[0].rstrip('.')}", "fetch or write it again")
