"""Scores the rows of a file or of a frame: streamed, and a file of scores is complete or not there.

Frames are those of pandas, polars or pyarrow, or dicts of arrays; none of the libraries is required.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

import numpy as np

from ..data.files.load import RowFile
from ..data.tables import BadRow, Table, Unknown, add_unknown, in_blocks, pyarrow
from ..errors import DataError, UsageError, did_you_mean
from ..files import atomic_file, require_writable
from ..jsonfile import as_json
from ..outputs import output_file
from ..stop import poll
from .serving import SCORES, ModelFacts, TrainedModel, require_known, score_columns

GROUP_ROWS = 1 << 16
"""Rows of a row group of the output."""
Progress = Callable[[int, int | None], None]
"""Called with the rows scored so far, and with all of them where that is known."""
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv"}
_LONGEST_HEAD = 1 << 20
"""Characters of the first line of a CSV file that is looked at."""


class ScoreSummary(ModelFacts, kw_only=True):
    rows: int
    unknown: dict[str, int]
    """Rows with an id that the training data does not have, by column."""
    unread: str
    """Says which columns of the input the model does not read."""
    seconds: float
    rows_per_s: float
    output: str


def score_file(
    model: TrainedModel,
    source: Path | None,
    output: Path,
    *,
    columns: Sequence[str] | None = None,
    allow_unknown: bool = False,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> ScoreSummary:
    """Score the rows of a file, or without one the held-out rows of the run, and write them with their scores.

    `columns` are the input's columns to write, by default all. `allow_unknown` accepts a file most of whose ids are
    unknown; `force` replaces a file that is no table of scores.
    """
    if source is not None and os.path.realpath(source) == os.path.realpath(output):
        raise UsageError("the output is the input", fix="write the scores to another file")
    place = table_file(output, SCORES, force=force)
    require_writable(place.parent)
    scored, total, unread = (_held_out(model), None, "") if source is None else _of_file(model, source, columns)
    began, rows = perf_counter(), 0
    unknown: dict[str, Unknown] = {}

    def tables() -> Iterator[Table]:
        nonlocal rows, unknown
        for table, of_table in scored:
            rows, unknown = rows + len(table), add_unknown(unknown, of_table)
            yield table
            progress(rows, total)
            poll()
        if not rows:
            raise DataError("the file has no rows", where={"file": source}, fix="name a file with rows to score")
        require_known(unknown, 0 if allow_unknown else rows)

    write_rows(place, tables())
    seconds = perf_counter() - began
    return ScoreSummary(
        **as_json(model.facts),
        rows=rows,
        unknown={column: one.rows for column, one in unknown.items()},
        unread=unread,
        seconds=round(seconds, 3),
        rows_per_s=round(rows / max(seconds, 1e-9), 1),
        output=str(output),
    )


Scored = Iterator[tuple[Table, Mapping[str, Unknown]]]
"""Tables of rows with their scores, and by column the rows with an unknown id."""


def _held_out(model: TrainedModel) -> Scored:
    for table, inputs in model.served.held_out(model.seed):
        yield with_columns(table, score_columns(model.logits(inputs), model.served.names())), {}


def _of_file(model: TrainedModel, path: Path, columns: Sequence[str] | None) -> tuple[Scored, int | None, str]:
    """The scored rows of a file, how many it has where that is known, and which columns are not read."""
    file = RowFile(path)
    roles, written = model.columns(file.names), list(file.names if columns is None else columns)
    for name in written:
        if name not in file.names:
            raise UsageError(f"--columns: the file has no column {name!r}{did_you_mean(name, file.names)}")

    def scored() -> Scored:
        first = 0
        for block in file.blocks(list(dict.fromkeys([*written, *roles.values()])), whole_batches(model)):
            try:
                logits_N, unknown = model.score(block, roles)
            except BadRow as error:
                raise error.after(first, path) from None
            yield with_columns(block.select(written), score_columns(logits_N, roles.values())), unknown
            first += len(block)
        if file.source.has_changed():
            raise DataError("the file changed while it was scored", where={"file": path}, fix="score it again")

    return scored(), file.rows(), model.unread(file.names)


def whole_batches(model: TrainedModel) -> int:
    """Rows of a block: whole batches, so that each batch has the rows that it would have without blocks."""
    batch = model.served.batch_size
    return batch * max(1, model.served.block_rows // batch)


def table_file(output: Path, last: Sequence[str], *, force: bool = False) -> Path:
    """Where a table is written whose `last` columns are these: a new file or, as every night, an older such table."""

    def ours(path: Path) -> bool:
        names = [name.removeprefix("recperf_") for name in _columns_of(path)[-len(last) :]]
        return names == list(last)

    what = "a table of this command"
    return output_file(output, endings=tuple(_SUFFIXES), ours=ours, what=what, option="--output", force=force)


def _columns_of(path: Path) -> list[str]:
    """The names of the columns of a table; none where a file is no table."""
    try:
        if _SUFFIXES[path.suffix.lower()] == "parquet":
            return list(pyarrow(".parquet").read_schema(str(path)).names)
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            return next(csv.reader([file.readline(_LONGEST_HEAD)]), [])
    except (OSError, ValueError, csv.Error):
        return []


def write_rows(output: Path, tables: Iterable[Table]) -> None:
    """Write tables of one schema as a Parquet or CSV file, complete or not at all. A table is written while the next
    one is made; how the rows come in tables does not change the file."""
    with atomic_file(output) as file, ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        writer: Any = None
        written: Future[None] | None = None
        for block in in_blocks(tables, GROUP_ROWS):
            if writer is None:
                form = _SUFFIXES[output.suffix.lower()]
                writer = stack.enter_context(_writer(form, file, block.schema))
            if written is not None:
                written.result()
            written = thread.submit(writer.write_table, block.combine_chunks())
        if written is not None:
            written.result()


def _writer(form: str, file: BinaryIO, schema: Any) -> Any:
    """A writer of tables of one schema into a file."""
    if form == "parquet":
        # A dictionary of numbers that hardly repeat would only cost time.
        repeating = [name for name in schema.names if name not in SCORES]
        return pyarrow(".parquet").ParquetWriter(file, schema, use_dictionary=repeating)
    nested = [field.name for field in schema if pyarrow().types.is_nested(field.type)]
    if nested:
        raise UsageError(
            f"column {nested[0]!r} has lists or structures, which CSV cannot hold",
            fix="write a .parquet file, or name the other columns with --columns",
        )
    return pyarrow(".csv").CSVWriter(file, schema)


def kind_of(value: Any) -> str:
    """The library of a frame or series: pandas, polars, pyarrow; or dict for anything else."""
    library = type(value).__module__.partition(".")[0]
    return library if library in ("pandas", "polars", "pyarrow") else "dict"


FRAMES = {"pandas": ("DataFrame",), "polars": ("DataFrame",), "pyarrow": ("Table", "RecordBatch")}
"""The types of each library that rows can be read from."""


def columns_of(frame: Any) -> dict[str, Any]:
    """The columns of a frame by their names, as text; whatever is not a frame is refused."""
    kind, name = kind_of(frame), type(frame).__name__
    if not isinstance(frame, Mapping) and name not in FRAMES.get(kind, ()):
        fix = "a frame of pandas or polars, a table of pyarrow, or a dict of arrays"
        raise UsageError(
            f"rows cannot be read from a {name}", fix="call its .collect() first" if name == "LazyFrame" else fix
        )
    if kind == "dict":
        names, columns = list(frame), list(frame.values())
    elif kind == "pandas":
        names, columns = list(frame.columns), [frame.iloc[:, at] for at in range(frame.shape[1])]
    else:
        names = list(frame.column_names if kind == "pyarrow" else frame.columns)
        columns = list(frame.columns if kind == "pyarrow" else frame.get_columns())
    texts = list(map(str, names))
    twice = [text for text in texts if texts.count(text) > 1] if len(set(texts)) < len(texts) else []
    if twice:
        raise DataError(f"there are several columns {twice[0]!r}", fix="rename or drop all but one")
    return dict(zip(texts, columns))


def to_table(columns: Mapping[str, Any], names: Iterable[str]) -> Table:
    """Some columns of a frame as a pyarrow table."""
    arrays = {name: array_of(columns[name], name) for name in names}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise DataError(f"the columns have different numbers of rows: {listed}", fix="give all the same number")
    return pyarrow().table(arrays)


def array_of(column: Any, name: str) -> Any:
    """A column of a frame, or a list, as an array of pyarrow. Refuses one that mixes types, whose values would be
    guessed."""
    kind, library = kind_of(column), type(column).__name__
    if (kind, library) in (("polars", "DataFrame"), ("polars", "LazyFrame"), ("pandas", "DataFrame")):
        raise UsageError(f"{name} is a {library}, not a column", fix="pass one of its columns")
    if kind == "pyarrow" and isinstance(column, (pyarrow().Array, pyarrow().ChunkedArray)):
        return column
    if isinstance(column, (str, bytes, Mapping)) or not hasattr(column, "__len__"):
        what = f"{name} is a {library}, not a column of values"
        raise UsageError(what, fix="a list, an array, or a column of a frame")
    try:
        array = column.to_arrow() if kind == "polars" else pyarrow().array(column, from_pandas=True)
        types = set(map(type, column)) if getattr(column, "dtype", "object") == "object" else set()
        # pyarrow reads True among numbers as 1.
        if not (types & {bool, np.bool_}) or pyarrow().types.is_boolean(array.type):
            return array
        problem = "it has booleans among other values"
    except (ValueError, TypeError, OverflowError, NotImplementedError) as error:
        problem = next(iter(str(error).splitlines()), type(error).__name__)
    raise DataError(f"column {name!r} has values of several types: {problem}", fix="give all values one type, or text")


def with_columns(frame: Any, columns: Mapping[str, Any]) -> Any:
    """A copy of a frame with more columns, in place of those of the same names."""
    kind = kind_of(frame)
    if kind == "pandas":
        return frame.assign(**columns)
    if kind == "polars":
        from polars import Series

        return frame.with_columns(*(Series(name, values) for name, values in columns.items()))
    if kind == "dict":
        return {**frame, **columns}
    table = pyarrow().table(frame)
    for name, values in columns.items():
        table = (table.drop_columns(name) if name in table.column_names else table).append_column(name, [values])
    return table


def as_frame(table: Table, kind: str) -> Any:
    """A pyarrow table as a frame of that kind."""
    if kind == "pandas":
        return table.to_pandas()
    if kind == "polars":
        from polars import from_arrow

        return from_arrow(table)
    return table if kind == "pyarrow" else {name: table[name].to_numpy() for name in table.column_names}
