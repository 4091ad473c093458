"""Someone's events become a store: the right order and ids, or one error that names the row."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recperf.config import to_json
from recperf.data.yambda import imports
from recperf.data.yambda.imports import ImportOptions, import_events, originals
from recperf.data.yambda.imports import read as imports_read
from recperf.data.yambda.imports import sort as imports_sort
from recperf.data.yambda.schema import EVENT_TYPES, LIKE, LISTEN_PLUS, POOLS, SKIP, TYPE_SHIFT
from recperf.data.yambda.store import EventStore, open_store, ratios, verify
from recperf.errors import ConfigError, DataError, MachineError, RecperfError, UsageError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NAMED = {"user": "u", "item": "i", "time": "t"}
HEADER = "u,i,t,r\n"


def stored(path: Path, **options: Any) -> EventStore:
    """Import next to the file, then open what was written."""
    given = {**NAMED, **({} if {"ratio", "label"} & options.keys() else {"rating": "r"}), **options}
    store = open_store(import_events(ImportOptions(events=path, **given), path.parent / "store"))
    verify(store)
    return store


def written(tmp_path: Path, content: str | bytes, name: str = "log.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(tmp_path: Path, **columns: Any) -> Path:
    path = tmp_path / "log.parquet"
    parquet.write_table(pa.table(columns), path)
    return path


def rows(store: EventStore) -> list[tuple[int, int, int, bool]]:
    users = np.repeat(store.user_ids_U, np.diff(store.user_first_U1))
    plus = store.kinds(slice(None)) & LISTEN_PLUS > 0
    return list(zip(users.tolist(), store.items_E.tolist(), store.times_E.tolist(), plus.tolist()))


def refused(path: Path, **options: Any) -> RecperfError:
    """The error of an import, which leaves nothing behind and takes one line."""
    before = {child.name for child in path.parent.iterdir()}
    with pytest.raises(RecperfError) as caught:
        stored(path, **options)
    assert {child.name for child in path.parent.iterdir()} == before
    assert "\n" not in caught.value.what
    assert caught.value.fix
    return caught.value


def test_movielens_as_it_is_published(real_movielens: Path, tmp_path: Path) -> None:
    lines = [line.split("\t") for line in (real_movielens / "u.data").read_text().splitlines()]
    options = ImportOptions(
        events=real_movielens / "u.data", user="1", item="2", rating="3", time="4", name="ml", memory_mib=8
    )
    store = open_store(import_events(options, tmp_path / "store"))
    assert (store.events, store.users, store.items) == (100_000, 943, 1683)
    assert store.name == "ml"
    assert not store.synthetic
    assert dict(zip(store.user_ids_U.tolist(), np.diff(store.user_first_U1).tolist())) == Counter(
        int(line[0]) for line in lines
    )
    expected = sorted(((int(u), int(i), int(t), int(r) >= 4) for u, i, r, t in lines), key=lambda row: (row[0], row[2]))
    assert rows(store) == expected
    streams: dict[str, list[int]] = {}
    for user, _, _, time in lines:
        streams.setdefault(user, []).append(int(time))
    late = sum(later < earlier for times in streams.values() for earlier, later in pairwise(times))
    assert store.manifest["earlier_than_the_event_before"] == late


ids = st.integers(-5, 30) | st.integers(-(10**17), 10**17) | st.sampled_from(["a", "Z", "007", "é", "x y", "1.0"])
events = st.lists(st.tuples(ids, ids, st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=60)


@given(events, st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_is_a_plain_sort(
    tmp_path_factory: pytest.TempPathFactory, log: list[tuple[Any, Any, int, int]], tight: bool, zipped: bool
) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([["u", "i", "t", "r"], *log])
    content = text.getvalue().encode()
    path = written(tmp_path_factory.mktemp("log"), gzip.compress(content) if zipped else content)
    with pytest.MonkeyPatch.context() as patch:
        if tight:
            # The user with most events fits just so, and the others share ranges of that length.
            most = max(Counter(str(row[0]) for row in log).values())
            patch.setattr(imports_sort, "EVENT_COST", (8 << 20) // 2 // most)
            patch.setattr(imports_read, "_LARGEST_BLOCK", 64)
        store = stored(path, memory_mib=8)
    users, items = order_of(row[0] for row in log), order_of(row[1] for row in log)
    assert originals(store.folder, "users") == list(users)
    assert originals(store.folder, "items") == list(items)
    numbered = [(users[as_is(u, users)], items[as_is(i, items)], t, r >= 4) for u, i, t, r in log]
    assert rows(store) == sorted(numbered, key=lambda row: (row[0], row[2]))


def order_of(values: Any) -> dict[Any, int]:
    """Ids from 1 on: by number where all are numbers, else by text."""
    distinct = set(values)
    if not all(isinstance(value, int) for value in distinct):
        distinct = {str(value) for value in distinct}
    return {value: rank for rank, value in enumerate(sorted(distinct), 1)}


def as_is(value: Any, known: dict[Any, int]) -> Any:
    return value if value in known else str(value)


def test_ranges_of_users_give_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    log = random.integers(0, [40, 30, 50, 6], (2_000, 4))
    path = written(tmp_path, HEADER + "".join(",".join(map(str, row)) + "\n" for row in log.tolist()))
    whole = stored(path)
    monkeypatch.setattr(imports_sort, "EVENT_COST", (4 << 20) // 100)
    monkeypatch.setattr(imports_sort, "_STRIDE", 64)
    (tmp_path / "store").rename(tmp_path / "whole")
    cut = stored(path, memory_mib=8)
    assert cut.digest == whole.digest
    assert sorted(child.name for child in cut.folder.iterdir()) == sorted(
        child.name for child in (tmp_path / "whole").iterdir()
    )


def test_a_user_larger_than_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, HEADER + "1,1,1,1\n" * 9)
    monkeypatch.setattr(imports_sort, "EVENT_COST", 1 << 20)
    error = refused(path, memory_mib=8)
    assert error.what == "one user has 9 events, too many to sort in 8 MiB"
    assert stored(path, memory_mib=int(error.fix.split()[1].rstrip(";"))).events == 9  # type: ignore[union-attr]


def test_too_many_ids_for_memory_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, HEADER + "".join(f"u{user},1,1,1\n" for user in range(30_000)))
    error = refused(path, memory_mib=8)
    assert "do not fit into 8 MiB: 30,000 users, 1 items" in error.what
    assert stored(path).users == 30_000


def test_kept_ids_stay(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "7,0,5,4\n2147483647,9,1,1\n0,3,2,5\n")
    store = stored(path, ids="keep")
    assert store.user_ids_U.tolist() == [0, 7, 2147483647]
    assert rows(store)[1:] == [(7, 0, 5, True), (2147483647, 9, 1, False)]
    assert store.items == 10
    assert not list(store.folder.glob("*.jsonl"))
    with pytest.raises(DataError, match="no list of its original users"):
        originals(store.folder, "users")


def test_originals_are_listed_with_their_digest(tmp_path: Path) -> None:
    import hashlib

    path = written(tmp_path, 'u,i,t,r\nx,"say ""hi""",1,4\nb\u2028c,2,1,4\n')
    store = stored(path)
    assert originals(store.folder, "users") == ["b\u2028c", "x"]
    assert originals(store.folder, "items") == ["2", 'say "hi"']
    said = store.manifest["originals"]["items"]
    assert said["sha256"] == hashlib.sha256((store.folder / said["file"]).read_bytes()).hexdigest()
    assert (said["lines"], said["kind"]) == (2, "text")


