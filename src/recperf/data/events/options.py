"""Options of `recperf data import`. Imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from ...config import require, within
from ...errors import UsageError
from ..files.options import NO_TIME, FileOptions
from ..files.values import COLUMNS

Signal = Literal["rating", "label"]
SIGNALS: Final[tuple[Signal, ...]] = ("rating", "label")


@dataclass(frozen=True, kw_only=True)
class ImportOptions(FileOptions):
    events: Path
    """The file, which may also come right after import: CSV or another delimited text, JSON lines (either may be in
    gzip), or Parquet. Its content decides the format. Text is UTF-8."""
    negatives: int | None = None
    """Without rating and label: negative items to draw for every row, none of them one that the user has
    had by then; default: 4."""
    negatives_by: Literal["uniform", "popularity"] = "uniform"
    """Draw every item equally often, or as often as it is in the file."""
    order: Literal["random", "rows"] = "random"
    """Without a time: put events in random order, so that a random part of them is held out, or in the order of the
    file."""
    sequences: bool = False
    """Each line is a user and items in the order of time, separated by whitespace or commas; further lines of a user
    continue the sequence. Only that order is known: the last items of all users are held out."""
    items: Path | None = None
    """A file of items with their ids, titles and features like genres or brand; it may be Latin-1 text."""
    items_id: str | None = None
    """Its column of item ids. Without a usual name for it in the first line, column 1 is the id and 2 the title."""
    items_title: str | None = None
    """Its column of titles."""
    seed: int = 7
    """Seed of drawn negatives and of the random order."""
    genres: str | None = None
    """Column with any number of values per item, like genres: a list, or text separated by |, ; or commas. The first
    value becomes the item's artist and the set of all its album, which models read, unless those columns are given."""
    artist: str | None = None
    """Column of the item's artist, or any group it belongs to; empty where unknown."""
    album: str | None = None
    """Column of the item's album, or any finer group; empty where unknown."""

    def __post_init__(self) -> None:
        self.check(self.events, least_mib=64)
        if self.signal and self.negatives is not None:
            what = f"negatives are drawn for a log without {self.signal}"
            raise UsageError(what, fix=f"leave out --{self.signal} or --negatives")
        within(0, 4 if self.negatives is None else self.negatives, 1000, "negatives")
        within(0, self.seed, 1 << 53, "seed")
        roles: dict[str, str] = {}
        for role, column in self.columns.items():
            require(bool(column), role, column, "a column's name or number")
            if column in roles:
                what = f"column {column!r} is given as {roles[column]} and as {role}"
                raise UsageError(what, fix="give each column once")
            roles[column] = role
        others = [role for column, role in roles.items() if role != column or role not in ("user", "item")]
        others += ["delimiter"] * bool(self.delimiter)
        if self.sequences and others:
            raise UsageError(f"a file of sequences has no {others[0]}", fix=f"leave --{others[0]} out")
        if self.items is None and (self.items_id or self.items_title):
            raise UsageError("--items-id and --items-title are columns of a file of items", fix="--items FILE")

    @property
    def signal(self) -> Signal | None:
        """The option whose column tells positive from negative rows; None if all rows are positive."""
        return next((signal for signal in SIGNALS if getattr(self, signal) is not None), None)

    @property
    def drawn(self) -> int:
        """Negatives to draw for every positive row."""
        return 0 if self.signal is not None else 4 if self.negatives is None else self.negatives

    @property
    def columns(self) -> dict[str, str]:
        """The column of each role that has one."""
        roles = ("user", "item", "time", *SIGNALS, "artist", "album", "genres")
        given = {role: getattr(self, role) for role in roles if getattr(self, role) is not None}
        return {role: column for role, column in given.items() if (role, column) != ("time", NO_TIME)}

    @property
    def recognised(self) -> dict[str, tuple[str, ...]]:
        """Usual names of the columns of roles that are not given."""
        optional = () if self.signal is not None or self.negatives is not None else ("rating", "label")
        if self.sequences:
            return {}
        roles = ("user", "item", "time", *optional, *(() if self.album else ("genres",)))
        return {role: COLUMNS[role] for role in roles if getattr(self, role) is None}

    def with_columns(self, columns: dict[str, str]) -> ImportOptions:
        """The options with recognised columns; of rating and label the first."""
        extra = {role: name for role, name in columns.items() if role not in self.columns}
        if "rating" in extra:
            extra.pop("label", None)
        time = None if self.time == NO_TIME else self.time
        return replace(self, **{"time": time, **extra})  # type: ignore[arg-type]
