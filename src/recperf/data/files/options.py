"""Options that every import of a user's file has. Imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...config import require, within
from ...errors import UsageError
from ..datasets import legal_name, require_name

NO_TIME = "none"
"""As the column of the time: none, even if one looks like it."""
TimeUnit = Literal["auto", "s", "ms", "us", "ns", "iso"]


def repeated_rows(count: int, rows: int, roles: Sequence[str]) -> list[str]:
    """What an import says of rows that have the same values in the columns of these roles as an earlier one."""
    verb = " repeats" if count == 1 else "s repeat"
    same = f"{', '.join(roles[:-1])} and {roles[-1]}"
    return [f"{count:,} row{verb} the {same} of another ({count / rows:.1%}); all are kept"] if count else []


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    user: str | None = None
    """Column of the user, by its name or, counted from 1, its number. Columns of user, item, time, rating or label that
    no option names are recognised by usual names like userId or timestamp, a time also by its values."""
    item: str | None = None
    """Column of the item."""
    time: str | None = None
    """Column of the time: a number, ISO text or a timestamp; none: no column is the time."""
    time_unit: TimeUnit = "auto"
    """Unit of times: seconds, milliseconds, microseconds, nanoseconds, or ISO text like 2024-05-01T12:00:00 (UTC if it
    has no zone); auto decides by the largest time. A Parquet column of type timestamp or date has its own unit."""
    label: str | None = None
    """Column of 0 or 1, false or true: whether the row is positive, that is clicked, liked, bought or listened to. Or
    of any other values, see `positives`."""
    positives: tuple[str, ...] = ()
    """Values of the label that are positive, as in --positives buy cart; all others are negative."""
    rating: str | None = None
    """Column of a rating, or any other number that is larger for positive rows, in place of a label."""
    positive_from: float | None = None
    """The least rating that is positive; default: 0.8 times the largest rating, 4 of 5."""
    delimiter: str | None = None
    """Delimiter between columns, one character or the same twice; by default the most common one in the first line."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto: for events unless all columns are named by number, for clicks
    unless it has only numbers."""
    skip_bad: int = 0
    """Leave out and list up to this many rows that cannot be read: with a missing or malformed value, another number of
    columns, or text that is not UTF-8. One more is an error."""
    min_count: int = 5
    """Least number of training rows with a user, item or category for it to get a table row of its own in dlrm and
    micro-dlrm; rarer ones share a row, and so do those seen first after training."""
    name: str = ""
    """Name of the dataset; default: that of the file, without its ending."""
    memory_mib: int = 1024
    """Memory limit in MiB, at least 64 for events and 256 for clicks; the interpreter and its libraries come on top."""

    def check(self, path: Path, *, least_mib: int) -> None:
        """Refuse what no import can do, and name the dataset after its file."""
        if self.label is not None and self.rating is not None:
            raise UsageError("rating and label are given; an import has one of them", fix="leave one out")
        require(not (self.positives and self.rating), "positives", self.positives, "none with --rating")
        threshold = self.positive_from or 0.0
        require(threshold - threshold == 0, "positive_from", self.positive_from, "a number")
        marks = self.delimiter
        is_valid = marks is None or (len(marks) in (1, 2) and len(set(marks)) == 1 and marks[0] not in '"\r\n')
        require(is_valid, "delimiter", marks, "one character, or the same twice")
        within(0, self.skip_bad, 1_000_000, "skip_bad")
        within(1, self.min_count, 1 << 31, "min_count")
        within(least_mib, self.memory_mib, 1 << 30, "memory_mib")
        if not self.name:
            object.__setattr__(self, "name", legal_name(path.name.split(".")[0]))
        require_name(self.name)
