"""Imported clicks outside recperf: inputs computed from an export alone are the model's own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recperf.data.click_store.imported import ImportedClicks
from recperf.data.click_store.imports import import_clicks
from recperf.data.click_store.options import ClickOptions
from recperf.data.config import SplitConfig
from recperf.execution import exporting
from recperf.execution.serving import Export
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.train.config import TrainConfig
from recperf.train.device import choose
from recperf.workloads.click_serve import ServedImported

OUTSIDE = "../../outside"


def served(folder: Path, **options: Any) -> ServedImported:
    """An untrained model of made-up clicks, of which one column is named like a path."""
    draw, rows = np.random.default_rng(5), 300
    places = np.array(["Rome", "Oslo", "São Paulo", ""])[draw.integers(0, 4, rows)]
    places[:2] = ["once", "once"]
    table = pa.table({
        OUTSIDE: places,
        "zip": np.array(["00501", "10001", "02134", "1.50"])[draw.integers(0, 4, rows)],
        "tags": ["|".join(sorted(draw.choice(["a", "b", "c"], draw.integers(0, 4), replace=False))) for _ in places],
        "price": [None if one < 0 else one for one in draw.normal(40, 30, rows).round(2)],
        "clicked": draw.integers(0, 2, rows),
    })  # fmt: skip
    pq.write_table(table, folder / "clicks.parquet")
    columns = {"label": "clicked", "categorical": f"{OUTSIDE},zip", "numeric": "price", "multi": "tags", "min_count": 3}
    import_clicks(ClickOptions(clicks=folder / "clicks.parquet", **{**columns, **options}), folder / "store")
    clicks = ImportedClicks(folder / "store", SplitConfig())
    config = DLRMConfig(
        features=clicks.keys, rows=clicks.table_rows, dim=4, bottom=(len(clicks.dense_names), 4), top=(4, 1),
        table_init_std=1.0,
    )  # fmt: skip
    settings = choose(TrainConfig(device="cpu"), largest_product_flops=1)
    return ServedImported(clicks, DLRM(config), settings)


ROWS = pa.table({
    OUTSIDE: ["Rome", " Oslo ", "NA", None, "once", "never"],
    "zip": ["501", "00501", "1.5", None, "2134", "7"],
    "tags": ["b|a", "", "c|d|c", None, "a", "null"],
    "price": [12.5, None, -3.0, 1e6, 0.0, 40.0],
})  # fmt: skip


def inputs_of(row: dict[str, Any], content: Export, folder: Path) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    """The dense features and the embeddings of a row, from nothing but what an export has."""
    encoding = json.loads(json.dumps(content.encoding))

    def text(value: str | None) -> str | None:
        return None if value is None or value.strip() in encoding["missing"] else value.strip()

    dense = []
    for one in encoding["dense"]:
        x = row[one["x"]]
        if one["name"].endswith(" missing"):
            dense.append(float(x is None))
        elif x is None:
            dense.append(0.0)
        else:
            dense.append((np.sign(x) * np.log1p(abs(np.float32(x))) - one["mean"]) / one["deviation"])
    embeddings = []
    for number, (table, one) in enumerate(zip(content.tables, encoding["sparse"])):
        entries = pq.read_table(folder / exporting._write_table(folder, table, number)["file"]).to_pylist()
        values = [text(row[one["name"]])]
        if one["kind"] == "multi":
            parts = {text(part) for part in (row[one["name"]] or "").split(encoding["separator"])} - {None}
            values = list(sorted(parts, key=str)[: one["most"]]) or [None]
        embeddings.append(np.sum([embedding(entries, one, value) for value in values], 0))
    return np.clip(dense, -10, 10).tolist(), embeddings


def key(value: str | None, column: dict[str, Any]) -> str | None:
    """What a text is compared by, as the export's `key` says."""
    if value is None or column["values"] == "text":
        return value
    return repr(float(value)).removesuffix(".0")


def embedding(entries: list[dict[str, Any]], column: dict[str, Any], value: str | None) -> Any:
    value = key(value, column)
    if column["hashed"]:
        digest = hashlib.blake2b(f"{column['name']}\0{value}".encode(), digest_size=8).digest()
        return entries[1 if value is None else 2 + int.from_bytes(digest, "little") % (len(entries) - 2)]["embedding"]
    keys = [key(one["id"], column) for one in entries]
    kind = "missing" if value is None else "id" if value in keys else "other"
    return next(one["embedding"] for one, name in zip(entries, keys) if one["entry"] == kind and name in (value, None))


@pytest.mark.parametrize("options", [{}, {"hash": (20,)}])
def test_inputs_follow_from_the_export_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    model = served(tmp_path, **options)
    encoded = model.encode({name: ROWS[name] for name in ROWS.column_names})
    if not options:
        # A rare category of the training rows is known; one of several that no row has is not.
        assert {name: one.rows for name, one in encoded.unknown.items()} == {OUTSIDE: 1, "zip": 1, "tags": 1}
    with torch.no_grad():
        content = model.export(ROWS, encoded.inputs)
    folder = tmp_path / "a" / "export"
    folder.mkdir(parents=True)
    for at, row in enumerate(ROWS.to_pylist()):
        dense, embeddings = inputs_of(row, content, folder)
        np.testing.assert_allclose(content.inputs["dense"][at], dense, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(content.inputs["embeddings"][at], embeddings, rtol=1e-6)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["export"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "clicks.parquet", "store"]
    # The check of the program: rounding passes, a weight that is one part in a thousand off does not.
    expected = exporting._expected_difference(content, "float32")
    with torch.no_grad():
        assert (content.program(**content.inputs) - content.logits_B).abs().max() <= expected
        next(content.program.parameters()).mul_(1.001)
        assert (content.program(**content.inputs) - content.logits_B).abs().max() > expected
