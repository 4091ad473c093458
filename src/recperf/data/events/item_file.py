"""A file of items that goes with imported events: titles and features of the items, stored beside the events.

It has a column of ids, one of titles, and any others, which are categorical features. A feature may have several values
for an item: a list, or text separated by |. Items without events are left out.
"""

from __future__ import annotations

import codecs
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import DataError, UsageError
from ...files import sha256, writing
from ..files.file import Source
from ..files.formats import LIST_MARK
from ..files.load import Progress, load_file
from ..files.recognise import recognised_columns
from ..files.source import inspect, position_of
from ..files.text_rows import BadRows
from ..files.values import COLUMNS, RESTART, categories, category, column_types, fetch_row, literal
from .item_features import FILE
from .manifest import ItemFileFacts
from .options import ImportOptions

IDS = ("id", *COLUMNS["item"])
TITLES = (
    *("title", "name", "movietitle", "itemtitle", "itemname", "producttitle", "productname", "booktitle", "tracktitle"),
    *("trackname", "songtitle", "articletitle", "newstitle", "headline", "moviename", "gamename", "appname"),
)
MOST_VALUES = 0.5
"""A feature with more different values than this share of the items tells items apart no better than their ids."""


class ItemFile:
    """The file of items while events are imported: the table `item_rows` with its columns, ids as text."""

    def __init__(self, connection: Any, options: ImportOptions, folder: Path, progress: Progress) -> None:
        assert options.items is not None
        self.connection, self.path, self.folder = connection, options.items.expanduser(), folder
        self.digest = sha256(self.path) if self.path.is_file() else ""
        source = _inspect(_as_utf8(self.path, folder), options)
        self.names = {role: source.names[at] or str(at + 1) for role, at in source.columns.items()}
        bad = BadRows(self.path, options.skip_bad)
        load_file(connection, source, progress, bad, table="item_raw")
        if self.digest != sha256(self.path):
            raise DataError("the file changed while it was imported", where={"file": self.path}, fix="import a copy")
        self._keyed(bad)

    def _keyed(self, bad: BadRows) -> None:
        """Create `item_rows`: the key by which items are found, the title and the features, each a list of texts."""
        types = column_types(self.connection, "item_raw")
        values = {"key": category('"id"', types["id"])}
        values["title"] = '"title"::VARCHAR' if "title" in types else "NULL::VARCHAR"
        for role in self.features:
            values[role] = categories(f'"{role}"', types[role], LIST_MARK)
        selected = ", ".join(f'{value} AS "{name}"' for name, value in values.items())
        self.connection.execute(f"CREATE TABLE item_rows AS SELECT rowid AS row, {selected} FROM item_raw")
        fix = "give each item one row, or check --items-id"
        first = "first_value(row) OVER (PARTITION BY key ORDER BY row)"
        faults = f"SELECT row, key, {first} AS first FROM item_rows QUALIFY key IS NULL OR row > first"
        for row, key, other in self.connection.execute(f"{faults} ORDER BY row LIMIT {bad.room + 1}").fetchall():
            again = f": item {key!r} is in an earlier row, {other + 1:,}, too"
            bad.add_loaded(row, ": no item id" if key is None else again, fix)
        self.connection.execute(f"DELETE FROM item_rows WHERE row IN (SELECT row FROM ({faults}))")

    @property
    def features(self) -> list[str]:
        """Roles of the columns that are features: f0, f1 and so on."""
        return [role for role in self.names if role not in ("id", "title")]

    def add_genres(self) -> None:
        """Give events the first feature of their items as genres, which become artist and album."""
        if not self.features or {"genres", "artist", "album"} & set(column_types(self.connection, "raw")):
            return
        kind = column_types(self.connection, "raw")["item"]
        genres = f"array_to_string(item_rows.{self.features[0]}, '{LIST_MARK}')"
        self.connection.execute(
            f"CREATE TABLE joined AS SELECT raw.*, nullif({genres}, '') AS genres FROM raw "
            f"LEFT JOIN item_rows ON {category('raw.item', kind)} = item_rows.key ORDER BY raw.rowid"
        )
        for statement in ("DROP TABLE raw", "ALTER TABLE joined RENAME TO raw"):
            self.connection.execute(statement)

    def write(self, draft: Path) -> ItemFileFacts:
        """Write the rows of items that have events, by the table `item_ids` of their ids (value) and numbers (id)."""
        joined = "item_ids AS numbered JOIN item_rows ON numbered.value::VARCHAR = item_rows.key"
        all_items = fetch_row(self.connection, "SELECT count(*) FROM item_ids")[0]
        count = fetch_row(self.connection, f"SELECT count(*) FROM {joined}")[0]
        if not count:
            key = fetch_row(self.connection, "SELECT min(key) FROM item_rows")[0]
            what = f"no item of the events is in the file of items, whose ids are like {key!r}"
            raise DataError(
                what, where={"file": self.path}, fix="check --items-id, and that both files have the same ids"
            )
        used, left_out = [], {}
        for role in self.features:
            distinct = f"SELECT count(DISTINCT value) FROM (SELECT unnest(item_rows.{role}) AS value FROM {joined})"
            values = fetch_row(self.connection, distinct)[0]
            if values > max(2, MOST_VALUES * count) or not values:
                left_out[self.names[role]] = f"{values:,} different values"
            else:
                used.append(role)
        columns = ["numbered.id::BIGINT AS item", "item_rows.title AS title"]
        columns += [
            f'coalesce(list_filter(item_rows.{role}, lambda x: x IS NOT NULL), []::VARCHAR[]) AS "feature {at}"'
            for at, role in enumerate(used)
        ]
        path = draft / FILE
        query = f"SELECT {', '.join(columns)} FROM {joined} ORDER BY item"
        with writing(path, fix=RESTART):
            self.connection.execute(f"COPY ({query}) TO {literal(str(path))} (FORMAT parquet)")
        return ItemFileFacts(
            source=self.path.name,
            sha256=sha256(path),
            items=count,
            without=all_items - count,
            id=self.names["id"],
            title=self.names.get("title"),
            features=[self.names[role] for role in used],
            left_out=left_out,
        )


def _inspect(path: Path, options: ImportOptions) -> Source:
    """The columns of the file: id, title and f0, f1 and so on. Without a header column 1 is the id and 2 the title."""
    source = inspect(path, {}, header="yes")
    roles: dict[str, int] = {}
    for role, requested, usual in (("id", options.items_id, IDS), ("title", options.items_title, TITLES)):
        known = recognised_columns(source.names, usual)
        if requested is not None:
            roles[role] = position_of(path, role, requested, source.names)
        elif known:
            roles[role] = known[0]
    if (options.items_id is not None and options.items_id.isdecimal()) or "id" not in roles:
        if not source.delimited:
            raise UsageError("no column of the file of items is its id", where={"file": path}, fix="--items-id COLUMN")
        roles = {"id": 0, **({"title": 1} if len(source.names) > 1 else {}), **roles}
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
