"""Compares the reference's parquet files with the rows that follow from a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..raw import need_pyarrow, parquet_file, reading
from ..schema import EVENT_TYPES
from ..store import EventStore
from .cache import unusable
from .sessions import SCHEMAS, TEST_EVENTS, known_users

_ROWS = 1 << 14
_NOT_IN_A_CACHE = "track_length_seconds"


class SessionRows:
    """A parquet file whose rows are compared in their order."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self._batches, self._rest = _batches(path), need_pyarrow().table({})

    def compare(self, columns: dict[str, Any]) -> None:
        """Compare the next rows with columns of values or, for lists, of offsets and values. Null counts as 0."""
        count = len(columns["uid"])
        table = self._take(count)
        for name, content in columns.items():
            edges, expected = (content[0], content[1]) if isinstance(content, tuple) else (None, content)
            if name == _NOT_IN_A_CACHE:
                continue
            actual = table.column(name).combine_chunks()
            if edges is not None:
                lengths = need_pyarrow().compute.list_value_length(actual).fill_null(-1).to_numpy(zero_copy_only=False)
                if not np.array_equal(lengths, np.diff(edges)):
                    raise self._differs(name)
                actual = actual.flatten()
            if not np.array_equal(actual.fill_null(0).to_numpy(zero_copy_only=False), expected):
                raise self._differs(name)
        self.rows += count

    def end(self) -> None:
        """Require that the file has no more rows."""
        if len(self._rest) or any(len(batch) for batch in self._batches):
            raise unusable(self.path, f"has more than the {self.rows:,} rows the cache makes")

    def _take(self, count: int) -> Any:
        arrow, parts, missing = need_pyarrow(), [self._rest], count - len(self._rest)
        while missing > 0:
            batch = next(self._batches, None)
            if batch is None:
                raise unusable(self.path, "has fewer rows than the cache makes")
            parts.append(arrow.Table.from_batches([batch]))
            missing -= len(batch)
        table = arrow.concat_tables([part for part in parts if len(part)])
        self._rest = table.slice(count)
        return table.slice(0, count)

    def _differs(self, name: str) -> Exception:
        return unusable(self.path, f"has other {name} than the cache, in a row after row {self.rows:,}")


def check_test_events(path: Path, store: EventStore, split: dict[str, Any]) -> int:
    """Check the ranges of all values of the test day. Returns the number of events."""
    low, high = (split["test_start"], split["test_end"]) if split else (0, 1 << 32)
    rows = 0
    for batch in _batches(path):
        for name in ("uid", "timestamp", "item_id", "is_organic", "event_type"):
            if batch.column(name).null_count:
                raise unusable(path, f"has an event without {name}, in a row after row {rows:,}")
        columns = {
            name: batch.column(name).fill_null(0).to_numpy(zero_copy_only=False) for name in SCHEMAS[TEST_EVENTS]
        }
        times = columns["timestamp"]
        for name, possible in (
            ("uid", known_users(columns["uid"], store.user_ids_U)),
            ("timestamp", (times >= low) & (times < high)),
            ("item_id", columns["item_id"] < store.items),
            ("is_organic", columns["is_organic"] <= 1),
            ("event_type", columns["event_type"] < len(EVENT_TYPES)),
        ):
            if not possible.all():
                raise unusable(
                    path, f"has {name} {columns[name][np.argmin(possible)]} in row {rows + 1 + np.argmin(possible):,}"
                )
        rows += len(batch)
    return rows


def _batches(path: Path) -> Iterator[Any]:
    with reading(path), parquet_file(path) as file:
        _require_schema(path, file.schema_arrow)
        yield from file.iter_batches(_ROWS)


def _require_schema(path: Path, schema: Any) -> None:
    """Require the reference's columns: integers, or lists of integers where the reference has lists."""
    types = need_pyarrow().types
    for name, kind in SCHEMAS[path.name].items():
        if name not in schema.names:
            raise unusable(path, f"has no column {name}")
        actual = schema.field(name).type
        is_list = types.is_list(actual) or types.is_large_list(actual)
        if is_list != (kind[0] == "[") or not types.is_integer(actual.value_type if is_list else actual):
            raise unusable(path, f"has {name} as {actual}")
