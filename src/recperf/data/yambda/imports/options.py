"""Options of `recperf data import`. Imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ....config import require, within
from ....errors import UsageError

TimeUnit = Literal["s", "ms", "us", "iso"]
Signal = Literal["rating", "ratio", "label"]
SIGNALS: Final[tuple[Signal, ...]] = ("rating", "ratio", "label")
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_RESERVED: Final = ("yambda-", "movielens-100k", "movielens-like", "criteo")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    events: Path
    """The file: CSV or another delimited text, JSON lines (either may be in gzip), or Parquet. Its content decides the
    format. Text is UTF-8."""
    user: str = "user"
    """Column of the user's id. A column is given by its name or, counted from 1, its number."""
    item: str = "item"
    """Column of the item's id."""
    time: str = "time"
    """Column of the time."""
    rating: str | None = None
    """Column of a rating. Give exactly one of rating, ratio and label."""
    ratio: str | None = None
    """Column of the share that was played, in percent; 50 and more counts as listened."""
    label: str | None = None
    """Column of 0 or 1, false or true: whether the item was liked, bought, listened to."""
    positive_from: float = 4.0
    """The least rating that counts as listened."""
    artist: str | None = None
    """Column of the item's artist, or any group it belongs to; empty where unknown."""
    album: str | None = None
    """Column of the item's album, or any finer group; empty where unknown."""
    type: str | None = None
    """Column of the event's type: listen, like, dislike, unlike or undislike. Without it all are listens; only listens
    need a rating, ratio or label."""
    time_unit: TimeUnit = "s"
    """Unit of times: seconds, milliseconds, microseconds, or ISO text like 2024-05-01T12:00:00 (UTC if it has no zone).
    A Parquet column of type timestamp or date has its own unit. Fractions of a second are cut."""
    delimiter: str | None = None
    """Delimiter between columns, one character or the same twice; by default the most common one in the first line."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto: not if all columns are given by number."""
    ids: Literal["dense", "keep"] = "dense"
    """dense: ids are numbered 1, 2 and so on in ascending order, and the store lists the original ids; keep: ids stay,
    and must be integers from 0 to 2,147,483,647. An id that is empty, or text like nan, NULL or NA, is missing."""
    name: str = "imported"
    """Name of the dataset."""
    memory_mib: int = 1024
    """Memory limit in MiB, at least 64; the interpreter and its libraries come on top."""

    def __post_init__(self) -> None:
        signals = [signal for signal in SIGNALS if getattr(self, signal) is not None]
        if len(signals) != 1:
            shown = f"{' and '.join(signals)} are given" if signals else "none of rating, ratio and label is given"
            raise UsageError(f"{shown}; an import needs exactly one", fix="--rating COLUMN, or --ratio, or --label")
        roles: dict[str, str] = {}
        for role, column in self.columns.items():
            require(bool(column), role, column, "a column's name or number")
            if column in roles:
                what = f"column {column!r} is given as {roles[column]} and as {role}"
                raise UsageError(what, fix="give each column once")
            roles[column] = role
        require(self.positive_from - self.positive_from == 0, "positive_from", self.positive_from, "a number")
        marks = self.delimiter
        is_valid = marks is None or (len(marks) in (1, 2) and len(set(marks)) == 1 and marks[0] not in '"\r\n')
        require(is_valid, "delimiter", marks, "one character, or the same twice")
        within(64, self.memory_mib, 1 << 30, "memory_mib")
        is_free = re.fullmatch(_NAME, self.name) is not None and not self.name.startswith(_RESERVED)
        require(is_free, "name", self.name, "letters, digits, dots and dashes, and not the name of another dataset")

    @property
    def memory(self) -> int:
        """The memory limit in bytes."""
        return self.memory_mib << 20

    @property
    def signal(self) -> Signal:
        return next(signal for signal in SIGNALS if getattr(self, signal) is not None)

    @property
    def columns(self) -> dict[str, str]:
        """The column of each role that has one."""
        roles = ("user", "item", "time", *SIGNALS, "artist", "album", "type")
        return {role: getattr(self, role) for role in roles if getattr(self, role) is not None}