def test_numbers_turn_to_text_when_a_later_id_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports_read, "_LARGEST_BLOCK", 64)
    lines = [f"{user},1,{user},4\n" for user in (10, 9, 100, 2) * 8] + ["x,1,1,4\n", "9,1,1,4\n"]
    store = stored(written(tmp_path, HEADER + "".join(lines)), memory_mib=8)
    assert originals(store.folder, "users") == ["10", "100", "2", "9", "x"]
    assert np.diff(store.user_first_U1).tolist() == [8, 8, 8, 9, 1]


def test_parquet_of_several_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    data = pa.table(
        {
            "u": pa.array(["b", "a", "b", "a"]).dictionary_encode(),
            "unused": [None] * 4,
            "i": pa.array([5.0, 6.0, 5.0, 7.0]),
            "t": pa.array([3_000_999, 2_000_000, 1_000_000, 2_000_000], pa.timestamp("us")),
            "r": pa.array([True, False, True, True]),
        }
    )
    parquet.write_table(data, path, row_group_size=3)
    store = stored(path, label="r")
    assert rows(store) == [(1, 2, 2, False), (1, 3, 2, True), (2, 1, 1, True), (2, 1, 3, True)]
    assert originals(store.folder, "items") == [5, 6, 7]


@pytest.mark.parametrize(
    ("unit", "times", "seconds"),
    [
        ("s", ("12", "7.9"), [12, 7]),
        ("ms", ("1700000000123", "999"), [1_700_000_000, 0]),
        ("us", ("1700000000123456", "1"), [1_700_000_000, 0]),
        ("iso", ("1970-01-02", "1970-01-01 00:01:00.5"), [86_400, 60]),
        ("iso", ("1970-01-01T02:00:00+02:00", "1970-01-01T00:00:09Z"), [0, 9]),
        ("s", ("4294967295", " 5 "), [4294967295, 5]),
    ],
)
def test_times(tmp_path: Path, unit: Any, times: tuple[str, str], seconds: list[int]) -> None:
    path = written(tmp_path, f"{HEADER}1,1,{times[0]},4\n2,1,{times[1]},4\n")
    assert stored(path, time_unit=unit).times_E.tolist() == seconds


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("u;i;t;r\n1;2;3;4\n", {}),
        ("u\ti\tt\tr\n1\t2\t3\t4\n", {}),
        ("u|i|t|r\r\n1|2|3|4\r\n\r\n", {}),
        ("u,i,t,r\r1,2,3,4\r", {}),
        ("\ufeffu,i,t,r\n1,2,3,4", {}),
        ("1::2::4::3\n", {"user": "1", "item": "2", "rating": "3", "time": "4"}),
        ("u::i::t::r\n1::2::3::4\n", {}),
        ("u i t r\n1 2 3 4\n", {"delimiter": " "}),
        ("u,i,x,t,x,r\n1,2,9,3,9,4\n", {}),
        ("a,b,c,d\n1,2,3,4\n", {"user": "1", "item": "2", "time": "3", "rating": "4", "header": "yes"}),
        ('"u","i","t","r"\n"1","2","3","4"\n', {}),
        ("1,2,3,4\n", {"user": "1", "item": "2", "time": "3", "rating": "4", "header": "no"}),
    ],
)
def test_text_in_many_shapes(tmp_path: Path, content: str, options: dict[str, Any]) -> None:
    store = stored(written(tmp_path, content), ids="keep", **options)
    assert rows(store) == [(1, 2, 3, True)]


