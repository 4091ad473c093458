"""Own ids are found in the same places, few of them one by one and many together."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from recperf.data import tables
from recperf.data.tables import Ids

COLUMNS: list[Any] = [
    pa.array(["b", "7", None, " a ", "zz", "", "12", "é", "007"]),
    pa.array([7, 12, None, -5, 99, 2**62]),
    pa.array([7.0, 12.5, None, 99.0]),
    pa.array([], pa.string()),
]
IDS = [
    Ids.of("item", ["zz", "a", "7", "é", "b", "12"]),
    Ids.of("item", [99, 7, -5, 2**62, 0]),
    Ids.of("item", []),
    Ids("item", pa.array([None, 5, 7, None, 12])),
    Ids("item", pa.array(["7", None, "a", "a"])),
]


@pytest.mark.parametrize("ids", IDS, ids=lambda ids: str(ids.values.to_pylist()))
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.type))
def test_few_ids_are_found_where_many_are(ids: Ids, column: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ids.indices(column).tolist()
    monkeypatch.setattr(tables, "FEW_IDS", -1)
    assert ids.indices(column).tolist() == few
    if ids is IDS[0] and column is COLUMNS[0]:
        assert few == [4, 2, -1, 1, 0, -1, 5, 3, -1]
