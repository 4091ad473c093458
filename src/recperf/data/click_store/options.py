"""Options of `recperf data import --clicks`. Imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ...config import require, within
from ...errors import UsageError
from ..datasets import legal_name, require_name

MOST_FEATURES: Final = 500
"""Most columns that become features: a table of each, and several passes over it at the import."""
MOST_SLOTS: Final = 16
"""Most values of a multi-valued column that a row has; further ones are left out."""
Scale = Literal["log", "quantile"]


@dataclass(frozen=True, kw_only=True)
class ClickOptions:
    clicks: Path
    """The file, which may also come right after import: CSV or another delimited text, JSON lines (either may be in
    gzip), or Parquet. Its content decides the format. Text is UTF-8."""
    label: str | None = None
    """Column of 0 or 1, false or true: whether the row was clicked. A column is given by its name or, counted from 1,
    its number. Default: a column named label, click, clicked or target."""
    positives: tuple[str, ...] = ()
    """Values of the label that are clicks, if it has others than 0 and 1, as in --positives buy cart."""
    rating: str | None = None
    """Column of a number in place of a label: a rating, of which the high ones count as clicks."""
    positive_from: float | None = None
    """The least rating that counts as a click; default: 0.8 times the largest rating, 4 of 5."""
    categorical: str | None = None
    """Columns with categories, separated by commas. If neither these nor numeric ones are given, types decide: text
    and integers with few values are categorical, other numbers are numeric."""
    numeric: str | None = None
    """Columns with numbers, separated by commas."""
    multi: str | None = None
    """Columns with several categories in a row, separated by commas: lists, or text like Action|Comedy."""
    separator: str | None = None
    """What separates the categories of a multi-valued column; default: |, in RecBole's files a space."""
    time: str | None = None
    """Column of the time, for splits by time: a number, ISO text or a timestamp."""
    user: str | None = None
    """Column of the user: a category by which rows can be split and rankings are evaluated."""
    item: str | None = None
    """Column of the item: the category that is ranked for a user."""
    min_count: int = 5
    """Least number of training rows with a category for it to get a table row of its own; rarer ones share a row, and
    so do those seen first after training."""
    hash: tuple[int, ...] = ()
    """Hash categories to tables of this many rows instead of listing them: one number for all columns, or one for each
    that is not numeric, in the order of the file."""
    scale: Scale = "log"
    """How numbers become features: log is sign(x) log(1 + |x|) with mean 0 and deviation 1, quantile the share of
    training rows below it. A missing number becomes the mean, with a column of its own that says so."""
    delimiter: str | None = None
    """Delimiter between columns, one character or the same twice; by default the most common one in the first line."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto: not if it has only numbers."""
    skip_bad: int = 0
    """Leave out and list up to so many rows that cannot be read: with a missing or malformed label, time or number,
    another number of columns, or text that is not UTF-8. One more is an error."""
    name: str = ""
    """Name of the dataset; default: that of the file, without its ending."""
    memory_mib: int = 1024
    """Memory limit in MiB, at least 256, with the interpreter and its libraries."""

    def __post_init__(self) -> None:
        if self.label is not None and self.rating is not None:
            raise UsageError("label and rating are given; an import needs one of them", fix="--label COLUMN")
        roles: dict[str, str] = {}
        for role in ("label", "rating", "categorical", "numeric", "multi", "time"):
            for column in self.listed(role):
                require(bool(column), role, column, "a column's name or number")
                if column in roles:
                    what = f"column {column!r} is given as {roles[column]} and as {role}"
                    fix = "a label must not be a feature" if roles[column] in ("label", "rating") else None
                    raise UsageError(what, fix=fix or "give each column once")
                roles[column] = role
        for role in ("user", "item"):
            column = getattr(self, role)
            if roles.get(column, "categorical") != "categorical" or (role == "item" and column and column == self.user):
                raise UsageError(f"column {column!r} is given as {role} and as {roles.get(column, 'user')}")
        require(
            not (self.positives and self.rating), "positives", self.positives, "none with --rating; --label takes it"
        )
        within(1, self.min_count, 1 << 31, "min_count")
        within(0, self.skip_bad, 1_000_000, "skip_bad")
        for rows in self.hash:
            within(4, rows, (1 << 31) - 1, "hash")
        if self.positive_from is not None:
            require(self.positive_from - self.positive_from == 0, "positive_from", self.positive_from, "a number")
            require(self.label is None, "positive_from", self.positive_from, "none with --label; --rating takes it")
        fits = self.separator is None or 0 < len(self.separator) <= 8
        require(fits, "separator", self.separator, "1 to 8 characters")
        within(256, self.memory_mib, 1 << 30, "memory_mib")
        if not self.name:
            object.__setattr__(self, "name", legal_name(self.clicks.name.split(".")[0]))
        require_name(self.name)

    def listed(self, role: str) -> list[str]:
        value = getattr(self, role)
        return [] if value is None else [column.strip() for column in value.split(",")]

    @property
    def features(self) -> list[str]:
        return [column for role in ("categorical", "numeric", "multi") for column in self.listed(role)]
