"""An import reads CSV exactly as Python's csv module does, within its memory limit."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recperf.data.events.store import open_store
from recperf.data.files import load, text_rows
from recperf.data.files.source import inspect
from recperf.data.files.text_rows import BadRows
from recperf.data.files.values import open_database
from recperf.errors import DataError

COLUMNS = {"user": "u", "item": "i", "time": "t", "rating": "r"}
HEADER = "u,i,t,r"
COUNT = itertools.count()
SURROGATE = re.compile("[\ud800-\udfff]")


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_database(tmp_path_factory.mktemp("database") / "sorting", memory=64 << 20) as connection:
        yield connection


def read_by_import(
    connection: Any, path: Path, buffer: int = 1 << 18, bad: BadRows | None = None, **numbers: Any
) -> list[tuple[str, ...]]:
    """The columns that an import reads, before it converts them; blocks are small."""
    connection.execute("DROP TABLE IF EXISTS raw")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_rows, "BLOCK", buffer)
        source = inspect(path, COLUMNS)
        load.load_file(connection, source, lambda *_: None, bad or BadRows(path), numbers=numbers)
    values = connection.execute('SELECT "user", item, "time", rating FROM raw ORDER BY rowid').fetchall()
    return [tuple("" if value is None else str(value) for value in row) for row in values]


def read_by_python(path: Path) -> tuple[list[tuple[str, ...]], list[int]]:
    """Rows that have a value for each column, and the numbers of the others."""
    rows, bad, number = list[tuple[str, ...]](), list[int](), 0
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(file, strict=True)
        names = [name.strip() for name in next(reader)]
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return rows, bad
            except csv.Error:
                row = ["", "\0"]
            text = "".join(row)
            number += bool(row)
            if "\0" in text or (not text.isprintable() and SURROGATE.search(text)) or len(row) not in (0, len(names)):
                bad.append(number)
            elif row:
                rows.append(tuple(row[names.index(name)].strip() for name in "uitr"))


def test_a_quoted_line_break_at_every_offset_around_the_edge_of_a_block(connection: Any, tmp_path: Path) -> None:
    # Both Python's decoder and the patched buffer end here.
    block, path = 8192, tmp_path / "log.csv"
    start = f'{HEADER}\n1,2,3,4\n"'
    for offset in range(-12, 13):
        filler = "x" * (block + offset - len(start))
        path.write_bytes(f'{start}{filler}\r\n5,6,7,8",2,3,4\n9,"\n",3,"4"\n'.encode())
        expected = [("1", "2", "3", "4"), (f"{filler}\r\n5,6,7,8", "2", "3", "4"), ("9", "", "3", "4")]
        assert read_by_import(connection, path, block) == read_by_python(path)[0] == expected


def test_only_the_first_mark_of_byte_order_is_left_out(connection: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\n\ufeff1,2,3,4\n".encode()))
    assert read_by_import(connection, path, len(HEADER) + 1) == [("\ufeff1", "2", "3", "4")]


@pytest.mark.parametrize("late", ["007", "u7", "1e3", "+5", "NA", "12345678901234567890"])
def test_a_column_that_begins_with_numbers_and_is_none_stays_text(connection: Any, tmp_path: Path, late: str) -> None:
    path = tmp_path / f"log-{late}.csv"
    path.write_text(f"{HEADER}\n" + "1,2,3,4\n" * 1500 + f"{late},2,3,4\n")
    read = read_by_import(connection, path, user="BIGINT", item="BIGINT")
    assert read == [("1", "2", "3", "4")] * 1500 + [(late, "2", "3", "4")]


def numbers_of(bad: BadRows) -> list[int]:
    return [int(re.findall(r"\d+", row)[0]) for row in bad.skipped.first] if bad.skipped else []


FIELDS = st.text(st.sampled_from("a71.- \t;é\u2028\ufeff語\\'#\"") | st.sampled_from(',\n\r"'), max_size=5)


@st.composite
def written(draw: Any) -> bytes:
    """A file as programs write it: any line ending, quotes where needed or everywhere, blank lines, spare columns."""
    names = draw(st.permutations([*"uitr", *draw(st.sampled_from([[], ["spare"], ["x", "y"]]))]))
    plain, ending = draw(st.booleans()), draw(st.sampled_from(["\n", "\r\n", "\r"]))
    text = io.StringIO(newline="")
    quoting = draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    writer = csv.writer(text, lineterminator=ending, quoting=quoting)
    writer.writerow(names)
    for row in draw(st.lists(st.lists(FIELDS, min_size=len(names), max_size=len(names)), max_size=9)):
        writer.writerow([re.sub('[,"\\r\\n]', "-", field) for field in row] if plain else row)
        text.write(ending * draw(st.integers(0, 1)))
    content = text.getvalue().removesuffix(draw(st.sampled_from(["", ending])))
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + content.encode()


PIECES = [b"a", b"7", b" ", b",", b",", b",,,", b"\n", b"\n", b"\r\n", b"\r", b'"', b'""', b"\t", b'\n"', b'",', b',"']
SOUP = st.lists(st.sampled_from([*PIECES, b"\0", b"\xff", "é".encode(), b"1,2,3,4\n"]), max_size=40)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=written() | SOUP.map(lambda parts: b"u,i,t,r\n" + b"".join(parts)), buffer=st.sampled_from([7, 256]))
def test_drawn_files_are_read_as_python_reads_them(
    connection: Any, tmp_path: Path, content: bytes, buffer: int
) -> None:
    """Differences to csv.reader(strict=True) are four: rows with another number of columns, with NUL characters, with
    bytes that are not UTF-8, and with text beside the quotes of a field or a quote without its pair are bad. They are
    refused by their number, or skipped."""
    path = tmp_path / f"log{next(COUNT)}.csv"
    path.write_bytes(content)
    rows, faults = read_by_python(path)
    bad = BadRows(path, 1000)
    assert read_by_import(connection, path, buffer, bad) == rows
    assert numbers_of(bad) == faults[:20]
    if faults:
        with pytest.raises(DataError, match=f"row {faults[0]} "):
            read_by_import(connection, path, buffer)
    else:
        # A column that becomes numbers has the same texts.
        as_text = [tuple(re.sub(r"(?<=\d)\.0$", "", value) for value in row) for row in rows]
        read = read_by_import(connection, path, buffer, user="BIGINT", item="DOUBLE", time="DOUBLE", rating="BIGINT")
        assert [tuple(re.sub(r"(?<=\d)\.0$", "", value) for value in row) for row in read] == as_text


def test_a_quote_within_a_field_is_text_in_a_file_with_quoted_fields_too(connection: Any, tmp_path: Path) -> None:
    for rows in (1, 3000):
        path = tmp_path / f"log{rows}.csv"
        path.write_text(f"{HEADER},x\n" + '1,2,3,4,"a, b"\n' * rows + '1,1,5,5,screen 15" wide\n')
        read = read_by_import(connection, path, 512)
        assert read == [("1", "2", "3", "4")] * rows + [("1", "1", "5", "5")]


@pytest.mark.parametrize(
    "row", ["1,2,3,4", '"1",2,"a ""b"" c",4', '1,2,"a{end}b",4', '1,2,7" x,4', "1,2,,", " 1, 2 ,é,4"],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_duckdb_reads_regular_files(tmp_path: Path, row: str, end: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(f"{HEADER}{end}{(row.format(end=end) + end) * 9}{end}".encode())
    form = text_rows.regular_csv(inspect(path, COLUMNS))
    assert form is not None
    assert form.rows == 9


@pytest.mark.long
def test_memory_stays_within_its_limit(tmp_path: Path) -> None:
    """Peak memory of a process that imports 5 MiB with 64 MiB, above that of one that imports three rows."""
    draw = random.Random(1)
    path = tmp_path / "log.csv"
    text = '"line\nbreak"'
    lines = (f"{draw.randrange(10_000)},{draw.randrange(1 << 30)},{row},4,{text}" for row in range(150_000))
    path.write_text(f"{HEADER},x\n" + "\n".join(lines) + "\n")
    small = tmp_path / "small.csv"
    small.write_text(f"{HEADER},x\n" + f"1,1,1,4,{text}\n" * 3)
    assert peak_mib(path, tmp_path / "store") - peak_mib(small, tmp_path / "small") < 64
    assert open_store(tmp_path / "store").events == 150_000


def peak_mib(path: Path, folder: Path) -> float:
    script = (
        "import resource, sys; from pathlib import Path;"
        "from recperf.data.events.options import ImportOptions;"
        "from recperf.data.events.imports import import_events;"
        "options = ImportOptions(events=Path(sys.argv[1]), user='u', item='i', time='t', rating='r', memory_mib=64);"
        "import_events(options, Path(sys.argv[2]));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    return float(subprocess.run([sys.executable, "-c", script, path, folder], check=True, capture_output=True).stdout)
