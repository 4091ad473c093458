"""A category is the same whatever it is read from: what the import saw decides, and nothing is guessed."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from recperf.data.config import SplitConfig
from recperf.data.files.load import RowFile
from recperf.data.rows.imported import ImportedClicks
from recperf.data.rows.imports import import_clicks
from recperf.data.rows.options import ClickOptions
from recperf.data.tables import Ids
from recperf.errors import RecperfError
from recperf.execution.scoring import to_table

Columns = dict[str, list[Any]]


def write(path: Path, columns: Columns) -> Path:
    """A file of the format that its name says."""
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            for row in rows:
                writer.writerow({k: "|".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})
    return path


def imported(path: Path, **options: Any) -> ImportedClicks:
    store = path.with_name(f"store of {path.name}")
    import_clicks(ClickOptions(clicks=path, **{"label": "y", "categorical": "a", "min_count": 1, **options}), store)
    return ImportedClicks(store, SplitConfig())


def clicks_of(folder: Path, values: list[Any], **options: Any) -> ImportedClicks:
    """An import of one column, whose values come several times."""
    return imported(write(folder / "a.csv", {"a": values * 20, "y": [0, 1] * (10 * len(values))}), **options)


def read(clicks: ImportedClicks, values: Any) -> list[str | None]:
    """The categories that values of column a mean; None for an unknown one."""
    rows = clicks.encode(to_table({"a": values}, ["a"]))[0]
    return [clicks.categories("a")[row] for row in rows.ids_NS[:, 0]]


def test_a_frame_of_pandas_means_what_its_csv_file_does(tmp_path: Path) -> None:
    """True and postal codes, which pandas reads as booleans and numbers."""
    columns = {"flag": ["True", "False"] * 20, "zip": ["00501", "10001", "00501", "02134"] * 10, "y": [0, 1] * 20}
    columns["price"] = ["1.50", "2.25", "10", "0.10"] * 10
    path = write(tmp_path / "a.csv", columns)
    clicks = imported(path, categorical="flag,zip,price")
    assert [one.values for one in clicks.manifest.columns] == ["boolean", "number", "number"]
    assert sorted(map(str, clicks.categories("zip")[2:])) == ["00501", "02134", "10001"]
    as_text = pd.read_csv(path, dtype=str)
    texts, typed = (clicks.encode(pa.Table.from_pandas(frame))[0] for frame in (as_text, pd.read_csv(path)))
    assert texts.ids_NS.min() >= 2
    assert np.array_equal(texts.ids_NS, typed.ids_NS)


@pytest.mark.parametrize(
    ("seen", "values", "expected"),
    [
        (["00501", "10001"], [501, 7], ["00501", None]),
        (["00501", "10001"], ["501", "0501", "00501", "x"], ["00501", "00501", "00501", None]),
        (["00501", "501"], ["501", "0501"], ["501", None]),
        (["1.5", "2"], [1.5, 2.0, float("nan")], ["1.5", "2", None]),
        (["1.5", "2"], ["1.50", "2.0", "+2", "2e0", "1.5e0"], ["1.5", "2", "2", "2", "1.5"]),
        (["0.1", "2"], np.array([0.1, 2], np.float32), ["0.1", "2"]),
        (["12345678901234567890123", "2"], ["12345678901234567890123", "012345678901234567890124"],
         ["12345678901234567890123", None]),
        ([str(2**53 + 1), str(2**53)], np.array([2**53 + 1, 2**53]), [str(2**53 + 1), str(2**53)]),
        (["True", "FALSE"], [True, False, None], ["True", "FALSE", None]),
        (["True", "FALSE"], ["TRUE", "false", "1"], ["True", "FALSE", None]),
        (["True", "maybe"], [True, False], ["True", None]),
        (["00501", "north"], [501.0, 7.0], ["00501", None]),
        (["-0", "1"], [0.0, -0.0, 0], ["-0", "-0", "-0"]),
        (["x", "y"], [None, None], [None, None]),
    ],
)  # fmt: skip
def test_categories_are_compared_as_the_import_saw_them(
    tmp_path: Path, seen: list[str], values: Any, expected: list[str | None]
) -> None:
    assert read(clicks_of(tmp_path, seen), values) == expected


DAY = datetime.date(2026, 1, 1)


@pytest.mark.parametrize(
    ("seen", "values", "message"),
    [
        (["00501", "501", "x"], [501], "column 'a' has 501, which may be '00501' or '501'"),
        (["True", "true", "maybe"], [True], "column 'a' has true, which may be 'True' or 'true'"),
        (["1", "2"], [True], "column 'a' has booleans like True; the import saw numbers"),
        (["true", "false"], [1.0], "column 'a' has numbers like 1.0; the import saw booleans"),
        ([str(2**60), "2"], [float(2**60)], "column 'a' has floating-point numbers like 1152921504606846976"),
        (["1", "2"], [DAY], "column 'a' has the type DATE, which cannot be a category"),
        (["1", "2"], [{"b": 1}], "column 'a' has the type STRUCT"),
        (["1", "2"], [[1]], "column 'a' has the type BIGINT[], which cannot be a category"),
        (["1", "x"], [1, "x"], "column 'a' has values of several types"),
        (["1", "2"], [1.5, True], "column 'a' has values of several types"),
    ],
)
def test_what_would_be_a_guess_is_one_line(tmp_path: Path, seen: list[str], values: Any, message: str) -> None:
    clicks = clicks_of(tmp_path, seen)
    for column in (values, pd.Series(values, dtype=object)):
        with pytest.raises(RecperfError) as error:
            read(clicks, column)
        assert error.value.what.startswith(message)
        assert "\n" not in error.value.what


def test_hashed_categories_are_compared_by_their_key(tmp_path: Path) -> None:
    clicks = clicks_of(tmp_path, ["00501", "10001"], hash=1000)
    texts, numbers = (clicks.encode(pa.table({"a": values}))[0].ids_NS.tolist() for values in (["00501"], [501]))
    assert texts == numbers
    (tmp_path / "two").mkdir()
    with pytest.raises(RecperfError, match="has numbers like 501; the import saw hashed text") as error:
        clicks_of(tmp_path / "two", ["00501", "501"], hash=1000).encode(pa.table({"a": [501]}))
    assert error.value.fix == "read the column as text: pd.read_csv(..., dtype={'a': str})"


@pytest.mark.parametrize("value", [DAY, datetime.datetime(2026, 1, 1), datetime.time(1), {"b": 1}, 2.0**60, [1]])
def test_an_import_refuses_what_scoring_refuses(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "a.parquet", {"a": [value] * 4, "b": ["x", "y"] * 2, "y": [0, 1] * 2})
    with pytest.raises(RecperfError, match="column 'a' has") as error:
        imported(path)
    assert error.value.where == {"file": str(path)}
    if not isinstance(value, float | list):
        # Where nothing is asked for, such a column is no feature.
        assert list(imported(path, categorical=None).manifest.left_out) == ["a"]


def test_labels_and_several_categories_are_the_same_from_every_type(tmp_path: Path) -> None:
    columns = {"a": [[1, 2], [10], []] * 20, "y": [5.0, 3.0, 5.0] * 20}
    options = {"categorical": None, "multi": "a", "positives": ("5",)}
    expected = None
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        clicks = imported(write(tmp_path / name, columns), **options)
        assert clicks.manifest.positives == 40
        for values in ([[1, 2], [10]], [[2.0, 1.0], [10.0]], [["02", "1"], ["10"]], ["1|2", "10.0"], ["[2, 1]", "10"]):
            encoded = clicks.encode(pa.table({"a": values}))[0].ids_NS.tolist()
            expected = expected or encoded
            assert encoded == expected


def test_text_ids_in_an_integer_column_are_unknown() -> None:
    numbers = Ids.of("user", [3, 5, 2**62])
    assert numbers.indices(pa.array(["3", "3.0", "x", "", None, "0005", str(2**62), "9" * 30, "3.5"])).tolist() == [
        0, 0, -1, -1, -1, 1, 2, -1, -1,
    ]  # fmt: skip
    assert numbers.indices(pa.array([5.0, float("nan"), 3.5])).tolist() == [1, -1, -1]
    assert numbers.indices(pa.array([2**62, 2**64 - 1], pa.uint64())).tolist() == [2, -1]
    texts = Ids.of("user", ["007", "x", "8"])
    assert texts.indices(pa.array([7, 8, 9])).tolist() == [0, 2, -1]
    for ids, values, message in (
        (numbers, [True], "user: a column of type bool has no ids"),
        (texts, [True], "user: a column of type bool has no ids"),
        (numbers, [2.0**60], "user 1152921504606846976 is a floating-point number that may be a rounded id"),
        (Ids.of("user", ["007", "7"]), [7], "user 7 may be '007' or '7'"),
    ):
        with pytest.raises(RecperfError) as error:
            ids.indices(pa.array(values))
        assert error.value.what == message


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=4)
CELLS = {
    "words": WORDS,
    "digits": st.sampled_from(["501", "00501", "1.5", "1.50", "-0", "+7", "1e3", "7", " 7 ", "NA", "true", "True"]),
    "ids": st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3),
    "ints": st.integers(1 - 2**53, 2**53 - 1) | st.integers(-3, 3),
    "floats": st.floats(-9e15, 9e15) | st.sampled_from([0.1, 1.5, 3.0, -0.0, 1e-5]),
    "bools": st.booleans(),
    "lists": st.lists(st.integers(-3, 20), max_size=4),
}


@st.composite
def tables(draw: st.DrawFn) -> Columns:
    """A few rows of every kind of column, some values missing; each kind has a value in the first row."""
    rows = draw(st.integers(2, 8))
    at_most = {"min_size": rows - 1, "max_size": rows - 1}
    columns: Columns = {}
    for name, cells in CELLS.items():
        # pandas makes floating-point numbers of integers where some are missing.
        columns[name] = [draw(cells), *draw(st.lists(cells if name == "ids" else cells | st.none(), **at_most))]
    finite = st.floats(allow_nan=False, allow_infinity=False)
    return {**columns, "numbers": [draw(finite), *draw(st.lists(finite | st.none(), **at_most))]}


def readers(folder: Path, columns: Columns) -> Iterator[tuple[str, pa.Table]]:
    """The same rows from three files and two frames, as they reach an encoder."""
    for suffix in (".csv", ".jsonl", ".parquet"):
        file = RowFile(write(folder / f"rows{suffix}", columns))
        yield suffix, pa.concat_tables(file.blocks(file.names, 1 << 16))
    yield "pandas", to_table(pd.DataFrame(columns), columns)
    yield "polars", to_table(pl.DataFrame(columns, strict=False), columns)


@pytest.mark.long
@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seen=tables(), scored=tables(), suffix=st.sampled_from([".csv", ".jsonl", ".parquet"]))
def test_rows_of_mixed_types_are_the_same_from_files_and_frames(seen: Columns, scored: Columns, suffix: str) -> None:
    with TemporaryDirectory() as place:
        folder = Path(place)
        rows = {name: values * 5 for name, values in seen.items()}
        path = write(folder / f"seen{suffix}", {**rows, "y": [index % 2 for index in range(len(rows["ids"]))]})
        options = {"categorical": "words,digits,ids,ints,floats,bools", "multi": "lists", "numeric": "numbers"}
        clicks = imported(path, **options)
        for columns in (seen, scored):
            results: dict[str, Any] = {}
            for name, table in readers(folder, columns):
                try:
                    rows, unknown = clicks.encode(table)
                    counts = {column: one.rows for column, one in unknown.items()}
                    results[name] = (rows.ids_NS.tolist(), rows.dense_ND.tobytes(), counts)
                except RecperfError as error:
                    results[name] = error.what
            assert len(set(map(repr, results.values()))) == 1, results
