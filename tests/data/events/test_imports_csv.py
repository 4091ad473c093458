"""An import reads CSV exactly as Python's csv module does, within its memory limit."""

from __future__ import annotations

import csv
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recperf.data.events.store import open_store
from recperf.data.files import load, text_rows
from recperf.data.files.source import inspect
from recperf.data.files.values import open_database

COLUMNS = {"user": "u", "item": "i", "time": "t", "rating": "r"}
HEADER = "u,i,t,r"


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_database(tmp_path_factory.mktemp("database") / "sorting", memory=64 << 20) as connection:
        yield connection


def read_by_import(connection: Any, path: Path, buffer: int = 1 << 18) -> list[tuple[str, ...]]:
    """The columns that an import reads, before it converts them; rows and buffers are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_rows, "BLOCK", buffer)
        load.load_file(connection, inspect(path, COLUMNS), lambda *_: None, text_rows.BadRows(path))
    values = connection.execute('SELECT "user", item, "time", rating FROM raw ORDER BY rowid').fetchall()
    connection.execute("DROP TABLE raw")
    return [tuple(value or "" for value in row) for row in values]


def read_by_python(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if row]
    places = [[name.strip() for name in rows[0]].index(name) for name in "uitr"]
    return [tuple(row[place].strip() for place in places) for row in rows[1:]]


def test_a_quoted_line_break_at_every_offset_around_the_edge_of_a_block(connection: Any, tmp_path: Path) -> None:
    # Both Python's decoder and the patched buffer end here.
    block, path = 8192, tmp_path / "log.csv"
    start = f'{HEADER}\n1,2,3,4\n"'
    for offset in range(-12, 13):
        filler = "x" * (block + offset - len(start))
        path.write_bytes(f'{start}{filler}\r\n5,6,7,8",2,3,4\n9,"\n",3,"4"\n'.encode())
        expected = [("1", "2", "3", "4"), (f"{filler}\r\n5,6,7,8", "2", "3", "4"), ("9", "", "3", "4")]
        assert read_by_import(connection, path, block) == read_by_python(path) == expected


def random_field(draw: random.Random) -> str:
    pieces = [*"a7,\n\r \t;é\u2028\ufeff語\\'#", '"', '""', "\r\n"]
    return "".join(draw.choice(pieces) for _ in range(draw.randrange(6)))


def random_csv(draw: random.Random) -> bytes:
    """A legal file: any line ending, quotes where needed or everywhere, blank lines, spare columns, maybe a BOM."""
    endings = draw.choice([["\n"], ["\r\n"], ["\r"], ["\n", "\r\n", "\r"]])
    always, plain = draw.random() < 0.3, draw.random() < 0.3
    names = ["u", "i", "t", "r", *(f"spare{index}" for index in range(draw.randrange(3)))]
    draw.shuffle(names)

    def quoted(field: str) -> str:
        field = re.sub(r'[,"\r\n]', "-", field) if plain else field
        needs = always or any(mark in field for mark in ',"\r\n') or (not plain and draw.random() < 0.1)
        return '"' + field.replace('"', '""') + '"' if needs else field

    lines = [",".join(f'"{name}"' if always else name for name in names)]
    for _ in range(draw.randrange(1, 30)):
        lines.append(",".join(quoted(random_field(draw)) for _ in names))
        lines += [""] * (draw.random() < 0.1)
    text = "".join(line + draw.choice(endings) for line in lines) + draw.choice(["", endings[0]])
    return (b"\xef\xbb\xbf" if draw.random() < 0.3 else b"") + text.encode()


def test_random_files_equal_pythons_csv(connection: Any, tmp_path: Path) -> None:
    for seed in range(25):
        draw = random.Random(seed)
        path = tmp_path / "log.csv"
        path.write_bytes(random_csv(draw))
        assert read_by_import(connection, path, draw.choice([256, 1 << 18])) == read_by_python(path), f"seed {seed}"


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
