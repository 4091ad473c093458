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
SideRole = Literal["item", "user"]
"""Of whom a table beside the events says something."""
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
    context: str | None = None
    """Further columns of an event that are known before its outcome, such as the channel or the price, separated by
    commas: dlrm and micro-dlrm read them."""
    items: Path | None = None
    """A file of items with their ids, titles and columns like genres, brand or price; it may be Latin-1 text. Without
    one, columns of the events that do not change within an item belong to it."""
    items_id: str | None = None
    """Its column of item ids: by default that with the name it has in the events, or a usual one, else column 1, and
    column 2 the title."""
    items_title: str | None = None
    """The column of titles."""
    users: Path | None = None
    """A file of users with their ids and columns like age or country, which dlrm and micro-dlrm read."""
    users_id: str | None = None
    """Its column of user ids: by default that with the name it has in the events, or a usual one, else column 1."""
    seed: int = 7
    """Seed of drawn negatives and of the random order."""
    licence: str = "that of the source"
    """Terms under which the data may be used, which data info shows."""

    def __post_init__(self) -> None:
        self.check(self.events, least_mib=64)
        if self.signal and self.negatives is not None:
            what = f"negatives are drawn for a log without {self.signal}"
            raise UsageError(what, fix=f"leave out --{self.signal} or --negatives")
        within(0, 4 if self.negatives is None else self.negatives, 1000, "negatives")
        within(0, self.seed, 1 << 53, "seed")
        roles: dict[str, str] = {}
        contexts = (("context", column) for column in self.context_columns.values())
        for role, column in (*self.columns.items(), *contexts):
            require(bool(column), role, column, "a column's name or number")
            if column in roles:
                what = f"column {column!r} is given as {roles[column]} and as {role}"
                raise UsageError(what, fix="give each column once")
            roles[column] = role
        others = [role for column, role in roles.items() if role != column or role not in ("user", "item")]
        others += ["delimiter"] * bool(self.delimiter)
        if self.sequences and others:
            raise UsageError(f"a file of sequences has no {others[0]}", fix=f"leave --{others[0]} out")
        if self.items is None and self.items_id:
            raise UsageError("--items-id is a column of a file of items", fix="--items FILE")
        if self.users is None and self.users_id:
            raise UsageError("--users-id is a column of a file of users", fix="--users FILE")

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
        roles = ("user", "item", "time", *SIGNALS)
        given = {role: getattr(self, role) for role in roles if getattr(self, role) is not None}
        return {role: column for role, column in given.items() if (role, column) != ("time", NO_TIME)}

    @property
    def context_columns(self) -> dict[str, str]:
        """The further columns of an event by their role: x0, x1 and so on."""
        names = [name.strip() for name in (self.context or "").split(",")]
        return {f"x{at}": name for at, name in enumerate(filter(None, names))}

    @property
    def side_files(self) -> dict[SideRole, Path | None]:
        return {"item": self.items, "user": self.users}

    @property
    def recognised(self) -> dict[str, tuple[str, ...]]:
        """Usual names of the columns of roles that are not given."""
        optional = () if self.signal is not None or self.negatives is not None else ("rating", "label")
        if self.sequences:
            return {}
        roles = ("user", "item", "time", *optional)
        return {role: COLUMNS[role] for role in roles if getattr(self, role) is None}

    def with_columns(self, columns: dict[str, str]) -> ImportOptions:
        """The options with recognised columns; of rating and label the first."""
        extra = {role: name for role, name in columns.items() if role not in self.columns}
        if "rating" in extra:
            extra.pop("label", None)
        time = None if self.time == NO_TIME else self.time
        return replace(self, **{"time": time, **extra})  # type: ignore[arg-type]
