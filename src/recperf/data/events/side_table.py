"""Tables of items and of users that go with imported events: titles and typed columns, stored beside the events.

They come from a file with a column of ids, or, for items, from columns of the events that do not change within an item.
Types and values decide whether a column has categories, lists of them, numbers or text. Text separated by | is a list,
and so is a printed list; in columns with names like genres, ; and commas separate too. Only what has events is stored.
"""

from __future__ import annotations

import codecs
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import DataError, UsageError
from ...files import sha256, writing
from ..files import values as sql
from ..files.column_kinds import decide, questions
from ..files.file import Source
from ..files.formats import LIST_MARK
from ..files.load import Progress, load_file
from ..files.recognise import recognised_columns
from ..files.source import inspect, position_of
from ..files.text_rows import BadRows
from ..files.values import COLUMNS, RESTART, column_types, fetch_row, literal
from .manifest import SideColumn, SideKind, SideTableFacts
from .options import ImportOptions, SideRole

TITLES = (
    *("title", "name", "movietitle", "itemtitle", "itemname", "producttitle", "productname", "booktitle", "tracktitle"),
    *("trackname", "songtitle", "articletitle", "newstitle", "headline", "moviename", "gamename", "appname"),
)
CHANGES = 0.01
"""A column of the events may change within this share of the items with several events; then the last value counts."""
RANGES = 10
"""Ranges of a number, each with as many items, for models that read categories."""
_SEVERAL = 0.1
"""Share of texts with a separator from which on a column has lists."""
_OFTEN = 4
"""Of this many items on average that have the same whole number from which on it is a category."""
_AT_ONCE = 64
"""Columns whose different values together are found first."""
_KINDS: dict[str | None, SideKind] = {"numeric": "number", "categorical": "category", None: "text"}


@dataclass(kw_only=True)
class SideTable:
    """A table while events are imported: `<role>_raw` has a key, by which ids are found, and columns of ours."""

    connection: Any
    role: SideRole
    file: Path | None
    """None: the columns are those of the events."""
    id: str
    """The user's name of the column of ids."""
    names: dict[str, str]
    """The user's names of the other columns."""
    title: str | None = None
    """Which of them has titles: of items, if no name tells it, the first one whose texts are nearly all different."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The user's names of columns that are not stored, and why."""

    def write(self, draft: Path) -> SideTableFacts:
        """Write the rows that have events, by the table `<role>_ids` of their ids (value) and numbers (id)."""
        own = sql.category("numbered.value::VARCHAR", "VARCHAR")
        joined = f"{self.role}_ids AS numbered JOIN {self.role}_raw ON {own} = key"
        every, rows = (self._row(f"count(*) FROM {one}")[0] for one in (f"{self.role}_ids", joined))
        if not rows:
            what = f"no {self.role} of the events is in {self.file and self.file.name}"
            what += f", whose ids are like {self._row(f'min(key) FROM {self.role}_raw')[0]!r}"
            fix = f"check --{self.role}s-id, and that both files have the same ids"
            raise DataError(what, where={"file": self.file}, fix=fix)
        values: dict[str, tuple[str, SideKind]] = {}
        types = column_types(self.connection, f"{self.role}_raw")
        for column, name in self.names.items():
            if column == self.title:
                continue
            value, kind, why = kind_of(self.connection, f"{self.role}_raw", column, name)
            if kind is None:
                self.left_out[name] = why
            elif kind == "text" and self.title is None and self.role == "item" and sql.is_text(types[column]):
                self.title = column
            else:
                values[name] = value, kind
        selected = ["numbered.id::BIGINT AS number"]
        selected += [f"{value} AS v{at}" for at, (value, _) in enumerate(values.values())]
        selected += [f"{self.title}::VARCHAR AS title"] if self.title else []
        self.connection.execute(f"CREATE TABLE {self.role}_rows AS SELECT {', '.join(selected)} FROM {joined}")
        path = draft / f"{self.role}s.parquet"
        with writing(path, fix=RESTART):
            query = f"FROM {self.role}_rows ORDER BY number"
            self.connection.execute(f"COPY ({query}) TO {literal(str(path))} (FORMAT parquet)")
        return SideTableFacts(
            source=None if self.file is None else self.file.name,
            sha256=sha256(path),
            rows=rows,
            without=every - rows,
            id=self.id,
            title=self.names.get(self.title or ""),
            columns=[self._facts(f"v{at}", name, kind) for at, (name, (_, kind)) in enumerate(values.items())],
            left_out=self.left_out,
        )

    def _row(self, query: str) -> tuple[Any, ...]:
        return fetch_row(self.connection, f"SELECT {query}")

    def _facts(self, column: str, name: str, kind: SideKind) -> SideColumn:
        table = f"{self.role}_rows"
        if kind == "categories":
            table = f"(SELECT unnest({column}) AS {column} FROM {table})"
        values = self._row(f"count(DISTINCT {column}) FROM {table}")[0]
        edges: list[float] = []
        if kind == "number" and values:
            shares = [place / RANGES for place in range(1, RANGES)]
            edges = sorted({*self._row(f"quantile_disc({column}, {shares}) FROM {table}")[0]})
        return SideColumn(name=name, kind=kind, values=values, edges=edges)


