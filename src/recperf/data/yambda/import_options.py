"""Options of `recperf data import`. Imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from ...config import require, within
from ...errors import UsageError
from ..datasets import legal_name, require_name
from ..user_files.values import COLUMNS

TimeUnit = Literal["auto", "s", "ms", "us", "ns", "iso"]
Signal = Literal["rating", "label"]
SIGNALS: Final[tuple[Signal, ...]] = ("rating", "label")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    events: Path
    """The file, which may also come right after import: CSV or another delimited text, JSON lines (either may be in
    gzip), or Parquet. Its content decides the format. Text is UTF-8."""
    user: str | None = None
    """Column of the user's id. A column is given by its name or, counted from 1, its number. Columns of user, item,
    time, rating or label, and genres that are not given are recognised by usual names like userId or timestamp."""
    item: str | None = None
    """Column of the item's id. Ids are numbered 1, 2 and so on in ascending order, and the store lists the originals.
    An id that is empty, or text like nan, NULL or NA, is missing."""
    time: str | None = None
    """Column of the time. Without one, `order` says how events follow each other."""
    rating: str | None = None
    """Column of a rating, or any other number that is larger for positive rows. Give one of rating and label, or none:
    then every row is positive and negatives are drawn."""
    label: str | None = None
    """Column of 0 or 1, false or true: whether the item was liked, bought, listened to. Or of any other values, see
    `positives`."""
    positive_from: float | None = None
    """The least rating that counts as positive; default: 0.8 times the largest rating, 4 of 5."""
    positives: tuple[str, ...] = ()
    """Values of the label that count as positive, such as buy; all others are negative."""
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
    time_unit: TimeUnit = "auto"
    """Unit of times: seconds, milliseconds, microseconds, nanoseconds, or ISO text like 2024-05-01T12:00:00 (UTC if it
    has no zone); auto decides by the largest time. A Parquet column of type timestamp or date has its own unit.
    Fractions of a second are cut."""
    delimiter: str | None = None
    """Delimiter between columns, one character or the same twice; by default the most common one in the first line."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto: not if all columns are given by number."""
    skip_bad: int = 0
    """Leave out and list up to so many rows that cannot be read: with a missing or malformed value, another number of
    columns, or text that is not UTF-8. One more is an error."""
    name: str = ""
    """Name of the dataset; default: that of the file, without its ending."""
    memory_mib: int = 1024
    """Memory limit in MiB, at least 64; the interpreter and its libraries come on top."""

    def __post_init__(self) -> None:
        signals = [signal for signal in SIGNALS if getattr(self, signal) is not None]
        if len(signals) > 1:
            raise UsageError(f"{' and '.join(signals)} are given; an import has one of them", fix="leave one out")
        if signals and self.negatives is not None:
            what = f"negatives are drawn for a log without {signals[0]}"
            raise UsageError(what, fix=f"leave out --{signals[0]} or --negatives")
        within(0, 4 if self.negatives is None else self.negatives, 1000, "negatives")
        within(0, self.seed, 1 << 53, "seed")
        within(0, self.skip_bad, 1_000_000, "skip_bad")
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
        threshold = self.positive_from or 0.0
        require(threshold - threshold == 0, "positive_from", self.positive_from, "a number")
        marks = self.delimiter
        is_valid = marks is None or (len(marks) in (1, 2) and len(set(marks)) == 1 and marks[0] not in '"\r\n')
        require(is_valid, "delimiter", marks, "one character, or the same twice")
        within(64, self.memory_mib, 1 << 30, "memory_mib")
        if not self.name:
            object.__setattr__(self, "name", legal_name(self.events.name.split(".")[0]))
        require_name(self.name)

    @property
    def memory(self) -> int:
        """The memory limit in bytes."""
        return self.memory_mib << 20

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
        return {role: getattr(self, role) for role in roles if getattr(self, role) is not None}

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
        return replace(self, **extra)  # type: ignore[arg-type]
