"""A user's events become a store with the right order and ids, or one error that names the row."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recperf.data.events import imports
from recperf.data.events.imports import import_events
from recperf.data.events.item_table import columns_of, titles_of
from recperf.data.events.kinds import NEGATIVE, POSITIVE
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import EventStore, open_store, originals, verify
from recperf.errors import ConfigError, DataError, RecperfError, UsageError

NAMED = {"user": "u", "item": "i", "time": "t"}
NUMBERED = {"user": "1", "item": "2", "time": "3", "rating": "4"}
HEADER = "u,i,t,r\n"


def import_file(path: Path, **options: Any) -> EventStore:
    """Import next to the file, then open the store."""
    signal = {} if "label" in options else {"rating": "r", "positive_from": 4.0}
    store = open_store(
        import_events(ImportOptions(events=path, **{**NAMED, **signal, **options}), path.parent / "store")
    )
    verify(store)
    return store


def write(tmp_path: Path, content: str | bytes, name: str = "log.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_table(tmp_path: Path, **columns: Any) -> Path:
    path = tmp_path / "log.parquet"
    parquet.write_table(pa.table(columns), path)
    return path


def rows(store: EventStore) -> list[tuple[int, int, int, bool]]:
    users = np.repeat(store.user_ids_U, np.diff(store.user_first_U1))
    plus = store.kinds(slice(None)) & POSITIVE > 0
    return list(zip(users.tolist(), store.items_E[:].tolist(), store.times_E[:].tolist(), plus.tolist()))


def import_error(path: Path, **options: Any) -> RecperfError:
    """The error of an import, which leaves nothing behind and takes one line."""
    before = {child.name for child in path.parent.iterdir()}
    with pytest.raises(RecperfError) as caught:
        import_file(path, **options)
    assert {child.name for child in path.parent.iterdir()} == before
    assert "\n" not in caught.value.what
    assert caught.value.fix
    return caught.value


ids = st.integers(-5, 30) | st.integers(-(10**17), 10**17) | st.sampled_from(["a", "Z", "007", "é", "x y", "1.0"])
events = st.lists(st.tuples(ids, ids, st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=60)


@given(events, st.sampled_from(["csv", "quoted", "gzip", "json"]))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_import_sorts_by_user_and_time(
    tmp_path_factory: pytest.TempPathFactory, log: list[tuple[Any, Any, int, int]], kind: str
) -> None:
    text = io.StringIO()
    quoting = csv.QUOTE_ALL if kind == "quoted" else csv.QUOTE_MINIMAL
    csv.writer(text, quoting=quoting).writerows([["u", "i", "t", "r"], *log])
    content = text.getvalue().encode()
    if kind == "json":
        content = "".join(json.dumps(dict(zip("uitr", row))) + "\n" for row in log).encode()
    path = write(tmp_path_factory.mktemp("log"), gzip.compress(content) if kind == "gzip" else content)
    store = import_file(path, memory_mib=64)
    users, items = dense_ids(row[0] for row in log), dense_ids(row[1] for row in log)
    assert originals(store.folder, "users") == list(users)
    assert originals(store.folder, "items") == list(items)
    numbered = [(users.get(u) or users[str(u)], items.get(i) or items[str(i)], t, r >= 4) for u, i, t, r in log]
    assert rows(store) == sorted(numbered, key=lambda row: (row[0], row[2]))


def dense_ids(values: Any) -> dict[Any, int]:
    """Ids from 1 on: by number where all are numbers, else by text."""
    distinct = set(values)
    if not all(isinstance(value, int) for value in distinct):
        distinct = {str(value) for value in distinct}
    return {value: rank for rank, value in enumerate(sorted(distinct), 1)}


def test_original_ids_are_listed_with_their_digest(tmp_path: Path) -> None:
    path = write(tmp_path, 'u,i,t,r\nx,"say ""hi""",1,4\nb\u2028c,2,1,4\n"p\nq",2,1,4\n')
    store = import_file(path)
    assert originals(store.folder, "users") == ["b\u2028c", "p\nq", "x"]
    assert originals(store.folder, "items") == ["2", 'say "hi"']
    entry = store.originals["items"]
    assert entry.sha256 == hashlib.sha256((store.folder / entry.file).read_bytes()).hexdigest()
    assert (entry.lines, entry.kind) == (2, "text")


