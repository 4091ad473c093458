"""A DuckDB database for one import: within a memory limit, with temporary files in a folder that is removed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...files import writing
from ...stop import FLAG
from ..rows import optional_package

RESTART = "the same command starts again from the beginning"
NOT_USED = "'in_clause,common_subexpressions'"
"""Optimizers of DuckDB that wide files do without: with them 100 columns of text do not fit into 1,024 MiB."""
_MAX_THREADS = 4
_BYTES_PER_THREAD = 128 << 20


def literal(text: str) -> str:
    """Quote a string for SQL."""
    return "'" + text.replace("'", "''") + "'"


def fetch_row(connection: Any, query: str) -> tuple[Any, ...]:
    # A signal interrupts only a query that runs when it comes.
    FLAG.poll()
    (row,) = connection.execute(query).fetchall()
    return tuple(row)


def column_types(connection: Any, table: str) -> dict[str, str]:
    """The type of every column of a table or table function."""
    rows = connection.execute(f"SELECT column_name, column_type FROM (DESCRIBE FROM {table})").fetchall()
    return dict(rows)


@contextmanager
def open_database(folder: Path, *, memory: int) -> Iterator[Any]:
    """Open a connection whose temporary files go to `folder`. A lack of memory or disk space is one typed error."""
    duckdb = optional_package("duckdb")
    optional_package("pyarrow")
    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, memory // _BYTES_PER_THREAD))
    with writing(folder, fix=RESTART):
        folder.mkdir()
        try:
            with duckdb.connect() as connection:
                # Half, because DuckDB counts its buffers but neither its reader's nor what Python takes from it.
                for setting, value in (
                    ("memory_limit", f"'{memory // 2} B'"),
                    ("temp_directory", literal(str(folder))),
                    ("threads", threads),
                    ("preserve_insertion_order", "true"),
                    ("enable_progress_bar", "false"),
                    ("TimeZone", "'UTC'"),
                    ("disabled_optimizers", NOT_USED),
                ):
                    connection.execute(f"SET {setting} = {value}")
                with FLAG.calling(connection.interrupt):
                    yield connection
        # pyarrow has exceptions of its own for what DuckDB reports while its rows are read.
        except (duckdb.Error, OSError, ValueError) as error:
            FLAG.poll()
            message = str(error)
            if "No space left" in message or "max_temp_directory_size" in message:
                raise OSError(errno.ENOSPC, "no space left") from error
            if isinstance(error, duckdb.OutOfMemoryException) or "Out of Memory Error" in message:
                what = f"the import does not fit into {memory >> 20:,} MiB"
                raise DataError(what, fix="a larger --memory-mib") from error
            raise
    shutil.rmtree(folder)