def test_a_rating_counts_from_where_it_is_told_to(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "1,1,1,2.5\n1,1,2,2.4\n1,1,3,-1\n")
    store = stored(path, positive_from=2.5)
    assert [row[3] for row in rows(store)] == [True, False, False]
    assert ratios(store).tolist() == [100, 0, 0]


def test_ratios_are_cut_not_rounded(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "1,1,1,49.9\n1,1,2,50\n1,1,3,250\n1,1,4,0\n")
    store = stored(path, ratio="r")
    assert ratios(store).tolist() == [49, 50, 250, 0]
    assert [row[3] for row in rows(store)] == [False, True, True, False]


def test_only_listens_need_a_signal(tmp_path: Path) -> None:
    lines = ["1,1,1,60,listen", "1,1,2,,like", "1,1,3,nonsense,Dislike", "1,1,4,,unlike", "1,1,5,,undislike"]
    path = written(tmp_path, "u,i,t,r,k\n" + "\n".join(lines) + "\n1,1,6,10,listen\n")
    kinds = stored(path, ratio="r", type="k").kinds(slice(None))
    assert [EVENT_TYPES[kind >> TYPE_SHIFT] for kind in kinds] == [*EVENT_TYPES, "listen"]
    assert (kinds & POOLS).tolist() == [LISTEN_PLUS, LIKE, 0, 0, 0, SKIP]
    missing = written(tmp_path, "u,i,t,r,k\n1,1,1,,like\n1,1,1,,listen\n", "other.csv")
    (tmp_path / "store").rename(tmp_path / "first")
    assert refused(missing, ratio="r", type="k").what == "row 2: no ratio"
    wrong = written(tmp_path, "u,i,t,r,k\n1,1,1,,like\n1,1,1,5,likes\n", "wrong.csv")
    assert refused(wrong, ratio="r", type="k").what.startswith("row 2: unknown type 'likes'; known: listen, like,")