def kind_of(connection: Any, table: str, column: str, name: str) -> tuple[str, SideKind | None, str]:
    """SQL for the values of a column and their kind; None if it has no use, and why."""
    type_ = column_types(connection, table)[column]
    mark, printed = _mark(connection, table, column, name)
    if mark:
        around = literal(" '\"[]" if printed else " ")
        texts = f"list_transform({sql.categories(column, type_, mark)}, lambda x: trim(x, {around}))"
        return f"coalesce(list_filter({texts}, lambda x: x <> ''), []::VARCHAR[])", "categories", ""
    asked = questions(column, type_, LIST_MARK)
    # What separates several values is known.
    answers = fetch_row(connection, f"SELECT {', '.join(asked)} FROM {table}")[:-1] if asked else ()
    kind, why = decide(name, type_, *answers, often=_OFTEN)
    if kind is None and not (answers and answers[1] > 1):
        return "", None, why
    value = sql.number(column, type_) if kind == "numeric" else sql.category(column, type_)
    return value, _KINDS[kind], why


def _mark(connection: Any, table: str, column: str, name: str) -> tuple[str | None, bool]:
    """What separates the values of a list, None where a column has single values; and whether lists are printed."""
    type_ = column_types(connection, table)[column]
    if not sql.is_text(type_):
        return LIST_MARK if sql.is_list(type_) else None, False
    tests = [*(f"contains({column}, '{mark}')" for mark in (LIST_MARK, ";", ",")), f"starts_with({column}, '[')"]
    shares = fetch_row(connection, f"SELECT {', '.join(f'avg(({test})::INT)' for test in tests)} FROM {table}")
    bars, semicolons, commas, printed = (share or 0.0 for share in shares)
    if bars > _SEVERAL or printed > _SEVERAL:
        return LIST_MARK if bars > _SEVERAL else ",", printed > _SEVERAL
    if sql.plain(name) in COLUMNS["genres"] and semicolons + commas:
        return ";" if semicolons else ",", False
    return None, False


def of_file(
    connection: Any, role: SideRole, options: ImportOptions, folder: Path, progress: Progress
) -> SideTable | None:
    """The table of a file of items or users; None without such a file. `folder` is for temporary files."""
    path = options.side_files[role]
    if path is None:
        return None
    path, table = path.expanduser(), f"{role}_raw"
    digest = sha256(path) if path.is_file() else ""
    source = _inspect(_as_utf8(path, folder), role, options)
    names = {column: source.names[at] or str(at + 1) for column, at in source.columns.items()}
    bad = BadRows(path, options.skip_bad)
    load_file(connection, source, progress, bad, table=f"{role}_file")
    if digest != sha256(path):
        raise DataError("the file changed while it was imported", where={"file": path}, fix="import a copy")
    key = sql.category('"id"', column_types(connection, f"{role}_file")["id"])
    connection.execute(f"CREATE TABLE {table} AS SELECT rowid AS place, {key} AS key, * FROM {role}_file")
    connection.execute(f"DROP TABLE {role}_file")
    fix = f"give each {role} one row, or check --{role}s-id"
    first = "first_value(place) OVER (PARTITION BY key ORDER BY place)"
    faults = f"SELECT place, key, {first} AS first FROM {table} QUALIFY key IS NULL OR place > first"
    for place, value, other in connection.execute(f"{faults} ORDER BY place LIMIT {bad.room + 1}").fetchall():
        again = f": {role} {value!r} is in an earlier row, {other + 1:,}, too"
        bad.add_loaded(place, f": no {role} id" if value is None else again, fix)
    connection.execute(f"DELETE FROM {table} WHERE place IN (SELECT place FROM ({faults}))")
    title = "title" if "title" in names else None
    return SideTable(connection=connection, role=role, file=path, id=names.pop("id"), names=names, title=title)


