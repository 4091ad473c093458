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
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from ...config import to_json
from ...errors import DataError
from ...files import make_folder, sha256, sync_folder, temporary_folder, write_json, writing
from ..rows import in_blocks
from ..user_files.database import column_types, fetch_row, open_database, optional_package
from ..user_files.load import load_file
from ..user_files.source import Source
from ..user_files.spellings import FALSE, TRUE
from .choose import Columns, choose_columns, decide_types, sql_name
from .columns import PIECE, ColumnWriter, Layout
from .encode import ColumnFacts, StoredColumns, layout_of, selection, stored_arrays
from .options import MOST_SLOTS, ClickOptions
from .values import categories, category, is_text, is_time, label, microseconds, no_number, number
from .vocabulary import read_vocabulary, write_vocabulary

FORMAT = "recperf clicks"
VERSION = 1
MANIFEST = "clicks.json"
RESTART = "the same command starts again from the beginning"
RATING_SHARE = 0.8
"""A rating of at least this share of the largest one is a click."""

_UNITS = {1_000_000_000: 1e17, 1_000_000: 1e14, 1_000: 1e11}
"""The least time in each unit: seconds reach 1e11 in the year 5138, and milliseconds passed it in 1973."""

Progress = Callable[..., None]


def import_clicks(
    options: ClickOptions,
    folder: Path,
    *,
    reading: Progress = lambda *_: None,
    writing_rows: Progress = lambda *_: None,
    split_note: str = "",
) -> dict[str, Any]:
    """Write a store of a user's click rows and return its manifest. If it fails it leaves nothing behind.

    A finished store of the same file and options is left as it is. `split_note` is what the description of a split
    should add.
    """
    folder, began = folder.expanduser().absolute(), monotonic()
    source, columns = choose_columns(options)
    hidden = ("clicks", "memory_mib", "name")
    settings = {name: value for name, value in to_json(options).items() if name not in hidden}
    identity: dict[str, Any] = {"source": source.path.name, "sha256": sha256(source.path), "options": settings}
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        if manifest["identity"] != identity:
            raise DataError(
                "a dataset of this name exists already, from another file or with other options",
                where={"folder": folder},
                fix="choose another --name, or remove the folder",
            )
        return manifest
    with writing(folder, fix=RESTART):
        make_folder(folder.parent)
        with temporary_folder(f".{folder.name}-", beside=folder.parent) as draft:
            with open_database(draft / "rows", memory=options.memory_mib << 20) as connection:
                source.require_unchanged(identity["sha256"], load_file(connection, source, reading))
                manifest = _Build(connection, source, columns, options, draft).run(writing_rows)
            manifest |= {"name": options.name, "identity": identity, "seconds": round(monotonic() - began, 2)}
            manifest["split_note"] = split_note
            write_json(draft / MANIFEST, manifest)
            draft.chmod(0o755)
            os.rename(draft, folder)
            # The temporary folder is removed by its name, which nothing has now.
            draft.mkdir()
        sync_folder(folder.parent)
    return manifest