def test_parquet_of_several_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    data = pa.table(
        {
            "u": pa.array(["b", "a", "b", "a"]).dictionary_encode(),
            "unused": pa.nulls(4),
            "i": pa.array([5.0, 6.0, 5.0, 7.0]),
            "t": pa.array([3_000_999, 2_000_000, 1_000_000, 2_000_000], pa.timestamp("us")),
            "r": pa.array([True, False, True, True]),
        }
    )
    parquet.write_table(data, path, row_group_size=3)
    store = import_file(path, label="r")
    assert columns_of(store) == {}
    assert rows(store) == [(1, 2, 2, False), (1, 3, 2, True), (2, 1, 1, True), (2, 1, 3, True)]
    assert originals(store.folder, "items") == [5, 6, 7]


def test_json_lines(tmp_path: Path) -> None:
    first = '{"u": "b", "i": 123456789012345678901, "t": 5, "r": true, "x": [1]}\n'
    store = import_file(write(tmp_path, first + '\n{"r":false,"t":4.9,"i":7,"u":"a"}\n'), label="r")
    assert rows(store) == [(1, 2, 4, False), (2, 1, 5, True)]
    assert originals(store.folder, "items") == ["123456789012345678901", "7"]
    (tmp_path / "store").rename(tmp_path / "first")
    assert import_error(write(tmp_path, first + '{"u": "b", "i": 1, "r": 1}\n'), label="r").what == "row 2: no time"
    assert "row 2 is not a JSON object" in import_error(write(tmp_path, first + "{nonsense\n"), label="r").what
    assert "not a JSON object" in import_error(write(tmp_path, "{nonsense\n"), label="r").what
    assert "no column 'q'" in import_error(write(tmp_path, first), rating="q").what


@pytest.mark.parametrize(
    ("unit", "times", "seconds"),
    [
        ("s", ("12", "7.9"), [12, 7]),
        ("ms", ("1700000000123", "999"), [1_700_000_000, 0]),
        ("iso", ("1970-01-02", "1970-01-01 00:01:00.999999999"), [86_400, 60]),
        ("iso", ("1970-01-01T02:00:00+02:00", "1970-01-01T00:00:09Z"), [0, 9]),
        ("iso", ("1970-01-01T00:30-0130", "1970-01-01 02:00+01"), [7200, 3600]),
        ("s", ("4294967295", " 5\u00a0"), [4294967295, 5]),
    ],
)
def test_times(tmp_path: Path, unit: Any, times: tuple[str, str], seconds: list[int]) -> None:
    path = write(tmp_path, f"{HEADER}1,1,{times[0]},4\n2,1,{times[1]},4\n")
    assert import_file(path, time_unit=unit).times_E[:].tolist() == seconds


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("u\ti\tt\tr\n1\t2\t3\t4\n", {}),
        ("u|i|t|r\r\n1|2|3|4\r\n\r\n", {}),
        ("u,i,t,r\r1,2,3,4\r", {}),
        ('\ufeff"u","i","t","r"\n"1","2","3","4"\n', {}),
        ('u,i,t,"r\nq"\n1,2,3,"4"\n', {"rating": "r\nq"}),
        ("1::2::3::4\n", NUMBERED),
        ('u::i::t::r\n"1"::2::3::4\n', {}),
        ("u i t r\n1 2 3 4\n", {"delimiter": " "}),
        ("u,i,x,t,x,r\n1,2,9,3,9,4\n", {}),
        ("a,b,c,d\n1,2,3,4\n", {**NUMBERED, "header": "yes"}),
    ],
)
def test_forms_of_csv(tmp_path: Path, content: str, options: dict[str, Any]) -> None:
    store = import_file(write(tmp_path, content), **options)
    assert [originals(store.folder, role) for role in ("users", "items")] == [[1], [2]]
    assert rows(store) == [(1, 1, 3, True)]