def of_events(connection: Any, source: Source, options: ImportOptions, unused: dict[str, str]) -> SideTable | None:
    """The table of columns in `raw` that do not change within an item; None if there is none. `unused` gets the others,
    and why they are not used."""
    names = {role: source.names[at] for role, at in source.columns.items() if role.startswith("c")}
    if names:
        _gather(connection, names, unused)
    titles, wished = recognised_columns([*names.values()], TITLES), options.items_title
    if wished is not None and options.items is None and wished not in names.values():
        why = unused.get(wished) or "it changes within an item, or no column has this name"
        raise UsageError(f"column {wished!r} has no titles of items: {why}", where={"file": source.path})
    usual = [*names.values()][titles[0]] if titles else None
    title = next((column for column, name in names.items() if name == (wished or usual)), None)
    own = source.names[source.columns["item"]]
    return SideTable(connection=connection, role="item", file=None, id=own, names=names, title=title) if names else None


def _gather(connection: Any, names: dict[str, str], unused: dict[str, str]) -> None:
    """Create `item_raw` with the last value of each item in some columns of `raw`. Removes the names of those that
    change within items."""
    types = column_types(connection, "raw")
    there = {column: sql.present(column) if sql.is_text(types[column]) else column for column in names}
    values = {"key": sql.category("item", types["item"]), **there}
    rows = f"SELECT rowid AS row, {', '.join(f'{value} AS {name}' for name, value in values.items())} FROM raw"
    # There are far fewer different values of items than rows; with very many columns they take more memory.
    few = f"key, {', '.join(names)}, max(row) AS row, count(*) AS events FROM ({rows}) GROUP BY ALL"
    rows = f"SELECT {few if len(names) <= _AT_ONCE else f'*, 1 AS events FROM ({rows})'}"
    # Of an item with one event nothing says what would change.
    several = "sum(events) FILTER ({0} IS NOT NULL) > 1"
    asked = f"arg_max({{0}}, row) AS {{0}}, CASE WHEN {several} THEN min({{0}}) <> max({{0}}) END AS {{0}}_changes"
    selected = ", ".join(["key", *map(asked.format, names)])
    connection.execute(f"CREATE TABLE item_raw AS SELECT {selected} FROM ({rows}) GROUP BY key")
    counts = ", ".join(f"count(*) FILTER ({column}_changes), count({column}_changes)" for column in names)
    answers = iter(fetch_row(connection, f"SELECT {counts} FROM item_raw"))
    for column, changing, items in zip([*names], answers, answers):
        if not items or changing > CHANGES * items:
            why = f"it changes within {changing:,} of {items:,} items" if items else "no item has two events"
            unused[names.pop(column)] = why


def _inspect(path: Path, role: SideRole, options: ImportOptions) -> Source:
    """The columns of the file: id, title and f0, f1 and so on. Without a header column 1 is the id and, of a file of
    items, 2 the title."""
    source = inspect(path, {}, header="yes")
    asked = {"id": (getattr(options, f"{role}s_id"), ("id", *COLUMNS[role]))}
    asked |= {"title": (options.items_title, TITLES)} if role == "item" else {}
    roles: dict[str, int] = {}
    # The column of ids is likely to have the name that it has in the events.
    own = options.columns[role]
    roles |= {"id": source.names.index(own)} if source.names.count(own) == 1 and not own.isdecimal() else {}
    for column, (requested, usual) in asked.items():
        known = recognised_columns(source.names, usual)
        if requested is not None:
            roles[column] = position_of(path, column, requested, source.names)
        elif known:
            roles.setdefault(column, known[0])
    named = asked["id"][0]
    if (named is not None and named.isdecimal()) or "id" not in roles:
        if not source.delimited:
            what = f"no column of the file of {role}s is its id"
            raise UsageError(what, where={"file": path}, fix=f"--{role}s-id COLUMN")
        roles = {"id": 0, **({"title": 1} if len(source.names) > 1 and role == "item" else {}), **roles}
        source = replace(source, has_header=False, names=[""] * len(source.names))
    others = [at for at in range(len(source.names)) if at not in roles.values()]
    return replace(source, columns={**roles, **{f"f{place}": at for place, at in enumerate(others)}})


def _as_utf8(path: Path, folder: Path) -> Path:
    """The file, or where it is text in Latin-1, as MovieLens is, a copy in UTF-8."""
    try:
        with path.open("rb") as file:
            decoder = None if file.read(4)[:2] in (b"\x1f\x8b", b"PA") else codecs.getincrementaldecoder("utf-8")()
            file.seek(0)
            while decoder and (block := file.read(1 << 20)):
                decoder.decode(block)
            if decoder:
                decoder.decode(b"", final=True)
    except OSError:
        pass
    except UnicodeDecodeError:
        copy = folder / path.name
        with path.open(encoding="latin-1", newline="") as text, copy.open("w", encoding="utf-8", newline="") as out:
            shutil.copyfileobj(text, out)
        return copy
    return path
