"""Options of `recperf data import --clicks`, and which columns of a file are the label, features, time, user and item.

Options decide, else names and types do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ...config import require, within
from ...errors import DataError, UsageError
from ..files import values as sql
from ..files.column_kinds import Kind, decide, questions
from ..files.file import Source
from ..files.options import FileOptions
from ..files.recognise import recognised_columns
from ..files.source import inspect, position_of, require_distinct, shown_names
from ..files.values import column_types, fetch_row

MOST_FEATURES: Final = 500
"""Most columns that become features: a table of each, and several passes over it at the import."""
MOST_SLOTS: Final = 16
"""Most values of a multi-valued column that a row has; further ones are left out."""
KINDS: Final[tuple[Kind, ...]] = ("categorical", "numeric", "multi")
RATINGS = ["user", "item", "rating", "timestamp"]
"""The columns of a file of four numbers without a header, as MovieLens has them."""
CRITEO = ["label", *(f"i{number}" for number in range(1, 14)), *(f"c{number}" for number in range(1, 27))]
"""The columns of Criteo's click logs, which have tabs between them and no header: a label, numbers and categories."""
MOST_RATING = 100
_AT_ONCE = 16
"""Columns whose types one query decides."""


@dataclass(frozen=True, kw_only=True)
class ClickOptions(FileOptions):
    clicks: Path
    """The file, which may also come right after import: CSV or another delimited text, JSON lines (either may be in
    gzip), or Parquet. Its content decides the format. Text is UTF-8."""
    categorical: str | None = None
    """Columns with categories, separated by commas. If neither these nor numeric ones are given, types decide: text
    and integers with few values are categorical, other numbers are numeric."""
    numeric: str | None = None
    """Columns with numbers, separated by commas: sign(x) log(1 + |x|) with mean 0 and deviation 1 becomes a feature. A
    missing number becomes the mean, with a column of its own that says so."""
    multi: str | None = None
    """Columns with several categories in a row, separated by commas: lists, or text like Action|Comedy."""
    separator: str = "|"
    """What separates the categories of a multi-valued column."""
    hash: int | None = None
    """Hash the categories of each column to a table of this many rows instead of listing them."""

    def __post_init__(self) -> None:
        self.check(self.clicks, least_mib=256)
        if self.hash is not None:
            within(4, self.hash, (1 << 31) - 1, "hash")
        rated = self.label is None or self.positive_from is None
        require(rated, "positive_from", self.positive_from, "none with --label; --rating takes it")
        require(0 < len(self.separator) <= 8, "separator", self.separator, "1 to 8 characters")

    def listed(self, role: str) -> list[str]:
        value = getattr(self, role)
        return [] if value is None else [column.strip() for column in value.split(",")]

    @property
    def features(self) -> list[str]:
        return [column for role in KINDS for column in self.listed(role)]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of an import by their position in the file."""

    names: list[str]
    label: int
    is_rating: bool
    time: int | None = None
    user: int | None = None
    item: int | None = None
    features: dict[int, Kind] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Columns that are no features, and why."""
    undecided: tuple[int, ...] = ()
    """Columns whose type decides."""

    @property
    def positions(self) -> list[int]:
        """All columns to read."""
        roles = [self.label, self.time, *self.features, *self.undecided]
        return sorted({position for position in roles if position is not None})

    def name(self, position: int) -> str:
        return self.names[position]


def sql_name(position: int) -> str:
    """The column of the table `raw`: a user's names never become SQL."""
    return f"c{position}"


def choose_columns(options: ClickOptions) -> tuple[Source, Columns]:
    """Inspect the file and assign its columns as far as names and options do."""
    source = inspect(options.clicks, {}, delimiter=options.delimiter, header="yes")
    names = source.names
    has_header = source.has_header and options.header != "no"
    if options.header == "auto" and source.delimited and names and all(map(_is_number, names)):
        has_header = False
    if options.header != "yes" and source.delimiter == "\t" and len(names) == len(CRITEO) and names[0] in ("0", "1"):
        names, has_header = CRITEO, False
    elif source.delimited and not has_header:
        by_name = options.label is None and options.rating is None
        is_ratings = by_name and len(names) == len(RATINGS) and float(names[2]) <= MOST_RATING
        names = RATINGS if is_ratings else [f"column_{number}" for number in range(1, len(names) + 1)]
    source = replace(source, has_header=has_header)
    require_distinct(source.path, names)
    columns = _assign(source, names, options)
    count = len(columns.features) + len(columns.undecided)
    if count > MOST_FEATURES:
        what = f"{count:,} columns would be features; allowed: at most {MOST_FEATURES}"
        raise DataError(what, where={"file": source.path}, fix="--categorical, --numeric and --multi name the features")
    return replace(source, columns={sql_name(position): position for position in columns.positions}), columns


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]+([.][0-9]+)?", text) is not None