def test_artists_and_albums_the_last_one_stays(tmp_path: Path) -> None:
    lines = ["1,10,1,4,A,7", "1,10,2,4,B,", "2,11,1,4,,7", "2,12,1,4,B,8", "2,10,3,4,A,8", "2,12,1,4,B,8"]
    path = written(tmp_path, "u,i,t,r,a,b\n" + "\n".join(lines) + "\n")
    store = stored(path, artist="a", album="b")
    assert store.catalogue_I2.tolist() == [[0, 0], [1, 2], [0, 1], [2, 2]]
    assert originals(store.folder, "artists") == ["A", "B"]
    assert originals(store.folder, "albums") == [7, 8]
    assert store.manifest["items_with_several"] == {"artists": 1, "albums": 1}


def test_an_artist_that_stands_for_none_is_unknown(tmp_path: Path) -> None:
    path = written(tmp_path, "u,i,t,r,a\n1,1,1,4,NA\n1,2,1,4,b\n")
    store = stored(path, artist="a")
    assert store.catalogue_I2.tolist() == [[0, 0], [0, 0], [1, 0]]
    assert originals(store.folder, "artists") == ["b"]


def test_an_artist_nobody_has(tmp_path: Path) -> None:
    path = table(tmp_path, u=[1], i=[1], t=[1], r=[4], a=pa.nulls(1))
    assert stored(path, artist="a").catalogue_I2.tolist() == [[0, 0], [0, 0]]


def test_what_the_store_says_of_its_source(tmp_path: Path) -> None:
    from recperf.files import sha256

    path = written(tmp_path, HEADER + "1,1,9,4\n1,1,5,4\n1,1,6,4\n2,1,1,4\n")
    options = ImportOptions(events=path, rating="r", **NAMED)
    import_events(options, tmp_path / "store")
    manifest = open_store(tmp_path / "store").manifest
    assert (manifest["name"], manifest["synthetic"], manifest["licence"]) == ("imported", False, "that of the source")
    chosen = {name: value for name, value in to_json(options).items() if name not in ("events", "memory_mib")}
    facts = {"source": "log.csv", "bytes": path.stat().st_size, "sha256": sha256(path), "options": chosen}
    assert manifest["identity"] == facts
    assert manifest["earlier_than_the_event_before"] == 1
    assert manifest["import"]["events"] == "log.csv"
    assert "split" not in manifest
    assert str(tmp_path) not in json.dumps(manifest)


