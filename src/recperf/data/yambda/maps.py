"""Artists and albums of items from the two maps of raw Yambda.

Shapes: I items of the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..rows import pyarrow
from .raw import AGAIN, nulls, parquet_file, reading
from .schema import MOST_ID

MAP_ROWS = 1 << 20
SPARSE, SPARE_ITEMS = 4, 1 << 20
"""Ids must be below `SPARSE` times the rows of the longer map, plus `SPARE_ITEMS`. Yambda's maps have a row for every
id. A damaged id is usually much larger, and a catalogue of that length would use all memory."""


def catalogue(artists: Path, albums: Path) -> NDArray[np.uint32]:
    """Artist and album of every item, 0 if unknown; of several rows of an item the last counts."""
    maximum = {path: _largest_item(path) for path in (artists, albums)}
    bound = SPARSE * max(rows for rows, _, _ in maximum.values()) + SPARE_ITEMS
    for path, (_, largest, row) in maximum.items():
        if largest >= bound:
            raise DataError(
                f"row {row:,}: item_id is {largest:,}; maps as long as these have ids below {bound:,}",
                where={"file": path, "row": row},
                fix=f"{AGAIN}; recperf data import reads events with such ids",
            )
    length = 1 + max(largest for _, largest, _ in maximum.values())
    catalogue_I2 = np.zeros((length, 2), np.uint32)
    for column, (path, name) in enumerate(((artists, "artist_id"), (albums, "album_id"))):
        for items, values in _map_rows(path, name):
            catalogue_I2[items, column] = values
    return catalogue_I2


def _largest_item(path: Path) -> tuple[int, int, int]:
    """Number of rows of a map, its largest item, and the row of that item, counted from 1."""
    rows, largest, at = 0, 0, 0
    for items, _ in _map_rows(path, "item_id"):
        place = int(np.argmax(items)) if len(items) else 0
        if len(items) and items[place] > largest:
            largest, at = int(items[place]), rows + place + 1
        rows += len(items)
    if not largest:
        raise DataError("this map has no items", where={"file": path}, fix=AGAIN)
    return rows, largest, at


def _map_rows(path: Path, name: str) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Items and one column of a map, in chunks."""
    arrow = pyarrow()
    row = 0
    with reading(path), parquet_file(path) as file:
        types = dict(zip(file.schema_arrow.names, file.schema_arrow.types))
        for required in ("item_id", name):
            if required not in types or not arrow.types.is_integer(types[required]):
                actual = types.get(required, "missing")
                raise DataError(f"column {required} is {actual}, not uint32", where={"file": path}, fix=AGAIN)
        for batch in file.iter_batches(MAP_ROWS, columns=list(dict.fromkeys(("item_id", name)))):
            yield _ids(path, batch, "item_id", row), _ids(path, batch, name, row)
            row += len(batch)


def _ids(path: Path, batch: Any, name: str, row: int) -> NDArray[np.int64]:
    column = batch.column(name)
    values = column.fill_null(0).to_numpy(zero_copy_only=False)
    invalid = nulls(column) | (values < 0) | (values > MOST_ID)
    if invalid.any():
        place = int(np.argmax(invalid))
        raise DataError(
            f"row {row + place + 1:,}: {name} is {column[place].as_py()}; it must be 0 to {MOST_ID:,}",
            where={"file": path, "row": row + place + 1},
            fix=AGAIN,
        )
    return np.asarray(values, dtype=np.int64)
