"""Number the ids of the table `events`, list what they were, and build the catalogue of items."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import DataError
from ....files import writing
from ....stop import poll
from ...user_files.database import RESTART, column_types, fetch_row
from ..import_options import ImportOptions
from ..manifest import Originals
from .convert import OPTIONAL_ROLES

_AT_ONCE = 1 << 16


def number_ids(connection: Any, role: str) -> None:
    """Replace a role's ids in `events` by 1, 2 and so on in ascending order; the table `<role>_ids` has both."""
    connection.execute(
        f"CREATE TABLE {role}_ids AS SELECT value, (row_number() OVER ())::UINTEGER AS id FROM "
        f"(SELECT DISTINCT {role}_id AS value FROM events WHERE {role}_id IS NOT NULL ORDER BY value)"
    )
    connection.execute(
        f"CREATE TABLE numbered AS SELECT events.* REPLACE (id AS {role}_id) "
        f"FROM events LEFT JOIN {role}_ids ON value = {role}_id"
    )
    connection.execute("DROP TABLE events")
    connection.execute("ALTER TABLE numbered RENAME TO events")


def write_originals(connection: Any, role: str, path: Path) -> Originals:
    """Write one JSON value per line, so that line k has what id k was, and describe the file."""
    digest, lines = hashlib.sha256(), 0
    encode = json.JSONEncoder(ensure_ascii=False).encode
    kind = "text" if column_types(connection, f"{role}_ids")["value"] == "VARCHAR" else "number"
    result = connection.execute(f"SELECT value FROM {role}_ids ORDER BY id")
    with writing(path, fix=RESTART), path.open("wb") as file:
        while values := result.fetchmany(_AT_ONCE):
            poll()
            block = "".join(f"{encode(value)}\n" for (value,) in values).encode()
            lines += len(values)
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return Originals(file=path.name, lines=lines, kind=kind, sha256=digest.hexdigest())


def catalogue(connection: Any, options: ImportOptions) -> tuple[NDArray[np.uint32], dict[str, int]]:
    """The artist and album of every item, and how many items had several: the last in the file counts."""
    items, largest = fetch_row(connection, "SELECT count(DISTINCT item_id), max(item_id) FROM events")
    if (largest + 1) * 8 > options.memory // 2:
        raise DataError(
            f"item {largest:,} would need a catalogue of {(largest + 1) * 8 >> 20:,} MiB for {items:,} items",
            where={"file": options.events},
            fix="--ids dense, or a larger --memory-mib",
        )
    catalogue_I2, several = np.zeros((largest + 1, 2), np.uint32), {}
    stored = column_types(connection, "events")
    for position, role in enumerate(OPTIONAL_ROLES):
        if f"{role}_id" not in stored:
            continue
        query = f"""
            SELECT item_id, arg_max({role}_id, row)::UINTEGER, min({role}_id) <> max({role}_id)
            FROM events WHERE {role}_id IS NOT NULL GROUP BY item_id"""
        several[f"{role}s"] = 0
        for batch in connection.sql(query).to_arrow_reader(_AT_ONCE):
            item, last, differs = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
            catalogue_I2[item, position] = last
            several[f"{role}s"] += int(differs.sum())
    return catalogue_I2, several
