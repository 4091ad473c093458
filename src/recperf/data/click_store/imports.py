"""Bring your own clicks: a file with a label and named columns becomes a store of click rows.

DuckDB holds the rows within a memory limit, with temporary files beside the store. Numbers are stored as they are and
categories as codes of a full vocabulary (`vocabulary.py`); scales and table rows are fitted on training rows when a
split is chosen (`imported.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from ...config import to_json
from ...errors import DataError
from ...files import sha256, write_json
from ...folders import fresh_folder
from ...jsonfile import as_json, sealed
from ..rows import in_blocks, pyarrow
from ..user_files.database import RESTART, column_types, fetch_row, open_database
from ..user_files.load import load_file
from ..user_files.source import Source
from ..user_files.text_rows import BadRows
from ..user_files.values import (
    FALSE,
    TRUE,
    Values,
    categories,
    category,
    is_text,
    is_time,
    key,
    keys,
    label,
    microseconds,
    no_number,
    number,
    values_in,
)
from .choose import Columns, choose_columns, decide_types, sql_name
from .columns import PIECE, ColumnWriter, Layout, StoredPart
from .encode import (
    FORMAT,
    MANIFEST,
    VERSION,
    ColumnFacts,
    Label,
    Manifest,
    StoredColumns,
    layout_of,
    read_manifest,
    require_categories,
    selection,
    stored_arrays,
)
from .options import MOST_SLOTS, ClickOptions
from .vocabulary import write_vocabulary

RATING_SHARE = 0.8
"""A rating of at least this share of the largest one is a click."""

_UNITS = {1_000_000_000: 1e17, 1_000_000: 1e14, 1_000: 1e11}
"""The least time in each unit: seconds reach 1e11 in the year 5138, and milliseconds passed it in 1973."""

_DECIDE = ("parts", "columns", "label", "user", "item", "time", "separator", "min_count", "scale")
"""Fields of a manifest that decide what is trained: its digest identifies the data of a run."""

_VALUES_AT_ONCE = 1 << 24
"""Values that are encoded at once."""

Progress = Callable[..., None]


def import_clicks(
    options: ClickOptions,
    folder: Path,
    *,
    reading: Progress = lambda *_: None,
    writing_rows: Progress = lambda *_: None,
    split_note: str = "",
) -> Manifest:
    """Write a store of a user's click rows and return its manifest. If it fails it leaves nothing behind.

    A finished store of the same file and options is left as it is. `split_note` is what the description of a split
    should add.
    """
    folder, began = folder.expanduser().absolute(), monotonic()
    source, columns = choose_columns(options)
    hidden = ("clicks", "memory_mib", "name")
    settings = {name: value for name, value in to_json(options).items() if name not in hidden}
    hashed = sha256(source.path)
    identity = {"source": source.path.name, "sha256": hashed, "options": settings}
    if os.path.lexists(folder / MANIFEST):
        manifest = read_manifest(folder)
        if manifest.identity != identity:
            raise DataError(
                "a dataset of this name exists already, from another file or with other options",
                where={"folder": folder},
                fix="choose another --name, or remove the folder",
            )
        return manifest
    with fresh_folder(folder, fix=RESTART) as draft:
        with open_database(draft / "rows", memory=options.memory_mib << 20) as connection:
            bad = BadRows(source.path, options.skip_bad)
            source.require_unchanged(hashed, load_file(connection, source, reading, bad))
            manifest = _Build(connection, source, columns, options, draft, bad).run(writing_rows)
        manifest.identity, manifest.split_note = identity, split_note
        manifest.seconds = round(monotonic() - began, 2)
        write_json(draft / MANIFEST, sealed(manifest))
    return manifest


class _Build:
    """The parts of an import after the rows are in the table `raw`."""

    def __init__(
        self, connection: Any, source: Source, columns: Columns, options: ClickOptions, folder: Path, bad: BadRows
    ) -> None:
        self.connection, self.source, self.options, self.folder, self.bad = connection, source, options, folder, bad
        self.rows = self._count()
        self.kinds = column_types(connection, "raw")
        # Rows are removed when all are known: until then they count as in the file.
        connection.execute("CREATE TABLE left_out (place BIGINT)")
        self.separator = options.separator or (" " if source.types else "|")
        self.columns = decide_types(connection, columns, self.separator)
        if not self.columns.features:
            left = ", ".join(f"{name} ({why})" for name, why in self.columns.left_out.items())
            raise self._bad(
                f"no column is a feature{f': {left}' if left else ''}", "--categorical or --numeric COLUMNS"
            )

    def _count(self) -> int:
        rows = int(fetch_row(self.connection, "SELECT count(*) FROM raw")[0])
        if not rows:
            what = "the file has a header and no rows" if self.source.has_header else "the file has no rows"
            raise self._bad(what, "name a file with rows")
        return rows

    def run(self, progress: Progress) -> Manifest:
        label_sql, threshold = self._label()
        time_sql = self._time()
        for at, how in self.columns.features.items():
            if how == "numeric":
                self._require_numbers(at)
        self.connection.execute("DELETE FROM raw WHERE rowid IN (FROM left_out)")
        self.rows = self._count()
        self._require_both_labels(label_sql, threshold)
        facts = [self._column(at) for at in self.columns.features]
        stored = StoredColumns.of(self.folder, facts, self.separator)
        layout = layout_of(facts, times=time_sql is not None)
        part = self._write(stored, layout, label_sql, time_sql, progress)
        positives, first, last = fetch_row(
            self.connection,
            f"SELECT sum({label_sql}), {f'min({time_sql}), max({time_sql})' if time_sql else 'NULL, NULL'} FROM raw",
        )
        roles = {role: getattr(self.columns, role) for role in ("user", "item", "time")}
        manifest = Manifest(
            format=FORMAT,
            version=VERSION,
            name=self.options.name,
            rows=self.rows,
            positives=int(positives),
            label=Label(
                name=self.columns.name(self.columns.label),
                positive_from=threshold,
                positives=[*self.options.positives],
            ),
            columns=facts,
            separator=self.separator,
            **{role: None if at is None else self.columns.name(at) for role, at in roles.items()},
            times=None if first is None else (int(first), int(last)),
            left_out=self.columns.left_out,
            min_count=self.options.min_count,
            scale=self.options.scale,
            parts=(part,),
            skipped_rows=self.bad.skipped,
            digest="",
            identity={},
            seconds=0.0,
            split_note="",
        )
        values = as_json(manifest)
        decide = json.dumps([values[name] for name in _DECIDE], sort_keys=True)
        manifest.digest = hashlib.sha256(decide.encode()).hexdigest()
        return manifest

    def _label(self) -> tuple[str, float | None]:
        """SQL for the label of a row, and the least rating that is a click."""
        at = self.columns.label
        column, kind, name = sql_name(at), self.kinds[sql_name(at)], self.columns.name(at)
        if self.columns.is_rating:
            value = number(column, kind, trimmed=True)
            self._require(f"{value} IS NULL", column, lambda text: f"the rating {name!r} is {text}, not a number")
            largest = fetch_row(self.connection, f"SELECT max({value}) FROM raw")[0]
            requested = self.options.positive_from
            threshold: float | None = requested if requested is not None else RATING_SHARE * (largest or 0.0)
            sql = f"({value} >= {threshold!r})::UTINYINT"
        else:
            threshold, sql = None, f"({label(column, kind, self.options.positives)})::UTINYINT"
            self._require_two_labels(category(column, kind, trimmed=True), name)
            self._require(f"{sql} IS NULL", column, lambda text: f"the label {name!r} is {text}")
        return sql, threshold

    def _require_both_labels(self, sql: str, threshold: float | None) -> None:
        name = self.columns.name(self.columns.label)
        positives = fetch_row(self.connection, f"SELECT sum({sql}) FROM raw")[0]
        if positives in (0, self.rows):
            which = "every row" if positives else "no row"
            why = "" if threshold is None else f" (from {threshold:g} on a rating is a click)"
            fix = "--positive-from another number" if threshold is not None else "name another --label"
            raise self._bad(f"{which} is a click by the label {name!r}{why}: nothing can be learned", fix)

    def _require_two_labels(self, text: str, name: str) -> None:
        query = f"SELECT DISTINCT {text} AS text FROM raw WHERE text IS NOT NULL ORDER BY 1 LIMIT 6"
        values = [value for (value,) in self.connection.execute(query).fetchall()]
        if self.options.positives:
            return
        if self.options.skip_bad:
            # Other values are bad rows.
            values = [value for value in values if value.lower() in (*TRUE, *FALSE)]
        strange = [value for value in values if value.lower() not in (*TRUE, *FALSE)]
        if not strange and len(values) <= 2:
            return
        shown = ", ".join(values[:5]) + (" and more" if len(values) > 5 else "")
        counted = "more than 5 values" if len(values) > 5 else f"{len(values)} value{'s' * (len(values) != 1)}"
        fix = f"--positives VALUE names those that are clicks, --rating {name} --positive-from NUMBER the least of them"
        raise self._bad(f"the label {name!r} has {counted} ({shown}); allowed: 0 and 1, or false and true", fix)

    def _time(self) -> str | None:
        """SQL for the time of a row in microseconds."""
        at = self.columns.time
        if at is None:
            return None
        column, kind, name = sql_name(at), self.kinds[sql_name(at)], self.columns.name(at)
        unit = 1
        if not is_time(kind):
            value = number(column, kind, trimmed=True)
            least, largest = fetch_row(self.connection, f"SELECT min({value}), max({value}) FROM raw")
            unit = 0 if largest is None and is_text(kind) else _per_second(largest or 0.0)
            # Times from 1973 on; smaller numbers count something else.
            if unit and least is not None and least >= 1e8 and _per_second(least) != unit:
                other = f"{value} < {_UNITS[unit]!r}"
                what = f"the time {name!r} is {{}}, in another unit than the largest, {largest:.0f}"
                self._require(other, column, what.format, "write all times in one unit")
        sql = microseconds(column, kind, unit)
        self._require(f"{sql} IS NULL", column, lambda text: f"the time {name!r} is {text}, which cannot be read")
        return sql

    def _column(self, at: int) -> ColumnFacts:
        """Facts about a feature; of a categorical one the vocabulary is written."""
        column, kind, name, how = (
            sql_name(at),
            self.kinds[sql_name(at)],
            self.columns.name(at),
            self.columns.features[at],
        )
        if how == "numeric":
            value = number(column, kind, trimmed=True)
            missing, least, most = fetch_row(
                self.connection, f"SELECT count(*) - count({value}), min({value}), max({value}) FROM raw"
            )
            return ColumnFacts(name=name, kind=how, missing=missing, least=least, most=most)
        facts = ColumnFacts(name=name, kind=how, missing=0, slots=1)
        try:
            values = require_categories(self.connection, "raw", facts, column, kind)
        except DataError as error:
            raise self._bad(error.what, error.fix or "") from None
        if how == "multi":
            texts = f"unnest({categories(column, kind, self.separator, trimmed=True)})"
        else:
            texts = category(column, kind, trimmed=True)
        seen = f"(SELECT * FROM (SELECT {texts} AS value FROM raw) WHERE value IS NOT NULL)"
        if not self.options.hash:
            self._require_room(name, f"SELECT approx_count_distinct(value) FROM {seen}")
            query = f"SELECT value, count(*) AS count FROM {seen} GROUP BY value"
            self.connection.execute(f"CREATE OR REPLACE TEMP TABLE seen AS {query}")
            seen = "seen"
        values = values_in(self.connection, seen) if values == "text" else values
        facts = replace(facts, values=values, **self._slots(at, values))
        if self.options.hash:
            return replace(facts, buckets=self._table_rows(at) - 2)
        query = (
            f"SELECT min(value) AS value, nullif(key, min(value)) AS key, sum(count) AS count "
            f"FROM (SELECT *, {key('value', values)} AS key FROM seen) GROUP BY key ORDER BY count DESC, value"
        )
        vocabulary = write_vocabulary(self.connection, query, self.folder / f"vocabulary-{at:03d}.parquet")
        return replace(facts, vocabulary=vocabulary)

    def _table_rows(self, at: int) -> int:
        """Rows of the table to which the categories of a column are hashed."""
        sizes, sparse = self.options.hash, [one for one, how in self.columns.features.items() if how != "numeric"]
        if len(sizes) not in (1, len(sparse)):
            what = f"--hash has {len(sizes)} numbers; {len(sparse)} columns have categories"
            raise self._bad(what, "give one number for all, or one for each of them")
        return sizes[sparse.index(at) if len(sizes) > 1 else 0]

    def _slots(self, at: int, values: Values) -> dict[str, Any]:
        """How many categories a row has at most, how many are cut, and how many rows have none."""
        column, kind = sql_name(at), self.kinds[sql_name(at)]
        if self.columns.features[at] != "multi":
            text = category(column, kind, trimmed=True)
            return {"missing": fetch_row(self.connection, f"SELECT count(*) - count({text}) FROM raw")[0]}
        listed = categories(column, kind, self.separator, trimmed=True)
        longest, cut, missing = fetch_row(
            self.connection,
            f"SELECT max(count), sum(greatest(0, count - {MOST_SLOTS})), sum((count = 0)::INT) "
            f"FROM (SELECT len({keys('texts', values)}) AS count FROM (SELECT {listed} AS texts FROM raw))",
        )
        return {"slots": max(1, min(MOST_SLOTS, longest)), "cut": int(cut), "missing": int(missing)}

    def _require_room(self, name: str, query: str) -> None:
        """Refuse a vocabulary that does not fit into memory with its lookup; a value takes about 100 bytes."""
        distinct = fetch_row(self.connection, query)[0]
        if distinct * 100 > self.options.memory_mib << 18:
            raise self._bad(
                f"column {name!r} has about {distinct:,} categories, too many to list in "
                f"{self.options.memory_mib:,} MiB",
                "--hash 1000000 hashes categories to so many rows; or a larger --memory-mib",
            )

    def _write(
        self, stored: StoredColumns, layout: Layout, label_sql: str, time_sql: str | None, progress: Progress
    ) -> StoredPart:
        names = {one.name: sql_name(at) for one, at in zip(stored.facts, self.columns.features)}
        more = {"label": label_sql, **({"time": time_sql} if time_sql else {})}
        query = selection(stored, names, self.kinds, "raw", trimmed=True, more=more)
        part = StoredPart(rows=0, piece=PIECE, chain="")
        # Wide tables have fewer rows at once, so that their text stays within the memory limit.
        at_once = min(PIECE, 1 << (_VALUES_AT_ONCE // (1 + len(stored.facts))).bit_length() - 1)
        with ColumnWriter(self.folder, layout) as writer:
            batches = self.connection.sql(query).to_arrow_reader(min(at_once, 1 << 16))
            table = pyarrow().Table
            for batch in in_blocks((table.from_batches([batch]) for batch in batches), at_once):
                arrays = stored_arrays(stored, batch)
                arrays["labels"] = batch["label"].to_numpy().astype(np.uint8)
                if time_sql:
                    arrays["times"] = batch["time"].to_numpy().astype(np.int64)
                writer.append(arrays)
                part.rows += len(arrays["labels"])
                if part.rows % PIECE == 0 or part.rows == self.rows:
                    part.chain = writer.commit(part.chain)
                progress(part.rows, self.rows)
        return part

    def _require_numbers(self, at: int) -> None:
        column, name = sql_name(at), self.columns.name(at)
        wrong = no_number(column, self.kinds[column], trimmed=True)
        fix = f"--categorical {name} takes text as it is"
        self._require(wrong, column, lambda text: f"column {name!r} is {text}, not a number", fix)

    def _require(self, wrong: str, column: str, what: Callable[[str], str], fix: str | None = None) -> None:
        """Leave out the rows for which SQL says that they are wrong, or refuse the first that is too many."""
        query = (
            f"SELECT rowid, {column}::VARCHAR FROM raw WHERE {wrong} AND rowid NOT IN (FROM left_out) "
            f"ORDER BY rowid LIMIT {self.bad.room + 1}"
        )
        rows = self.connection.execute(query).fetchall()
        for place, value in rows:
            shown = "missing" if value is None else repr(value if len(value) < 60 else value[:57] + "...")
            self.bad.add_loaded(place, f": {what(shown)}", fix or "repair or remove that row")
        if rows:
            places = ", ".join(f"({place})" for place, _ in rows)
            self.connection.execute(f"INSERT INTO left_out VALUES {places}")

    def _bad(self, what: str, fix: str) -> DataError:
        return DataError(what, where={"file": self.source.path}, fix=fix)


def _per_second(time: float) -> int:
    """The unit of a time by its size, in parts of a second."""
    return next((unit for unit, least in _UNITS.items() if time >= least), 1)
