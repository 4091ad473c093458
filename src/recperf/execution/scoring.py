"""Scores the rows of a file: streamed, in parts that a stopped or killed process continues from.

The parts are files in a folder beside the output, a digest and Parquet, each complete or not there. The output is
written beside them while rows are scored; a process that continues first copies the finished parts into it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

from ..data.rows import BadRow, Table, Unknown, add_unknown, in_blocks, pyarrow
from ..data.user_files.load import RowFile
from ..errors import DataError, Interrupted, Stopped, UsageError, did_you_mean
from ..files import atomic_file, read_regular, require_writable, sync_folder, write_json, writing
from ..folders import alone, remove_folder
from ..jsonfile import as_json, read_sealed, sealed
from ..stop import FLAG, poll
from ..version import __version__
from .frames import with_columns
from .serving import SCORES, ModelFacts, TrainedModel, require_known, score_columns

JOB, JOINED = "job.json", "joined"
FORM = "recperf scores", 1
OURS = rf"{re.escape(JOB)}|{JOINED}|part-\d{{12,}}\.rows"
"""Names in the folder of the parts."""
GROUP_ROWS = 1 << 16
"""Rows of a row group of the output."""
PART_SECONDS, PART_BYTES = 5.0, 1 << 26
"""A part is saved when its rows took this long or have this many bytes: about what a killed process loses."""
AGAIN = "the same command continues"
Progress = Callable[[int, int | None], None]
"""Called with the rows scored so far, and with all of them where that is known."""
_UNKNOWN = b"recperf.unknown"
_DIGEST = hashlib.sha256().digest_size
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv"}


def format_of(path: Path) -> str:
    """The format of an output, by its name."""
    form = _SUFFIXES.get(path.suffix.lower())
    if form is None:
        raise UsageError(
            f"the output {path.name!r} has no known format", fix=f"a name that ends in {', '.join(_SUFFIXES)}"
        )
    return form


class ScoreSummary(ModelFacts, kw_only=True):
    rows: int
    resumed_at: int
    """Rows that were scored before this command."""
    unknown: dict[str, int]
    """Rows with an id that the training data does not have, by column."""
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
    progress: Progress = lambda done, total: None,
) -> ScoreSummary:
    """Score the rows of a file, or without one the held-out rows of the run, and write them with their scores.

    `columns` are the input's columns to write, by default all. `allow_unknown` accepts a file most of whose ids are
    unknown.
    """
    format_of(output)
    require_writable(output.parent)
    rows = HeldOut(model) if source is None else FileRows(model, source, columns)
    if source is not None and os.path.realpath(source) == os.path.realpath(output):
        raise UsageError("the output is the input", fix="write the scores to another file")
    job = {
        "format": FORM[0], "version": FORM[1], "recperf": __version__, "checkpoint": model.digest, "data": rows.data,
        **as_json(model.facts), "input": rows.identity,
    }  # fmt: skip
    folder = output.with_name(f"{output.name}.parts")
    with alone(folder, what="scoring into this file", ours=OURS, again=AGAIN):
        parts = Parts(folder, job)
        began, before = perf_counter(), parts.rows
        try:
            with FLAG.explained("; the rows scored so far are saved", AGAIN):
                _write_scored(parts, rows, format_of(output), progress)
            if not parts.rows:
                raise DataError("the file has no rows", where={"file": source}, fix="name a file with rows to score")
            rows.require_unchanged()
            try:
                require_known(parts.unknown, 0 if allow_unknown else parts.rows)
            except DataError:
                # The same command continues if it allows them.
                parts.save()
                raise
            with writing(output, fix=AGAIN):
                os.replace(folder / JOINED, output)
                sync_folder(output.parent)
            parts.paths.clear()
        finally:
            if not parts.paths:
                remove_folder(folder, OURS)
        seconds = perf_counter() - began
    return ScoreSummary(
        **as_json(model.facts),
        rows=parts.rows,
        resumed_at=before,
        unknown={column: one.rows for column, one in parts.unknown.items()},
        seconds=round(seconds, 3),
        rows_per_s=round((parts.rows - before) / max(seconds, 1e-9), 1),
        output=str(output),
    )


def _write_scored(parts: Parts, rows: FileRows | HeldOut, form: str, progress: Progress) -> None:
    """Write the finished parts, then the rows that are scored now; what is scored when a signal stops it is saved."""
    with atomic_file(parts.folder / JOINED, fix=AGAIN) as file, RowWriter(form, file) as writer:
        for table in parts.tables():
            writer.add(table)
            poll()

        def write(table: Table, unknown: Mapping[str, Unknown]) -> None:
            writer.add(table)
            parts.add(table, unknown)

        try:
            with ThreadPoolExecutor(1) as thread:
                # A block is written while the next one is scored.
                written: Future[None] | None = None
                for table, unknown in rows.scored(parts.rows):
                    if written is not None:
                        written.result()
                        progress(parts.rows, rows.count)
                    written = thread.submit(write, table, unknown)
                    poll()
                if written is not None:
                    written.result()
        except (Stopped, Interrupted):
            parts.save()
            raise


class FileRows:
    """The rows of a file, scored in blocks."""

    def __init__(self, model: TrainedModel, path: Path, columns: Sequence[str] | None) -> None:
        if not model.served.roles:
            raise UsageError("the rows of this run are random and have no columns", fix="--held-out: the held-out rows")
        self.model, self.file = model, RowFile(path)
        self.data = model.served.data_digest
        names = self.file.names
        self.columns = model.columns(names)
        self.written = list(names if columns is None else columns)
        for name in self.written:
            if name not in names:
                raise UsageError(f"--columns: the file has no column {name!r}{did_you_mean(name, names)}")
        self.count = self.file.rows()
        source = self.file.source
        self.identity = {"file": source.path.name, "state": list(source.state), "columns": self.written}

    def scored(self, first: int) -> Iterator[tuple[Table, Mapping[str, Unknown]]]:
        read = list(dict.fromkeys([*self.written, *self.columns.values()]))
        for block in self.file.blocks(read, whole_batches(self.model), first=first):
            try:
                logits_N, unknown = self.model.score(block, self.columns)
            except BadRow as error:
                raise error.after(first, self.file.source.path) from None
            yield with_columns(block.select(self.written), score_columns(logits_N, self.columns.values())), unknown
            first += len(block)

    def require_unchanged(self) -> None:
        source = self.file.source
        if source.has_changed():
            raise DataError("the file changed while it was scored", where={"file": source.path}, fix="score it again")


class HeldOut:
    """The held-out rows of a run, scored in blocks."""

    def __init__(self, model: TrainedModel) -> None:
        self.model, self.count = model, None
        self.identity, self.data = "held-out rows", model.served.data_digest

    def scored(self, first: int) -> Iterator[tuple[Table, Mapping[str, Unknown]]]:
        for table, inputs in self.model.held_out():
            if first >= len(table):
                first -= len(table)
                continue
            scores = score_columns(self.model.logits(inputs), self.model.served.names())
            yield with_columns(table, scores), {}

    def require_unchanged(self) -> None:
        """Stores verify what they read."""


def whole_batches(model: TrainedModel) -> int:
    """Rows of a block: whole batches, so that each batch has the rows that it would have without blocks."""
    batch = model.served.batch_size
    return batch * max(1, model.served.block_rows // batch)


class Parts:
    """The finished parts of an output, and the rows of the next one. Parts of another job are removed."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.folder, self.rows = folder, 0
        self.unknown: dict[str, Unknown] = {}
        self.paths: list[Path] = []
        path, parts = folder / JOB, [*folder.glob("part-*.rows")]
        before = read_sealed(path, FORM, dict, fix=f"remove {folder}") if parts or os.path.lexists(path) else None
        if before != json.loads(json.dumps(job)):
            for part in parts:
                part.unlink()
            write_json(path, sealed(job), fix=AGAIN)
        self._job = sealed(job)["seal"]
        while os.path.lexists(part := folder / f"part-{self.rows:012d}.rows"):
            table = self._read(part)
            unknown = json.loads(table.schema.metadata[_UNKNOWN])
            self._count(len(table), {column: Unknown(*one) for column, one in unknown.items()})
            self.paths.append(part)
        self._start_part()

    def _digest(self, part: Path, content: memoryview) -> bytes:
        """Digest of a part with its place and job, so that an exchanged part is noticed as well as a damaged one."""
        digest = hashlib.sha256(f"{self._job} {part.name}".encode())
        digest.update(content)
        return digest.digest()

    def _start_part(self) -> None:
        self._tables: list[Table] = []
        self._unknown: dict[str, Unknown] = {}
        self._first, self._began = self.rows, perf_counter()

    def add(self, table: Table, unknown: Mapping[str, Unknown]) -> None:
        self._tables.append(table)
        self._unknown = add_unknown(self._unknown, unknown)
        self._count(len(table), unknown)
        size = sum(table.nbytes for table in self._tables)
        if size >= PART_BYTES or perf_counter() - self._began >= PART_SECONDS:
            self.save()

    def save(self) -> None:
        """Save the rows that no part has."""
        if not self._tables:
            return
        part = self.folder / f"part-{self._first:012d}.rows"
        table = pyarrow().concat_tables(self._tables)
        unknown = {column: [one.rows, one.examples] for column, one in self._unknown.items()}
        table = table.replace_schema_metadata({_UNKNOWN: json.dumps(unknown).encode()})
        buffer = pyarrow().BufferOutputStream()
        # As fast as the disk: a part is read once, if ever.
        pyarrow(".parquet").write_table(table, buffer, use_dictionary=False, compression="none", write_statistics=False)
        content = memoryview(buffer.getvalue())
        with atomic_file(part, fix=AGAIN) as file:
            file.write(self._digest(part, content))
            file.write(content)
        self.paths.append(part)
        self._start_part()

    def _count(self, rows: int, unknown: Mapping[str, Unknown]) -> None:
        self.rows += rows
        self.unknown = add_unknown(self.unknown, unknown)

    def tables(self) -> Iterator[Table]:
        for part in self.paths:
            yield self._read(part).replace_schema_metadata(None)

    def _read(self, part: Path) -> Table:
        try:
            content = memoryview(read_regular(part))
            if self._digest(part, content[_DIGEST:]) != content[:_DIGEST]:
                raise OSError(0, "it differs from its checksum")
        except OSError as error:
            raise DataError(
                f"{part.name} is damaged: {error.strerror or error}",
                where={"file": part},
                fix=f"remove {part.parent} and score again",
            ) from None
        return pyarrow(".parquet").read_table(pyarrow().BufferReader(pyarrow().py_buffer(content[_DIGEST:])))


