"""The reference's parquet files read in order, and compared with what they should hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..raw import READ_AHEAD, need_pyarrow, reading
from ..schema import EVENT_TYPES
from ..store import EventStore
from .cache import wrong
from .sessions import SCHEMAS, TEST_EVENTS, known_users

_ROWS = 1 << 14
_NOT_IN_A_CACHE = "track_length_seconds"


class SessionRows:
    """A file whose rows are asked for in its order."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self._batches, self._held = _batches(path), need_pyarrow().table({})

    def compare(self, columns: dict[str, Any]) -> None:
        """The next rows must be these: values, or for lists their edges and values. Null is 0."""
        count = len(columns["uid"])
        table = self._take(count)
        for name, content in columns.items():
            edges, expected = (content[0], content[1]) if isinstance(content, tuple) else (None, content)
            if name == _NOT_IN_A_CACHE:
                continue
            found = table.column(name).combine_chunks()
            if edges is not None:
                lengths = need_pyarrow().compute.list_value_length(found).fill_null(-1).to_numpy(zero_copy_only=False)
                if not np.array_equal(lengths, np.diff(edges)):
                    raise self._wrong(name)
                found = found.flatten()
            if not np.array_equal(found.fill_null(0).to_numpy(zero_copy_only=False), expected):
                raise self._wrong(name)
        self.rows += count

    def end(self) -> None:
        """There must be no more."""
        if len(self._held) or any(len(batch) for batch in self._batches):
            raise wrong(self.path, f"has more than the {self.rows:,} rows the cache makes")

    def _take(self, count: int) -> Any:
        arrow, parts, missing = need_pyarrow(), [self._held], count - len(self._held)
        while missing > 0:
            batch = next(self._batches, None)
            if batch is None:
                raise wrong(self.path, "has fewer rows than the cache makes")
            parts.append(arrow.Table.from_batches([batch]))
            missing -= len(batch)
        table = arrow.concat_tables([part for part in parts if len(part)])
        self._held = table.slice(count)
        return table.slice(0, count)

    def _wrong(self, name: str) -> Exception:
        return wrong(self.path, f"has other {name} than the cache, in a row after row {self.rows:,}")


def check_test_events(path: Path, store: EventStore, split: dict[str, Any]) -> int:
    """Whether each event of the test day can be one. Their number."""
    low, high = (split["test_start"], split["test_end"]) if split else (0, 1 << 32)
    rows = 0
    for batch in _batches(path):
        for name in ("uid", "timestamp", "item_id", "is_organic", "event_type"):
            if batch.column(name).null_count:
                raise wrong(path, f"has an event without {name}, in a row after row {rows:,}")
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
                raise wrong(
                    path, f"has {name} {columns[name][np.argmin(possible)]} in row {rows + 1 + np.argmin(possible):,}"
                )
        rows += len(batch)
    return rows


def _batches(path: Path) -> Iterator[Any]:
    arrow = need_pyarrow()
    import pyarrow.compute  # noqa: F401

    how = {"buffer_size": READ_AHEAD, "pre_buffer": False, "page_checksum_verification": True}
    with reading(path), arrow.parquet.ParquetFile(path, **how) as file:
        _require_schema(path, file.schema_arrow)
        yield from file.iter_batches(_ROWS)


def _require_schema(path: Path, schema: Any) -> None:
    """All columns the reference gives the file, lists of any kind where it has lists, integers in them."""
    types = need_pyarrow().types
    for name, kind in SCHEMAS[path.name].items():
        if name not in schema.names:
            raise wrong(path, f"has no column {name}")
        found = schema.field(name).type
        is_list = types.is_list(found) or types.is_large_list(found)
        if is_list != (kind[0] == "[") or not types.is_integer(found.value_type if is_list else found):
            raise wrong(path, f"has {name} as {found}")