@pytest.mark.parametrize("kind", ["text", "gzip", "parquet"])
def test_progress_is_of_what_was_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    count = 60_000
    monkeypatch.setattr(imports_read, "_LARGEST_BLOCK", 1 << 15)
    monkeypatch.setattr(imports_read, "_ROWS", 2048)
    monkeypatch.setattr(imports_sort, "EVENT_COST", (8 << 20) // 2 // (count // 3))
    numbers = np.random.default_rng(0).integers(10**17, 10**18, count)
    users = np.arange(count) % 9
    lines = [f"{user},{item},1,4\n" for user, item in zip(users, numbers)]
    text = (HEADER + "".join(lines)).encode()
    path = written(tmp_path, gzip.compress(text) if kind == "gzip" else text)
    if kind == "parquet":
        path = table(tmp_path, u=users, i=numbers, t=[1] * count, r=[4] * count)
    taken: list[tuple[int, int, int]] = []
    sorting: list[tuple[int, int]] = []
    import_events(
        ImportOptions(events=path, rating="r", memory_mib=8, **NAMED),
        tmp_path / "store",
        reading=lambda *at: taken.append(at),
        sorting=lambda *at: sorting.append(at),
    )
    assert taken[-1] == (path.stat().st_size, path.stat().st_size, count)
    assert len(taken) > 15
    for done, total, events in taken:
        # gzip is taken from the disk 64 KiB at a time.
        assert done / total == pytest.approx(events / count, abs=0.03 + (65_536 / total if kind == "gzip" else 0))
    assert len(sorting) > 1
    assert sorting == sorted(sorting)
    assert sorting[0][0] == 0
    assert sorting[-1] == (count, count)


BAD_ROWS = {
    "no user": ("1,1,1,4\n,1,1,4", {}, "row 2: no user"),
    "blank item": ("1,1,1,4\n1,  ,1,4", {}, "row 2: no item"),
    "no time": ("1,1,1,4\n1,1,,4", {}, "row 2: no time"),
    "no rating": ("1,1,1,4\n1,1,1,", {}, "row 2: no rating"),
    "negative id": ("1,1,1,4\n-3,1,1,4", {"ids": "keep"}, "row 2: user is -3; it must be 0 to 2,147,483,647"),
    "text id": ("1,1,1,4\n1,x,1,4", {"ids": "keep"}, "row 2: item 'x' is not an integer"),
    "leading zero": ("1,1,1,4\n1,01,1,4", {"ids": "keep"}, "row 2: item '01' is not an integer"),
    "large id": (
        "1,1,1,4\n2147483648,1,1,4",
        {"ids": "keep"},
        "row 2: user is 2147483648; it must be 0 to 2,147,483,647",
    ),
    "huge id": ("1,1,1,4\n1,1" + "0" * 40 + ",1,4", {"ids": "keep"}, "row 2: item is 1" + "0" * 40 + "; it must be 0"),
    "large item": (
        "1,2147483647,1,4",
        {"ids": "keep"},
        "item 2,147,483,647 would need a catalogue of 16,384 MiB for 1 items",
    ),
    "missing user": ("1,1,1,4\nnan,1,1,4", {}, "row 2: no user: 'nan' stands for a missing value"),
    "missing item": ("1,1,1,4\n1, NULL ,1,4", {"ids": "keep"}, "row 2: no item: 'NULL' stands for a missing value"),
    "time": ("1,1,1,4\n1,1,soon,4", {}, "row 2: time 'soon' is not a number"),
    "nan time": ("1,1,1,4\n1,1,nan,4", {}, "row 2: time 'nan' is not a number"),
    "negative time": ("1,1,1,4\n1,1,-5,4", {}, "row 2: time -5 is negative or before 1970"),
    "fraction before zero": ("1,1,1,4\n1,1,-0.5,4", {}, "row 2: time -0.5 is negative or before 1970"),
    "milliseconds": (
        "1,1,1,4\n1,1,1700000000000,4",
        {},
        "row 2: time 1700000000000 in s is beyond the last second a store holds (4,294,967,295)",
    ),
    "endless": ("1,1,1,4\n1,1,1e300,4", {"time_unit": "us"}, "row 2: time 1e300 in us is beyond"),
    "iso": ("1,1,1970-01-01,4\n1,1,1/2/1970,4", {"time_unit": "iso"}, "row 2: time '1/2/1970' is not an ISO time"),
    "zones": (
        "1,1,1970-01-01T00:00:00Z,4\n1,1,1970-01-01T00:00:00,4",
        {"time_unit": "iso"},
        "row 2: time '1970-01-01T00:00:00' is not an ISO time",
    ),
    "before 1970": ("1,1,1969-12-31,4", {"time_unit": "iso"}, "row 1: time 1969-12-31 is negative or before 1970"),
    "rating": ("1,1,1,4\n1,1,1,good", {}, "row 2: rating 'good' is not a number"),
    "nan": ("1,1,1,4\n1,1,1,nan", {}, "row 2: rating 'nan' is not a number"),
    "infinite": ("1,1,1,4\n1,1,1,inf", {}, "row 2: rating 'inf' is not a number"),
    "ratio": ("1,1,1,4\n1,1,1,-1", {"ratio": "r"}, "row 2: ratio -1 is not a percentage of 0 to 65535"),
    "label": ("1,1,1,0\n1,1,1,1\n1,1,1,2", {"label": "r"}, "row 3: label '2' is neither 0 nor 1"),
    "short row": ("1,1,1,4\n1,1,1", {}, "row 2 has 3 columns; the first line has 4"),
    "long row": ("1,1,1,4\n\n1,1,1,4,5", {}, "row 2 has 5 columns; the first line has 4"),
    "open quote": ('1,1,1,4\n"1,1,1,4\n1,1,1,4\n"1,1,1,4', {}, "row 2"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named(tmp_path: Path, case: str) -> None:
    content, options, message = BAD_ROWS[case]
    error = refused(written(tmp_path, f"{HEADER}{content}\n"), **options)
    assert error.what.startswith(message)
    assert error.exit_code == 3


def test_milliseconds_come_with_what_to_do(tmp_path: Path) -> None:
    error = refused(written(tmp_path, HEADER + "1,1,1700000000000,4\n"))
    assert "--time-unit ms" in (error.fix or "")


def test_rows_are_counted_through_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports_read, "_LARGEST_BLOCK", 64)
    monkeypatch.setattr(imports_read, "_ROWS", 16)
    path = written(tmp_path, HEADER + "1,1,1,4\n" * 100 + "1,1,x,4\n")
    assert refused(path, memory_mib=8).what.startswith("row 101: time 'x'")
    path = written(tmp_path, HEADER + "1,1,1,4\n" * 100 + "1,1,4\n")
    assert refused(path, memory_mib=8).what.startswith("row 101 has 3 columns")
    path = written(tmp_path, HEADER.encode() + b"1,1,1,4\r\n\r\n" * 100 + b"\xff,1,1,4\r\n")
    assert refused(path, memory_mib=8).what.startswith("row 101 is not UTF-8")
    path = written(tmp_path, HEADER + "1,1,1,4" + "\n" * 300 + "1" * 70 + ",1,1,4\n")
    assert "longer than a block" in refused(path, memory_mib=8).what
    path = table(tmp_path, u=[1] * 100, i=[1] * 100, t=[1] * 99 + [-1], r=[1] * 100)
    assert refused(path).what.startswith("row 100: time -1 is negative")


def test_parquet_types_that_cannot_be(tmp_path: Path) -> None:
    good = {"u": [1, 2], "i": [1, 2], "t": [1, 2], "r": [1.0, 2.0]}
    assert refused(table(tmp_path, **good | {"u": [[1], [2]]})).what.startswith("row 1: the user is of type list")
    assert refused(table(tmp_path, **good | {"u": [1.0, 2.5]})).what == "row 2: user 2.5 is not a whole number"
    assert "is of type bool" in refused(table(tmp_path, **good | {"t": [True, False]})).what
    assert "is of type bool" in refused(table(tmp_path, **good | {"r": [True, False]})).what
    assert refused(table(tmp_path, **good | {"r": [1.0, float("nan")]})).what == "row 2: rating nan is not a number"
    assert refused(table(tmp_path, **good | {"i": [1, None]})).what == "row 2: no item"
    nan = pa.array([1.0, float("nan")], from_pandas=False)
    assert refused(table(tmp_path, **good | {"i": nan})).what == "row 2: no item: 'nan' stands for a missing value"
    large = pa.array([1, 1 << 63], pa.uint64())
    beyond = "row 2: user 9223372036854775808 is beyond 9,223,372,036,854,775,807, the largest number of an id"
    assert refused(table(tmp_path, **good | {"u": large})).what == beyond
    kept = refused(table(tmp_path, **good | {"u": large}), ids="keep")
    assert kept.what == "row 2: user is 9223372036854775808; it must be 0 to 2,147,483,647"
    assert refused(table(tmp_path, **good | {"u": [1.0, 1e300]})).what.startswith("row 2: user 1e+300 is beyond")
    assert "not text like" in refused(table(tmp_path, **good), time_unit="iso").what


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    good = {"u": [1] * 5, "i": [1] * 5, "t": [1] * 5, "r": [1.0] * 5}
    broken = pa.array([b"a", b"b", b"c", b"\xff\xfe", b"\xff"], pa.binary())
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        for column, role in (("u", "user"), ("t", "time"), ("r", "rating")):
            error = refused(table(tmp_path, **good | {column: broken.cast(kind)}))
            assert error.what == f"row 4: the {role} is not UTF-8 text"


@pytest.mark.parametrize("kind", ["string_view", "binary_view", "large_string", "large_binary", "binary", "dictionary"])
def test_text_of_every_type(tmp_path: Path, kind: str) -> None:
    def typed(*words: str) -> Any:
        text = pa.array(words)
        return text.dictionary_encode() if kind == "dictionary" else text.cast(getattr(pa, kind)())

    path = table(tmp_path, u=typed("b", "a"), i=typed("7", "8"), t=typed("5", "6"), r=typed("1", "0"))
    assert rows(stored(path, label="r")) == [(1, 2, 6, False), (2, 1, 5, True)]


@pytest.mark.parametrize("role", ["u", "i", "t", "r", "a", "k"])
def test_no_type_of_parquet_is_a_traceback(tmp_path: Path, role: str) -> None:
    good = {"u": [1], "i": [1], "t": [1], "r": [1.0], "a": ["x"], "k": ["listen"]}
    strange = [
        pa.array([1.5], pa.float16()),
        pa.array([1], pa.decimal128(5, 2)),
        pa.array([1], pa.duration("s")),
        pa.array([1], pa.time32("s")),
        pa.array([1], pa.date32()),
        pa.array([b"abc"], pa.binary(3)),
        pa.array([{"x": 1}]),
        pa.array([True]),
        pa.nulls(1),
    ]
    for number, column in enumerate(strange):
        path = table(tmp_path, **good | {role: column})
        folder = tmp_path / f"store{number}"
        with contextlib.suppress(DataError):
            import_events(ImportOptions(events=path, rating="r", artist="a", type="k", **NAMED), folder)


def test_unknown_columns(tmp_path: Path) -> None:
    path = written(tmp_path, "user_id,item,stamp,r\n1,1,1,4\n")
    error = refused(path, user="userid", item="item", time="stamp")
    assert error.what == "there is no column 'userid' for the user; did you mean 'user_id'?"
    assert error.where["columns"] == "user_id, item, stamp, r"
    assert "known: user_id, item, stamp, r" in refused(path, user="zzz", item="item", time="stamp").what
    numbered = {"user": "1", "item": "2", "time": "3", "rating": "5"}
    assert "no column '5' for the rating; known: 1 to 4" in refused(path, **numbered, header="no").what
    assert refused(path, user="user_id", item="1", time="stamp").exit_code == 2
    assert "without a header has no column 'u'" in refused(path, header="no").what
    twice = written(tmp_path, "u,u,i,t,r\n1,1,1,1,4\n")
    assert "has 2 columns named 'u'" in refused(twice).what
    assert "no column 'q'" in refused(table(tmp_path, u=[1], i=[1], t=[1], r=[1]), user="q").what


def test_files_that_are_none(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent.csv").what == "the file of events does not exist"
    (tmp_path / "folder").mkdir()
    assert "a folder" in refused(tmp_path / "folder").what
    assert "is empty" in refused(written(tmp_path, "")).what
    assert refused(written(tmp_path, HEADER)).what == "the file has a header and no events"
    assert refused(written(tmp_path, "u,i,t,r")).exit_code == 3
    assert refused(written(tmp_path, gzip.compress(b""))).what == "the first line is empty"
    assert "first line is empty" in refused(written(tmp_path, "\nu,i,t,r\n1,1,1,1\n")).what
    assert "not a text file" in refused(written(tmp_path, b"PK\0\0")).what
    assert "not a parquet file" in refused(written(tmp_path, HEADER, "x.parquet")).what
    assert "row 1 is not UTF-8" in refused(written(tmp_path, HEADER.encode() + b"\xff,1,1,1\n")).what
    assert "first line is not UTF-8" in refused(written(tmp_path, b"\xff\xff,1,1,1\n")).what
    assert refused(table(tmp_path, u=[], i=[], t=[], r=[])).what == "the file has no events"
    assert "the first line cannot be read" in refused(written(tmp_path, "u" * 200_000 + "\n1\n")).what
    open_quote = HEADER.replace("\n", ",x\n") + '1,1,1,4,"a\n' + "2,1,1,4,b\n" * 3
    assert "a quote is left open" in refused(written(tmp_path, open_quote)).what
    # A quote inside of a value is a letter.
    assert stored(written(tmp_path, HEADER.replace("\n", ",x\n") + '1,1,1,4,5"\n2,1,1,4,b\n')).events == 2


def test_cut_short(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    text = HEADER + "".join(f"{user},1,1,1\n" for user in random.integers(0, 1 << 60, 5_000))
    zipped = gzip.compress(text.encode())
    for keep in (15, len(zipped) // 2, len(zipped) - 3):
        assert "damaged or cut short" in refused(written(tmp_path, zipped[:keep], "x.csv.gz")).what
    whole = table(tmp_path, u=random.integers(0, 1 << 60, 5_000), i=[1] * 5_000, t=[1] * 5_000, r=[1] * 5_000)
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    assert "damaged or cut short" in refused(whole).what


def test_a_flipped_bit_of_parquet_with_checksums(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    one = [1] * 5_000
    users = np.random.default_rng(0).integers(0, 1 << 60, 5_000)
    parquet.write_table(pa.table({"u": users, "i": one, "t": one, "r": one}), path, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[5_000] ^= 1
    path.write_bytes(content)
    assert "damaged or cut short" in refused(path).what


def test_options_are_checked_where_they_are_made(tmp_path: Path) -> None:
    def made(**options: Any) -> ImportOptions:
        return ImportOptions(events=tmp_path, **{"rating": "r", **options})

    with pytest.raises(UsageError, match="none of rating, ratio and label is given"):
        made(rating=None)
    with pytest.raises(UsageError, match="rating and label are given"):
        made(label="x")
    with pytest.raises(UsageError, match="column 'item' is given as user and as item"):
        made(user="item")
    for wrong in (
        {"user": ""},
        {"delimiter": "ab"},
        {"delimiter": '"'},
        {"memory_mib": 7},
        {"positive_from": float("nan")},
        {"name": "../x"},
        {"name": "yambda-5b"},
    ):
        with pytest.raises(ConfigError):
            made(**wrong)


def test_a_store_that_is_there_stays(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "1,1,1,4\n")
    first = stored(path).digest
    other = written(tmp_path, HEADER + "2,2,2,4\n2,1,1,1\n", "other.csv")
    with pytest.raises(DataError):
        stored(other)
    assert open_store(tmp_path / "store").digest == first


def test_the_same_import_again_answers_with_what_is_there(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "1,1,1,4\n2,1,1,4\n")
    first = stored(path)
    when = (first.folder / "items.u4").stat().st_mtime_ns
    # As after a kill between the rename and the tidying.
    (first.folder / "journal.json").write_text("{}")
    moved = written(tmp_path, path.read_bytes(), "log2.csv").rename(tmp_path / "sub.csv")
    assert stored(path, memory_mib=64).digest == first.digest
    assert (first.folder / "items.u4").stat().st_mtime_ns == when
    assert not (first.folder / "journal.json").exists()
    with pytest.raises(DataError, match=r"by other options: positive_from 4\.0, now 3\.0$"):
        stored(path, positive_from=3.0)
    with pytest.raises(DataError, match="by other options: name imported, now mine"):
        stored(path, name="mine")
    with pytest.raises(DataError, match="of another source"):
        stored(moved)
    with pytest.raises(DataError, match="of another source"):
        stored(written(tmp_path, HEADER + "1,1,1,4\n"))


def test_a_killed_import_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, HEADER + "1,1,1,4\n")
    with monkeypatch.context() as patch:
        # As after SIGKILL: nothing was cleaned up.
        patch.setattr(imports.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(imports, "write_sorted", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stored(path)
    assert (tmp_path / "store.building" / "sorting" / "events").exists()
    assert stored(path).events == 1
    assert not (tmp_path / "store" / "sorting").exists()


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(imports_read, "import_module", missing)
    error = refused(written(tmp_path, HEADER + "1,1,1,4\n"))
    assert isinstance(error, MachineError)
    assert error.fix == "pip install 'recperf[yambda]'"


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    path = written(tmp_path, HEADER + "1,1,1,4\n")
    (tmp_path / "stores").mkdir()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def closed(self: imports_sort.Spool) -> imports_sort.Spool:
        self._file = type("Full", (), {"write": full, "close": full})()
        return self

    monkeypatch.setattr(imports_sort.Spool, "__enter__", closed)
    with pytest.raises(MachineError, match="the disk is full") as caught:
        import_events(ImportOptions(events=path, rating="r", **NAMED), tmp_path / "stores" / "store")
    assert "begins anew" in (caught.value.fix or "")
    assert not list((tmp_path / "stores").iterdir())