class RowWriter:
    """Writes tables of one schema into a file, in blocks that do not depend on how the rows come."""

    def __init__(self, form: str, file: BinaryIO) -> None:
        self.form, self.file = form, file
        self._rest: list[Table] = []
        self._writer: Any = None

    def add(self, table: Table) -> None:
        blocks = list(in_blocks([*self._rest, table], GROUP_ROWS))
        self._rest = [blocks.pop()] if blocks and len(blocks[-1]) < GROUP_ROWS else []
        for block in blocks:
            self._write(block)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for block in self._rest if kind is None else ():
            self._write(block)
        if self._writer is not None:
            # Also after an error: otherwise Python closes it later, when the file is closed.
            self._writer.close()

    def _write(self, block: Table) -> None:
        if self._writer is None:
            self._writer = self._open(block.schema)
        self._writer.write_table(block.combine_chunks())

    def _open(self, schema: Any) -> Any:
        if self.form == "parquet":
            # A dictionary of numbers that hardly repeat would only cost time.
            repeating = [name for name in schema.names if name not in SCORES]
            return pyarrow(".parquet").ParquetWriter(self.file, schema, use_dictionary=repeating)
        nested = [field.name for field in schema if pyarrow().types.is_nested(field.type)]
        if nested:
            raise UsageError(
                f"column {nested[0]!r} has lists or structures, which CSV cannot hold",
                fix="write a .parquet file, or name the other columns with --columns",
            )
        return pyarrow(".csv").CSVWriter(self.file, schema)


def write_rows(output: Path, tables: Iterable[Table]) -> None:
    """Write tables of one schema as a Parquet or CSV file, complete or not at all."""
    with atomic_file(output, fix=AGAIN) as file, RowWriter(format_of(output), file) as writer:
        for table in tables:
            writer.add(table)
            poll()