def _assign(source: Source, names: list[str], options: ClickOptions) -> Columns:
    taken = _requested(source, names, options)
    label = next((at for at, role in taken.items() if role in ("label", "rating")), None)
    is_rating = options.rating is not None
    for role in ("label", "rating"):
        if label is None and (role == "rating" or options.positive_from is None):
            label, is_rating = _recognised(names, role), role == "rating"
    if label is None:
        raise UsageError(
            "no column is recognised as the label",
            where={"file": source.path, "columns": shown_names(names)},
            fix="--label COLUMN, or --rating COLUMN for a number of which high values count as clicks",
        )
    features = {at: kind for at, role in taken.items() for kind in KINDS if kind == role}
    if label in features:
        raise _twice(source, names[label], "label", features[label])
    roles: dict[str, int | None] = {}
    for role in ("time", "user", "item"):
        column = getattr(options, role)
        roles[role] = position_of(source.path, role, column, names) if column else _recognised(names, role)
    for role in ("user", "item"):
        at_role = roles[role]
        # A user or item that is only recognised by its name is a feature where none are given, or if it is among them.
        if at_role is not None and (getattr(options, role) or not options.features):
            features[at_role] = "categorical"
        elif at_role is not None and features.get(at_role) != "categorical":
            roles[role] = None
    if roles["time"] in (*features, label):
        roles["time"] = None
    others = [at for at in range(len(names)) if at not in (*features, label, roles["time"]) and not options.features]
    if names is CRITEO:
        features |= {at: "categorical" if names[at][0] == "c" else "numeric" for at in others}
        others = []
    return Columns(
        names=names,
        label=label,
        is_rating=is_rating,
        features=features,
        undecided=tuple(others),
        left_out={},
        **roles,
    )


def _requested(source: Source, names: list[str], options: ClickOptions) -> dict[int, str]:
    """What options say that columns are, by position. A column that is two things is refused; a user or an item is a
    category too."""
    taken: dict[int, str] = {}
    for role in ("label", "rating", *KINDS, "time", "user", "item"):
        several = role in KINDS
        for column in options.listed(role) if several else filter(None, [getattr(options, role)]):
            at = position_of(source.path, f"{role} column" if several else role, column, names)
            if at in taken and not (role in ("user", "item") and taken[at] == "categorical"):
                raise _twice(source, names[at], taken[at], role)
            taken[at] = role
    return taken


def _twice(source: Source, column: str, first: str, second: str) -> UsageError:
    fix = "a label must not be a feature" if first in ("label", "rating") else "give each column once"
    return UsageError(f"column {column!r} is given as {first} and as {second}", where={"file": source.path}, fix=fix)


def _recognised(names: list[str], role: str) -> int | None:
    return next(iter(recognised_columns(names, sql.COLUMNS[role])), None)


def decide_types(connection: Any, columns: Columns, separator: str) -> Columns:
    """Make features of the undecided columns by what is in them."""
    kinds = column_types(connection, "raw")
    features, left_out = dict(columns.features), dict(columns.left_out)
    for first in range(0, len(columns.undecided), _AT_ONCE):
        part = columns.undecided[first : first + _AT_ONCE]
        asked = [questions(sql_name(at), kinds[sql_name(at)], separator) for at in part]
        query = ", ".join(["count(*)", *(text for one in asked for text in one)])
        answers = islice(fetch_row(connection, f"SELECT {query} FROM raw"), 1, None)
        for at, one in zip(part, asked):
            kind, why = decide(columns.name(at), kinds[sql_name(at)], *islice(answers, len(one)))
            if kind is None:
                left_out[columns.name(at)] = why
            else:
                features[at] = kind
    return replace(columns, features=dict(sorted(features.items())), left_out=left_out, undecided=())
