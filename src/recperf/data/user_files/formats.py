"""Files of columns with types, each format declared once: how it begins, and how its columns and rows are read.

To add a format, write it here; text formats are in `text_rows.py` and `load.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..rows import pyarrow

ROWS = 1 << 16
"""Rows of a Parquet file that are read at a time."""


Opened = tuple[Any, int, Callable[[list[str]], Iterator[Any]]]
"""The schema, the number of rows, and a function that returns batches of some columns."""


@dataclass(frozen=True, kw_only=True)
class ColumnarFormat:
    name: str
    title: str
    magic: bytes
    """The first bytes of a file."""
    endings: tuple[str, ...]
    open: Callable[[Path], AbstractContextManager[Opened]]


@contextmanager
def _parquet(path: Path) -> Iterator[Opened]:
    # pyarrow verifies the checksums of pages, DuckDB does not.
    with pyarrow(".parquet").ParquetFile(str(path), buffer_size=1 << 20, page_checksum_verification=True) as file:

        def batches(names: list[str]) -> Iterator[Any]:
            return iter(file.iter_batches(ROWS, columns=names, use_threads=False))

        yield file.schema_arrow, file.metadata.num_rows, batches


FORMATS = {
    one.name: one
    for one in (
        ColumnarFormat(name="parquet", title="Parquet", magic=b"PAR1", endings=(".parquet", ".pq"), open=_parquet),
    )
}
LONGEST_MAGIC = max(len(one.magic) for one in FORMATS.values())
