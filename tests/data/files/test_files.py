"""Files as users have them: RecBole's, sequences, usual names, bad rows, rows without an end, very many columns."""

from __future__ import annotations

import gzip
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recperf.data.events.imports import import_dataset, import_events
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import EventStore, open_store, originals
from recperf.data.files import formats, load
from recperf.data.files.file import LONGEST_LINE, Source
from recperf.data.files.formats import TextFormat
from recperf.data.files.load import RowFile
from recperf.data.files.source import inspect
from recperf.data.files.text_rows import BadRows, SkippedRows, TextBlock
from recperf.data.files.values import COLUMNS
from recperf.data.rows.imports import import_clicks
from recperf.data.rows.options import ClickOptions
from recperf.data.tables import pyarrow
from recperf.errors import DataError, UsageError


def events(path: Path, content: str | bytes, folder: str = "store", **options: Any) -> EventStore:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_store(import_events(ImportOptions(events=path, **options), path.parent / folder))


def clicks(path: Path, content: str | bytes, folder: str = "clicks", **options: Any) -> dict[str, Any]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return import_clicks(ClickOptions(clicks=path, **options), path.parent / folder)


INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\nu1\t7\t5.0\t881250949\nu2\t8\t1.0\t881250950\n"


def test_a_text_format_is_one_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as logfmt has them, name=value: found by their first line, imported and read as rows."""

    def rows(connection: Any, source: Source, block: TextBlock, bad: BadRows) -> str:
        lines = [dict(part.split("=") for part in line.split()) for line in block.lines]
        names = [source.names[at] for at in source.columns.values()]
        columns = {f"f{at}": [line[name] for line in lines] for at, name in enumerate(names)}
        connection.register("batch", pyarrow().table(columns))
        return "batch"

    logfmt = TextFormat(
        name="logfmt",
        begins=lambda path, line: line.startswith("user="),
        names=lambda path, sample, delimiter: [part.split("=")[0] for part in sample.decode().split("\n")[0].split()],
        rows=rows,
    )
    monkeypatch.setattr(formats, "TEXT", {"logfmt": logfmt, **formats.TEXT})
    monkeypatch.setattr(load, "TEXT", formats.TEXT)
    store = events(
        tmp_path / "a.log", "user=u1 item=7 rating=5 time=881250949\nuser=u2 item=8 rating=1 time=881250950\n"
    )
    assert store.events == 2
    (table,) = RowFile(tmp_path / "a.log").blocks(["item", "user"], 10)
    assert table.to_pylist() == [{"item": "7", "user": "u1"}, {"item": "8", "user": "u2"}]


def test_recbole_types_are_no_part_of_names(tmp_path: Path) -> None:
    store = events(tmp_path / "ml.inter", INTER)
    names = {role: getattr(store.imported.options, role) for role in ("user", "item", "time", "rating")}
    assert names == {"user": "user_id", "item": "item_id", "time": "timestamp", "rating": "rating"}


def _written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    "content",
    ["u2 5 3 9\nu1 5\nu1 3 5\n", "u2,5,3,9\n\nu1\t5\r\nu1 3, 5", "u2 5\nu1 5\nu2 3\nu1 3\nu2 9\nu1 5\n"],
    ids=["lines", "commas", "pairs"],
)
def test_sequences_keep_their_order_and_get_no_dates(tmp_path: Path, content: str) -> None:
    store = events(tmp_path / "log.txt", content, sequences=True, negatives=0)
    users, items = (originals(store.folder, role) for role in ("users", "items"))
    numbers = store.users_of(range(6)).tolist()
    sequence = [(users[user], items[item - 1]) for user, item in zip(numbers, store.items_at(slice(0, 6)))]
    assert sequence == [("u1", 5), ("u1", 3), ("u1", 5), ("u2", 5), ("u2", 3), ("u2", 9)]
    # All sequences end together, so that the last items of every user are held out.
    assert store.times_E[:].tolist() == [0, 1, 2] * 2
    assert store.imported.days is None
    assert store.split_note == "; events without times, in the order of each user's items"


def test_sequences_are_suggested_and_refused_where_they_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the first line is one column: '1 1 2 3'") as caught:
        events(tmp_path / "log.txt", "1 1 2 3\n2 5 6\n")
    assert "--sequences" in str(caught.value.fix)
    with pytest.raises(DataError, match="the first line has numbers in place of column names") as caught:
        events(tmp_path / "log.txt", "1,1,2,3\n2,5,6\n")
    assert "--sequences" in str(caught.value.fix)
    for content, message in (("1 2\n3\n", "row 2: a user without items"), ("1 2\n3 NA\n", "row 2: 'NA' stands for")):
        with pytest.raises(DataError, match=message):
            events(tmp_path / "log.txt", content, sequences=True)
    with pytest.raises(UsageError, match="a file of sequences has no time"):
        ImportOptions(events=tmp_path / "log.txt", sequences=True, time="3")


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("userID\tartistID\tweight", {"user": "userID", "item": "artistID"}),
        ("User-ID;ISBN;Book-Rating", {"user": "User-ID", "item": "ISBN", "rating": "Book-Rating"}),
        ("review_id,user_id,business_id,stars,date", {"user": "user_id", "item": "business_id", "time": "date"}),
        ("app_id,helpful,date,is_recommended,user_id", {"item": "app_id", "label": "is_recommended"}),
        ("user_id,news_id,time", {"user": "user_id", "item": "news_id"}),
        ("user_id,book_id,is_read,rating", {"item": "book_id", "rating": "rating"}),
        ("t_dat,customer_id,article_id,price", {"user": "customer_id", "item": "article_id", "time": "t_dat"}),
        ("timestamp,visitorid,event,itemid", {"user": "visitorid", "item": "itemid", "time": "timestamp"}),
        ("session_id;item_id;timeframe;eventdate", {"user": "session_id", "item": "item_id", "time": "eventdate"}),
        ("session,aid,ts,type", {"user": "session", "item": "aid", "time": "ts"}),
        ("user,time_stamp,adgroup_id,pid,clk", {"user": "user", "item": "adgroup_id", "label": "clk"}),
        ("user_id::movie_id::rating::rating_timestamp", {"item": "movie_id", "time": "rating_timestamp"}),
        ("reviewerID,asin,overall,unixReviewTime", {"user": "reviewerID", "rating": "overall"}),
        ("trackId,artistId,userId", {"item": "trackId"}),
    ],
)
def test_public_datasets_need_no_names_of_columns(tmp_path: Path, header: str, columns: dict[str, str]) -> None:
    source = inspect(_written(tmp_path / "log", header + "\n"), {}, recognised=COLUMNS)
    recognised = {role: source.names[at] for role, at in source.columns.items()}
    assert recognised.items() >= columns.items()


BAD_EVENTS = (
    b"user,item,rating,time\n1,1,5,1\n,2,5,2\n3,1,4,3\n3,1\n\xff,1,1,5\n5,2,x,6\n5,1,1,soon\n6,\x00,1,8\n6,1,1,9\n"
)
BAD = [
    "row 2: no user",
    "row 4 has 2 columns; the first line has 4",
    "row 5 is not UTF-8 text",
    "row 6: rating 'x' is not a number",
    "row 7: time 'soon' is not a time of 0 to 4,294,967,295 seconds",
    "row 8 has a NUL byte",
]


def test_bad_events_are_left_out_and_listed(tmp_path: Path) -> None:
    store = events(tmp_path / "log.csv", BAD_EVENTS, skip_bad=6)
    assert store.imported.skipped_rows == SkippedRows(count=6, first=BAD)
    assert originals(store.folder, "users") == [1, 3, 6]
    assert store.manifest.identity["options"]["skip_bad"] == 6
    options = ImportOptions(events=tmp_path / "log.csv", skip_bad=6)
    facts = import_dataset(options, tmp_path / "store", progress=lambda *_: lambda *_: None)
    assert facts["skipped_rows"]["count"] == 6
    for allowed, message in ((5, BAD[4]), (0, BAD[1])):
        with pytest.raises(DataError) as caught:
            events(tmp_path / "log.csv", BAD_EVENTS, "other", skip_bad=allowed)
        assert caught.value.what == message
        assert str(caught.value.fix).endswith("; --skip-bad N leaves out up to N bad rows")
    with pytest.raises(DataError, match="with other options: skip_bad 6, now 0"):
        events(tmp_path / "log.csv", BAD_EVENTS)


def test_bad_clicks_are_left_out_and_listed(tmp_path: Path) -> None:
    good = [f"{row % 3},{row},{row % 2},{1_600_000_000 + row}" for row in range(40)]
    rows = [*good[:10], "1,1,,1600000000", *good[10:20], "1,cheap,1,1600000000", "1,2", "1,2,1,never", *good[20:]]
    content = "shop,price,clicked,time\n" + "\n".join(rows) + "\n"
    options: dict[str, Any] = {"categorical": "shop", "numeric": "price", "time": "time"}
    manifest = clicks(tmp_path / "rows.csv", content, skip_bad=4, **options)
    first = [
        "row 11: no label",
        "row 22: column 'price': 'cheap' is not a number",
        "row 23 has 2 columns; the first line has 4",
        "row 24: time 'never' is not a time of -4,294,967,295 to 4,294,967,295 seconds",
    ]
    assert manifest.skipped_rows == SkippedRows(count=4, first=first)
    clean = clicks(tmp_path / "rows.csv", "shop,price,clicked,time\n" + "\n".join(good) + "\n", "clean", **options)
    assert (manifest.rows, manifest.arrays) == (40, clean.arrays)
    with pytest.raises(DataError, match="row 24: time 'never' is not a time"):
        clicks(tmp_path / "rows.csv", content, "other", skip_bad=3, **options)


NESTED = '{"user": 1, "item": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
LONG = "x" * (2 * LONGEST_LINE)
QUOTED = '"\n","' + '\n","' * LONGEST_LINE


@pytest.mark.parametrize(
    ("content", "message", "options"),
    [
        (f"user,item\n1,2\n1,{LONG}\n", "row 2 does not end within 1,048,572 characters", {}),
        (f"user,item\n1,2\n{QUOTED}\n", "row 2 does not end within", {}),
        (f'{{"user": 1, "item": 1}}\n{{"user": 1, "item": "{LONG}"}}\n', "row 2 does not end within", {}),
        (f"1 2\n1 {'5 ' * LONGEST_LINE}\n", "row 2 does not end within", {"sequences": True}),
        (NESTED, "row 1 is not a JSON object: it is nested too deeply", {}),
    ],
    ids=["csv", "quoted", "json", "sequence", "nested"],
)
def test_rows_have_a_bound(tmp_path: Path, content: str, message: str, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=message):
        events(tmp_path / "log", content, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


BOMB = """
import resource, sys
from pathlib import Path
import duckdb, pyarrow.parquet
from recperf.data.events.options import ImportOptions
from recperf.data.events.imports import import_events
from recperf.errors import DataError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    import_events(ImportOptions(events=Path(sys.argv[1]), negatives=0), Path(sys.argv[1]).parent / "store")
except DataError as error:
    print(error.what)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_line_of_100_mb_in_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "log.csv.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"user,item\n1,2\n3,")
        for _ in range(100):
            file.write(b"0" * 1_000_000)
    out = subprocess.run([sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, check=True).stdout
    message, grown = out.splitlines()
    assert message == "row 2 does not end within 1,048,572 characters"
    assert int(grown) < 60_000


@pytest.mark.long
def test_wide_files_are_read_or_refused_in_seconds(tmp_path: Path) -> None:
    columns = 20_000
    header = "user_id,item_id,clicked," + ",".join(f"f{index}" for index in range(columns))
    content = header + "\n" + "".join(f"{row % 7},{row % 5},{row % 2}{',1' * columns}\n" for row in range(20))
    began = time.process_time()
    events(tmp_path / "wide.csv", content, label="clicked")
    with pytest.raises(DataError, match="20,002 columns would be features; allowed: at most 500"):
        clicks(tmp_path / "wide.csv", content)
    clicks(tmp_path / "wide.csv", content, categorical="user_id,f19999")
    assert len(RowFile(tmp_path / "wide.csv").names) == columns + 3
    with pytest.raises(DataError, match="the file has 2 columns named 'f7'"):
        clicks(tmp_path / "wide.csv", content.replace("f19999", "f7"), "twice")
    assert time.process_time() - began < 20


@pytest.mark.long
def test_a_hundred_features_fit_into_the_memory_limit(tmp_path: Path) -> None:
    """A list of texts in every column's query became a join of its own: 50 columns of 100 rows took 512 MiB."""
    names = [f"f{index}" for index in range(100)]
    rows = "".join(f"{row % 2},{','.join('ab'[(row + at) % 2] for at in range(100))}\n" for row in range(50))
    content = f"clicked,{','.join(names)}\n{rows}"
    assert len(clicks(tmp_path / "rows.csv", content, memory_mib=256).columns) == 100


STOPPED = """
import os, signal, sys, threading, time
from pathlib import Path
from recperf.data.rows import imports as clicks
from recperf.data.rows.options import ClickOptions
from recperf.data.events import imports as events
from recperf.errors import Stopped
from recperf.stop import FLAG

path, sent = Path(sys.argv[1]), []

def send():
    sent.append(time.process_time())
    os.kill(os.getpid(), signal.SIGTERM)

def stopped_in(owner, name, import_file):
    whole = getattr(owner, name)
    def phase(*arguments, **named):
        timer = threading.Timer(float(sys.argv[2]), send)
        timer.daemon = True
        timer.start()
        return whole(*arguments, **named)
    setattr(owner, name, phase)
    try:
        import_file()
        print(name, "ended")
    except Stopped:
        print(name, "stopped", time.process_time() - sent[-1])
    setattr(owner, name, whole)
    FLAG.received = None

FLAG.listen()
for name in ("sha256", "load_file", "convert", "number_ids"):
    stopped_in(events, name, lambda: events.import_events(events.ImportOptions(events=path), path.parent / "store"))
for owner, name in (
    (clicks, "load_file"), (clicks, "decide_types"), (clicks, "write_vocabulary"), (clicks._Build, "_write")
):
    stopped_in(owner, name, lambda: clicks.import_clicks(ClickOptions(clicks=path), path.parent / "clicks"))
"""


@pytest.mark.long
def test_a_signal_is_seen_within_two_seconds_in_every_phase(tmp_path: Path) -> None:
    names = "user_id,item_id,clicked,time," + ",".join(f"f{index}" for index in range(40))
    rows = (
        f"{row * 7 % 5003},{row * 11 % 997},{row % 2},{1_600_000_000 + row}{f',{row % 17}' * 40}\n"
        for row in range(5_000)
    )
    path = _written(tmp_path / "log.csv", f"{names}\n{''.join(rows)}")
    command = [sys.executable, "-c", STOPPED, str(path), "0.01"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["stopped"] * 8, lines
    # Time of the processor: other processes may use it too.
    assert max(float(line.split()[2]) for line in lines) < 2, lines
    assert [place.name for place in tmp_path.iterdir()] == ["log.csv"]