class _Build:
    """The parts of an import after the rows are in the table `raw`."""

    def __init__(self, connection: Any, source: Source, columns: Columns, options: ClickOptions, folder: Path) -> None:
        self.connection, self.source, self.options, self.folder = connection, source, options, folder
        self.rows = int(fetch_row(connection, "SELECT count(*) FROM raw")[0])
        if not self.rows:
            what = "the file has a header and no rows" if source.has_header else "the file has no rows"
            raise self._bad(what, "name a file with rows")
        self.kinds = column_types(connection, "raw")
        self.columns = decide_types(connection, columns, options.separator)
        if not self.columns.features:
            left = ", ".join(f"{name} ({why})" for name, why in self.columns.left_out.items())
            raise self._bad(
                f"no column is a feature{f': {left}' if left else ''}", "--categorical or --numeric COLUMNS"
            )

    def run(self, progress: Progress) -> dict[str, Any]:
        label_sql, threshold = self._label()
        time_sql = self._time()
        facts = [self._column(at) for at in self.columns.features]
        stored = StoredColumns(
            facts=facts,
            vocabularies=[
                read_vocabulary(self.folder, one.vocabulary) if one.vocabulary else one.hashed() for one in facts
            ],
            separator=self.options.separator,
        )
        layout = layout_of(facts, times=time_sql is not None)
        part = self._write(stored, layout, label_sql, time_sql, progress)
        positives, first, last = fetch_row(
            self.connection,
            f"SELECT sum({label_sql}), {f'min({time_sql}), max({time_sql})' if time_sql else 'NULL, NULL'} FROM raw",
        )
        roles = {role: getattr(self.columns, role) for role in ("user", "item", "time")}
        return {
            "format": FORMAT,
            "version": VERSION,
            "rows": self.rows,
            "positives": int(positives),
            "label": {
                "name": self.columns.name(self.columns.label),
                "positive_from": threshold,
                "positives": [*self.options.positives],
            },
            "columns": [to_json(one) for one in facts],
            "separator": self.options.separator,
            **{role: None if at is None else self.columns.name(at) for role, at in roles.items()},
            "times": None if first is None else [int(first), int(last)],
            "left_out": self.columns.left_out,
            "min_count": self.options.min_count,
            "scale": self.options.scale,
            "parts": [part],
            "digest": hashlib.sha256(
                json.dumps([part["chain"], [to_json(one) for one in facts]], sort_keys=True).encode()
            ).hexdigest(),
        }

    def _label(self) -> tuple[str, float | None]:
        """SQL for the label of a row, and the least rating that is a click."""
        at = self.columns.label
        column, kind, name = sql_name(at), self.kinds[sql_name(at)], self.columns.name(at)
        if self.columns.is_rating:
            value = number(column, kind, trimmed=True)
            self._require(f"{value} IS NULL", column, lambda text: f"the rating {name!r} is {text}, not a number")
            largest = fetch_row(self.connection, f"SELECT max({value}) FROM raw")[0]
            requested = self.options.positive_from
            threshold: float | None = requested if requested is not None else RATING_SHARE * largest
            sql = f"({value} >= {threshold!r})::UTINYINT"
        else:
            threshold, sql = None, f"({label(column, self.options.positives)})::UTINYINT"
            self._require_two_labels(column, name)
            missing = f"the label {name!r} is missing"
            self._require(f"{sql} IS NULL", column, lambda text: missing)
        positives = fetch_row(self.connection, f"SELECT sum({sql}) FROM raw")[0]
        if positives in (0, self.rows):
            which = "every row" if positives else "no row"
            why = "" if threshold is None else f" (from {threshold:g} on a rating is a click)"
            fix = "--positive-from another number" if threshold is not None else "name another --label"
            raise self._bad(f"{which} is a click by the label {name!r}{why}: nothing can be learned", fix)
        return sql, threshold

    def _require_two_labels(self, column: str, name: str) -> None:
        query = f"SELECT DISTINCT {column}::VARCHAR FROM raw WHERE {column} IS NOT NULL ORDER BY 1 LIMIT 6"
        values = [value for (value,) in self.connection.execute(query).fetchall()]
        if self.options.positives:
            return
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
            fix = f"--categorical {name} takes text as it is"
            wrong = no_number(column, kind, trimmed=True)
            self._require(wrong, column, lambda text: f"column {name!r} is {text}, not a number", fix)
            value = number(column, kind, trimmed=True)
            missing, least, most = fetch_row(
                self.connection, f"SELECT count(*) - count({value}), min({value}), max({value}) FROM raw"
            )
            return ColumnFacts(name=name, kind=how, missing=missing, least=least, most=most)
        slots, values = 1, category(column, kind, trimmed=True)
        missing_sql, cut = f"{values} IS NULL", 0
        if how == "multi":
            listed = categories(column, kind, self.options.separator, trimmed=True)
            longest, cut = fetch_row(
                self.connection,
                f"SELECT max(len({listed})), sum(greatest(0, len({listed}) - {MOST_SLOTS})) FROM raw",
            )
            slots, values, missing_sql = max(1, min(MOST_SLOTS, longest)), f"unnest({listed})", f"len({listed}) = 0"
        missing = fetch_row(self.connection, f"SELECT count(*) FROM raw WHERE {missing_sql}")[0]
        facts = {"name": name, "kind": how, "missing": missing, "slots": slots, "cut": int(cut or 0)}
        if self.options.hash is not None:
            return ColumnFacts(**facts, buckets=self.options.hash - 2)
        self._require_room(name, f"SELECT approx_count_distinct(value) FROM (SELECT {values} AS value FROM raw)")
        query = (
            f"SELECT value, count(*) AS count FROM (SELECT {values} AS value FROM raw) WHERE value IS NOT NULL "
            "GROUP BY value ORDER BY count DESC, value"
        )
        vocabulary = write_vocabulary(self.connection, query, self.folder / f"vocabulary-{at:03d}.parquet")
        return ColumnFacts(**facts, vocabulary=vocabulary)

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
    ) -> dict[str, Any]:
        names = {one.name: sql_name(at) for one, at in zip(stored.facts, self.columns.features)}
        selected = selection(stored, names, self.kinds, trimmed=True)
        selected["label"] = label_sql
        if time_sql:
            selected["time"] = time_sql
        query = ", ".join(f"{sql} AS {name}" for name, sql in selected.items())
        part: dict[str, Any] = {"rows": 0, "piece": PIECE, "chain": ""}
        with ColumnWriter(self.folder, 0, part, layout, again=RESTART) as writer:
            batches = self.connection.sql(f"SELECT {query} FROM raw").to_arrow_reader(1 << 16)
            table = optional_package("pyarrow").Table
            for batch in in_blocks((table.from_batches([batch]) for batch in batches), PIECE):
                arrays = stored_arrays(stored, batch)
                arrays["labels"] = batch["label"].to_numpy().astype(np.uint8)
                if time_sql:
                    arrays["times"] = batch["time"].to_numpy().astype(np.int64)
                writer.append(arrays)
                part["rows"] += len(arrays["labels"])
                part["chain"] = writer.commit(part["chain"])
                progress(part["rows"], self.rows)
        return part

    def _require(self, wrong: str, column: str, what: Callable[[str], str], fix: str | None = None) -> None:
        """Refuse the first row for which SQL says that it is wrong."""
        row = fetch_row(self.connection, f"SELECT min(rowid) FROM raw WHERE {wrong}")[0]
        if row is not None:
            value = fetch_row(self.connection, f"SELECT {column}::VARCHAR FROM raw WHERE rowid = {row}")[0]
            shown = "missing" if value is None else repr(value if len(value) < 60 else value[:57] + "...")
            raise self._bad(f"row {row + 1:,}: {what(shown)}", fix or "repair or remove that row")

    def _bad(self, what: str, fix: str) -> DataError:
        return DataError(what, where={"file": self.source.path}, fix=fix)


def _per_second(time: float) -> int:
    """The unit of a time by its size, in parts of a second."""
    return next((unit for unit, least in _UNITS.items() if time >= least), 1)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The description of a store; damage is one line."""
    from ...files import read_linked

    path = folder / MANIFEST
    try:
        manifest = json.loads(read_linked(path))
        problem = None if manifest["format"] == FORMAT else "this is not a store of clicks"
        if problem is None and manifest["version"] != VERSION:
            problem = f"the store has version {manifest['version']}, this recperf reads {VERSION}"
    except OSError as error:
        problem = f"the description of a dataset cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        problem = "the description of a dataset is damaged"
    if problem:
        raise DataError(problem, where={"file": path}, fix=f"remove {folder} and import again")
    return dict(manifest)