def test_signals(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,1,1,2.5\n1,1,2,2.4\n1,1,3,-1\n")
    store = import_file(path, positive_from=2.5)
    assert [row[3] for row in rows(store)] == [True, False, False]
    assert store.kinds(slice(None)).tolist() == [POSITIVE, NEGATIVE, NEGATIVE]


def test_columns_that_do_not_change_within_an_item_belong_to_it(tmp_path: Path) -> None:
    """Of an item whose value changes the last one counts, if such items are few; else the column is not used."""
    rows = [(user, item, 10 * user + item, 4, f"g{item % 3}", item % 7 + 0.5, item % 4, user % 2, f"Title {item}")
            for user in range(4) for item in range(200)]  # fmt: skip
    lines = [",".join(map(str, row)) for row in rows]
    # Behind the first thousand rows, which are looked at, and in one item alone.
    lines += ["9,9,99,4,NA,,1,1,"] * 400 + ["9,7,99,4,g9,0.5,,0,Title 7", "9,8,99,4,g2,1.5,0,9,Title 8"]
    path = write(tmp_path, "u,i,t,r,group,weight,shelf,channel,name\n" + "\n".join(lines) + "\n")
    store = import_file(path)
    columns = columns_of(store)
    assert {name: one.kind for name, one in columns.items()} == {
        "group": "category",
        "weight": "number",
        "shelf": "category",
    }
    assert [columns["group"].values[number].as_py() for number in (7 + 1, 8 + 1, 9 + 1)] == ["g9", "g2", "g0"]
    assert columns["weight"].values[8].as_py() == 0.5
    assert titles_of(store, np.array([0, 1, 200])) == [None, "Title 0", "Title 199"]
    assert store.imported is not None
    assert store.imported.unused_columns == {"channel": ""}
    table = store.imported.tables["item"]
    assert (table.source, table.id, table.title, table.without) == (None, "i", "name", 0)
    # What the first rows do not tell: a column that changes later within too many items.
    late = [f"{user},{item},1,4,{user > 6}" for user in range(10) for item in range(200)]
    (tmp_path / "late").mkdir()
    store = import_file(write(tmp_path / "late", "u,i,t,r,late\n" + "\n".join(late) + "\n"))
    assert store.imported is not None
    assert store.imported.unused_columns == {"late": "it changes within 200 of 200 items"}


NOT_SECONDS = "is not a time of 0 to 4,294,967,295 seconds"
BAD_ROWS = {
    "no user": ("1,1,1,4\n,1,1,4", {}, "row 2: no user"),
    "missing user": ("1,1,1,4\nnan,1,1,4", {}, "row 2: no user: 'nan' stands for a missing value"),
    "first of two": ("1,1,1,4\n1,1,x,4\n,1,1,4", {}, f"row 2: time 'x' {NOT_SECONDS}"),
    "milliseconds": ("1,1,1,4\n1,1,1700000000000,4", {}, f"row 2: time '1700000000000' {NOT_SECONDS}"),
    "iso": ("1,1,1970-01-01,4\n1,1,1/2/1970,4", {"time_unit": "iso"}, "row 2: time '1/2/1970' is not an ISO time"),
    "rating": ("1,1,1,4\n1,1,1,good", {}, "row 2: rating 'good' is not a number"),
    "label": ("1,1,1,0\n1,1,1,1\n1,1,1,2", {"label": "r"}, "the label 'r' has 3 values (0, 1, 2)"),
    "short row": ("1,1,1,4\n1,1,1", {}, "row 2 has 3 columns; the first line has 4"),
    "text after a quote": ('1,1,1,4\n"1,1,1,4\n1,1,1,4\n"1,1,1,4', {}, "row 2 is not valid CSV: text beside"),
    "open quote": ('1,1,1,4\n"1,1,1,4\n1,1,1,4\n', {}, "row 2 is not valid CSV: a quote without"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named(tmp_path: Path, case: str) -> None:
    content, options, message = BAD_ROWS[case]
    error = import_error(write(tmp_path, f"{HEADER}{content}\n"), **options)
    assert error.what.startswith(message)
    assert error.exit_code == 3


def test_unknown_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "user_id,item,stamp,r\n1,1,1,4\n")
    error = import_error(path, user="userid", item="item", time="stamp")
    assert error.what == "there is no column 'userid' for the user; did you mean 'user_id'?"
    assert error.where["columns"] == "user_id, item, stamp, r"
    assert "known: user_id, item, stamp, r" in import_error(path, user="zzz", item="item", time="stamp").what
    numbered = {**NUMBERED, "rating": "5"}
    assert "no column '5' for the rating; known: 1 to 4" in import_error(path, **numbered, header="no").what
    assert import_error(path, user="user_id", item="1", time="stamp").exit_code == 2
    assert "without a header has no column 'u'" in import_error(path, header="no").what
    twice = write(tmp_path, "u,u,i,t,r\n1,1,1,1,4\n")
    assert "has 2 columns named 'u'" in import_error(twice).what
    assert "no column 'q'" in import_error(write_table(tmp_path, u=[1], i=[1], t=[1], r=[1]), user="q").what


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert import_error(tmp_path / "absent.csv").what == "the file cannot be opened: No such file or directory"
    (tmp_path / "folder").mkdir()
    assert "it is a folder" in import_error(tmp_path / "folder").what
    assert "is empty" in import_error(write(tmp_path, "")).what
    assert import_error(write(tmp_path, HEADER)).what == "the file has a header and no rows"
    assert import_error(write(tmp_path, gzip.compress(b""))).what == "the first line is empty"
    assert "not a text file" in import_error(write(tmp_path, b"PK\0\0")).what
    assert "not a Parquet file" in import_error(write(tmp_path, HEADER, "x.parquet")).what
    assert "first line is not UTF-8" in import_error(write(tmp_path, b"\xff\xff,1,1,1\n")).what
    assert import_error(write_table(tmp_path, u=[], i=[], t=[], r=[])).what == "the file has no rows"
    assert "the first line cannot be read" in import_error(write(tmp_path, "u" * 200_000 + "\n1\n")).what
    # A quote inside of a value is an ordinary character.
    assert import_file(write(tmp_path, HEADER.replace("\n", ",x\n") + '1,1,1,4,5"\n2,1,1,4,b\n')).events == 2


def test_truncated_and_damaged_files(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    users, one = random.integers(0, 1 << 60, 5_000), [1] * 5_000
    zipped = gzip.compress((HEADER + "".join(f"{user},1,1,1\n" for user in users)).encode())
    for keep in (15, len(zipped) // 2, len(zipped) - 3):
        assert "damaged or cut short" in import_error(write(tmp_path, zipped[:keep], "x.csv.gz")).what
    path = tmp_path / "log.parquet"
    parquet.write_table(pa.table({"u": users, "i": one, "t": one, "r": one}), path, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    path.write_bytes(content[: len(content) // 2])
    assert "damaged or cut short" in import_error(path).what
    content[5_000] ^= 1
    path.write_bytes(content)
    assert "damaged or cut short" in import_error(path).what


def test_options_are_checked(tmp_path: Path) -> None:
    def options(**changed: Any) -> ImportOptions:
        return ImportOptions(events=tmp_path, **{"rating": "r", **changed})

    with pytest.raises(UsageError, match="negatives are drawn for a log without rating"):
        options(negatives=2)
    with pytest.raises(UsageError, match="rating and label are given"):
        options(label="x")
    with pytest.raises(UsageError, match="column 'item' is given as user and as item"):
        options(user="item", item="item")
    nan = float("nan")
    for wrong in ({"user": ""}, {"delimiter": "ab"}, {"memory_mib": 63}, {"positive_from": nan}, {"name": "../x"}):
        with pytest.raises(ConfigError):
            options(**wrong)


def test_importing_again_returns_the_existing_store(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,1,1,4\n2,1,1,4\n")
    first = import_file(path)
    when = (first.folder / "items.u4").stat().st_mtime_ns
    # As after a kill between the rename and the removal of the journal.
    (first.folder / "journal.json").write_text("{}")
    assert import_file(path, memory_mib=64).digest == first.digest
    assert (first.folder / "items.u4").stat().st_mtime_ns == when
    assert not (first.folder / "journal.json").exists()
    with pytest.raises(DataError, match=r"with other options: positive_from 4\.0, now 3\.0$"):
        import_file(path, positive_from=3.0)
    with pytest.raises(DataError, match="of another file"):
        import_file(write(tmp_path, HEADER + "1,1,1,4\n"))
    assert open_store(first.folder).digest == first.digest


@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_grows_is_not_stored_under_the_digest_of_its_beginning(
    zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = ((HEADER + "".join(f"1,1,{line},5\n" for line in range(lines))).encode() for lines in (1000, 2000))
    if zipped:
        short, long = gzip.compress(short), gzip.compress(long)
    path = write(tmp_path, short, "log.csv.gz" if zipped else "log.csv")

    def then_grow(*_: Any) -> str:
        path.write_bytes(long)
        return hashlib.sha256(short).hexdigest()

    with monkeypatch.context() as patch:
        patch.setattr(imports, "sha256", then_grow)
        assert "changed while it was imported" in import_error(path).what
    assert import_file(path).events == 2_000
