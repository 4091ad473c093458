"""Bring your own clicks: a file with a label and named columns becomes a store of click rows.

DuckDB holds the rows within a memory limit, with temporary files beside the store. Numbers are stored as they are and
categories as codes of a full vocabulary (`columns.py`); scales and table rows are fitted on training rows when a split
is chosen (`imported.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...config import to_json
from ...errors import DataError
from ...files import sha256, write_json
from ...folders import new_folder
from ...jsonfile import as_json, sealed
from ..files import values as sql
from ..files.load import load_file
from ..files.options import repeated_rows
from ..files.raw_rows import RawRows
from ..files.text_rows import BadRows
from ..files.values import LAST_SECOND, RESTART, open_database
from ..tables import in_blocks, numbers_of, pyarrow
from .columns import Arrays, write_arrays, write_vocabulary
from .encode import (
    FORMAT,
    MANIFEST,
    TITLES,
    VERSION,
    ClickManifest,
    ColumnFacts,
    Label,
    StoredColumns,
    info,
    read_manifest,
    require_categories,
    selection,
    stored_arrays,
)
from .options import MOST_SLOTS, ClickOptions, Columns, choose_columns, decide_types, sql_name

_DECIDE = ("arrays", "columns", "label", "user", "item", "time", "separator", "min_count")
"""Fields of a manifest that decide what is trained: its digest identifies the data of a run."""

_PIECE, _VALUES_AT_ONCE = 1 << 18, 1 << 24
"""Most rows and values that are encoded and written at once."""

Progress = Callable[..., None]


def make(options: ClickOptions, folder: Path, *, reading: Progress, rows: Progress) -> dict[str, Any]:
    """Import a file, or reuse its import, and describe it."""
    began, existed = monotonic(), (folder / MANIFEST).is_file()
    manifest = import_clicks(options, folder, reading=reading, writing_rows=rows)
    seconds = monotonic() - began
    return {
        **info(folder),
        "imported": not existed,
        "notes": repeated_rows(manifest.repeated, manifest.rows, ("user", "item", "time", "label")),
        "seconds": round(seconds, 2),
        "rows_per_s": None if existed else round(manifest.rows / seconds),
    }


def import_clicks(
    options: ClickOptions,
    folder: Path,
    *,
    reading: Progress = lambda *_: None,
    writing_rows: Progress = lambda *_: None,
    split_note: str = "",
    titles: Any = None,
) -> ClickManifest:
    """Write a store of a user's click rows and return its manifest. If it fails it leaves nothing behind.

    A finished store of the same file and options is left as it is. `split_note` is what the description of a split
    should add, `titles` a table of items with the columns id and title.
    """
    folder, began = folder.expanduser().absolute(), monotonic()
    source, columns = choose_columns(options)
    hidden = ("clicks", "memory_mib", "name")
    settings = {name: value for name, value in to_json(options).items() if name not in hidden}
    identity = {"source": source.path.name, "sha256": sha256(source.path), "options": settings}
    if os.path.lexists(folder / MANIFEST):
        manifest = read_manifest(folder)
        if manifest.identity != identity:
            raise DataError(
                "a dataset of this name exists already, from another file or with other options",
                where={"folder": folder},
                fix="--replace imports this file in its place; or another --name",
            )
        return manifest
    with new_folder(folder, fix=RESTART) as draft:
        with open_database(draft / "rows", memory=options.memory_mib << 20) as connection:
            bad = BadRows(source.path, options.skip_bad)
            load_file(connection, source, reading, bad, numbers=dict.fromkeys(source.columns, "DOUBLE"))
            manifest = _Build(RawRows(connection, source, options, bad), columns, options, draft).run(writing_rows)
        manifest.identity, manifest.split_note = identity, split_note
        if titles is not None:
            pyarrow(".parquet").write_table(titles, str(draft / TITLES))
            manifest.titles = sha256(draft / TITLES)
        manifest.seconds = round(monotonic() - began, 2)
        write_json(draft / MANIFEST, sealed(manifest))
    return manifest


class _Build:
    """The parts of an import after the rows are in the table `raw`."""

    def __init__(self, raw: RawRows, columns: Columns, options: ClickOptions, folder: Path) -> None:
        self.raw, self.connection, self.options, self.folder = raw, raw.connection, options, folder
        self.rows = raw.count()
        self.columns = decide_types(raw.connection, columns, options.separator)
        self.as_written = set[int]()
        """Columns of text whose categories are the texts."""
        if not self.columns.features:
            left = ", ".join(f"{name} ({why})" for name, why in self.columns.left_out.items())
            what = f"no column is a feature{f': {left}' if left else ''}"
            raise raw.error(what, "--categorical or --numeric COLUMNS")

    def _column(self, at: int) -> tuple[str, str, str]:
        """A column of `raw`, its type, and its name in the file."""
        return sql_name(at), self.raw.kinds[sql_name(at)], self.columns.name(at)

    def run(self, progress: Progress) -> ClickManifest:
        features, columns_of = (
            self.columns.features,
            {role: getattr(self.columns, role) for role in ("user", "item", "time")},
        )
        roles: Any = {role: None if at is None else self.columns.name(at) for role, at in columns_of.items()}
        label_at, time_at = self.columns.label, self.columns.time
        label_name = self.columns.name(label_at)
        label, threshold = self.raw.positive(sql_name(label_at), label_name, is_rating=self.columns.is_rating)
        more = {"label": f"({label})::UTINYINT"}
        if time_at is not None:
            more["time"], _ = self.raw.time(sql_name(time_at), first=-LAST_SECOND)
        for at in (at for at, how in features.items() if how == "numeric"):
            column, kind, name = self._column(at)
            wrong, fix = sql.no_number(column, kind), f"--categorical {name} takes text as it is"
            self.raw.refuse(wrong, column, f"column {name!r}:", "a number", fix)
        self.raw.leave_out()
        self.rows = self.raw.count()
        manifest = ClickManifest(
            format=FORMAT,
            version=VERSION,
            name=self.options.name,
            rows=self.rows,
            positives=0,
            label=Label(label_name, threshold, [*self.options.positives]),
            columns=[self._feature(at) for at in features],
            separator=self.options.separator,
            **roles,
            times=None,
            left_out=self.columns.left_out,
            min_count=self.options.min_count,
            arrays={},
            skipped_rows=self.raw.bad.skipped,
            digest="",
            identity={},
            seconds=0.0,
            split_note="",
        )
        same = [sql_name(at) for at in (*columns_of.values(), label_at) if at is not None]
        if len(same) == len(columns_of) + 1:
            different = self.raw.row(f"count(*) FROM (SELECT DISTINCT {', '.join(same)} FROM raw)")[0]
            manifest.repeated = self.rows - different
        manifest.arrays = self._write(manifest, more, progress)
        self._require_both_labels(manifest.positives, threshold)
        values = as_json(manifest)
        decide = json.dumps([values[name] for name in _DECIDE], sort_keys=True)
        manifest.digest = hashlib.sha256(decide.encode()).hexdigest()
        return manifest

    def _require_both_labels(self, positives: int, threshold: float | None) -> None:
        if positives in (0, self.rows):
            which, name = "every row" if positives else "no row", self.columns.name(self.columns.label)
            why = "" if threshold is None else f" (from {threshold:g} on a rating is a click)"
            fix = "--positive-from another number" if threshold is not None else "name another --label"
            raise self.raw.error(f"{which} is a click by the label {name!r}{why}: nothing can be learned", fix)

    def _feature(self, at: int) -> ColumnFacts:
        """Facts about a feature; of a categorical one the vocabulary is written."""
        (column, kind, name), how = self._column(at), self.columns.features[at]
        if how == "numeric":
            return ColumnFacts(name=name, kind=how, missing=0)
        facts = ColumnFacts(name=name, kind=how, missing=0, slots=1)
        try:
            values = require_categories(self.connection, "raw", facts, column, kind)
        except DataError as error:
            raise self.raw.error(error.what, error.fix or "") from None
        # There are far fewer different texts than rows.
        query = f"SELECT {column} AS text, count(*) AS count FROM raw GROUP BY text"
        self.connection.execute(f"CREATE OR REPLACE TEMP TABLE texts AS {query}")
        one = sql.category("text", kind)
        several = sql.categories("text", kind, self.options.separator)
        each = f"SELECT {f'unnest({several})' if how == 'multi' else one} AS value, count FROM texts"
        # A single value has a text at least.
        texts = self.raw.row("count(*) FROM texts")[0]
        if not self.options.hash and (how == "multi" or not self._has_room(texts)):
            self._require_room(name, self.raw.row(f"approx_count_distinct(value) FROM ({each})")[0])
        query = f"SELECT value, sum(count) AS count FROM ({each}) WHERE value IS NOT NULL GROUP BY value"
        if how != "multi" and sql.is_text(kind):
            other = f"text IS NOT NULL AND {one} IS DISTINCT FROM text"
            if not self.raw.row(f"count(*) FROM texts WHERE {other}")[0]:
                self.as_written.add(at)
                query = "SELECT text AS value, count FROM texts WHERE text IS NOT NULL"
        self.connection.execute(f"CREATE OR REPLACE TEMP TABLE seen AS {query}")
        values = sql.values_in(self.connection, "seen") if values == "text" else values
        if how == "multi":
            longest, cut, missing = self.raw.row(
                f"max(length), sum(greatest(0, length - {MOST_SLOTS}) * count), sum((length = 0)::INT * count) FROM "
                f"(SELECT len({sql.keys('several', values)}) AS length, count FROM "
                f"(SELECT {several} AS several, count FROM texts))"
            )
            facts = replace(facts, slots=max(1, min(MOST_SLOTS, longest)), cut=int(cut))
        else:
            missing = self.rows - self.raw.row("coalesce(sum(count), 0) FROM seen")[0]
        facts = replace(facts, values=values, missing=int(missing))
        if self.options.hash:
            return replace(facts, buckets=self.options.hash - 2)
        few, rows = self.raw.row(f"count(*), coalesce(sum(count), 0) FROM seen WHERE count < {self.options.min_count}")
        facts = replace(facts, rare=few, rare_share=float(rows) / self.rows)
        query = (
            f"SELECT min(value) AS value, nullif(key, min(value)) AS key, sum(count) AS count "
            f"FROM (SELECT *, {sql.key('value', values)} AS key FROM seen) GROUP BY key ORDER BY count DESC, value"
        )
        if values == "text":
            query = "SELECT value, NULL::VARCHAR AS key, count FROM seen ORDER BY count DESC, value"
        vocabulary = write_vocabulary(self.connection, query, self.folder / f"vocabulary-{at:03d}.parquet")
        return replace(facts, vocabulary=vocabulary)

    def _has_room(self, distinct: int) -> bool:
        """Whether so many values fit into memory; one takes about 100 bytes."""
        return distinct * 100 <= self.options.memory_mib << 18

    def _require_room(self, name: str, distinct: int) -> None:
        """Refuse a vocabulary that does not fit into memory with its lookup."""
        if not self._has_room(distinct):
            raise self.raw.error(
                f"column {name!r} has about {distinct:,} categories, too many to list in "
                f"{self.options.memory_mib:,} MiB",
                "--hash 1000000 hashes categories to 1,000,000 rows; or a larger --memory-mib",
            )

    def _write(self, manifest: ClickManifest, more: dict[str, str], progress: Progress) -> Arrays:
        """Write the arrays; `more` is SQL for the label and the time."""
        columns = StoredColumns.of(self.folder, manifest)
        kinds = self.raw.kinds | {sql_name(at): sql.CATEGORY for at in self.as_written}
        inputs = [(sql_name(at), kinds[sql_name(at)]) for at in self.columns.features]
        query = selection(columns, inputs, "raw", more=more)
        # Wide tables have fewer rows at once, so that their text stays within the memory limit.
        at_once = min(_PIECE, 1 << (_VALUES_AT_ONCE // (1 + len(inputs))).bit_length() - 1)

        def pieces() -> Iterator[dict[str, NDArray[Any]]]:
            batches = self.connection.sql(query).to_arrow_reader(min(at_once, 1 << 16))
            tables = (pyarrow().Table.from_batches([batch]) for batch in batches)
            done = 0
            for table in in_blocks(tables, at_once):
                arrays = stored_arrays(columns, table) | {"labels": numbers_of(table["label"]).astype(np.uint8)}
                arrays |= {"times": numbers_of(table["time"]).astype(np.int64)} if "time" in more else {}
                _describe(manifest, arrays)
                yield arrays
                done += len(table)
                progress(done, self.rows)

        return write_arrays(self.folder, manifest.layout, pieces())


def _describe(manifest: ClickManifest, arrays: dict[str, NDArray[Any]]) -> None:
    """Add what some rows contain to the description."""
    manifest.positives += int(arrays["labels"].sum())
    if "times" in arrays:
        ends = int(arrays["times"].min()), int(arrays["times"].max())
        first, last = manifest.times or ends
        manifest.times = min(first, ends[0]), max(last, ends[1])
    numbers = [index for index, one in enumerate(manifest.columns) if one.kind == "numeric"]
    for index, values in zip(numbers, arrays["dense"].T):
        one, there = manifest.columns[index], values[~np.isnan(values)]
        one = manifest.columns[index] = replace(one, missing=one.missing + len(values) - len(there))
        if len(there):
            least, most = float(there.min()), float(there.max())
            if one.least is not None and one.most is not None:
                least, most = min(least, one.least), max(most, one.most)
            manifest.columns[index] = replace(one, least=least, most=most)
