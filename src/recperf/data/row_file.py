"""A user's file of rows, as pyarrow tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .rows import Table, in_blocks, pyarrow
from .user_files.load import tables_of
from .user_files.source import Source, bad_file, inspect, repeated_name


class RowFile:
    """A CSV, JSON-lines (either may be in gzip) or Parquet file of a user, whose first line names its columns.

    Columns of text files are text.
    """

    def __init__(self, path: Path) -> None:
        source = inspect(path, {}, header="yes")
        repeated = repeated_name(source.names)
        if repeated is not None:
            raise bad_file(
                source.path, f"the file has {source.names.count(repeated)} columns named {repeated!r}", "rename one"
            )
        self.source: Source = replace(source, columns={name: at for at, name in enumerate(source.names)})

    @property
    def names(self) -> list[str]:
        return self.source.names

    def rows(self) -> int | None:
        """How many rows there are, if that is known without reading them."""
        if self.source.format != "parquet":
            return None
        return int(pyarrow(".parquet").read_metadata(str(self.source.path)).num_rows)

    def blocks(self, names: Sequence[str], size: int, *, first: int = 0) -> Iterator[Table]:
        """Tables of `size` rows with these columns, the last one shorter, from row `first` on."""
        source = replace(self.source, columns={name: self.source.columns[name] for name in names})
        return in_blocks(tables_of(source), size, first=first)
