"""Imports of logs as users have them: without labels or times, with genres or a file of items; queries by own ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from recperf.data.events.imports import import_dataset, import_events
from recperf.data.events.item_table import columns_of, item_values, titles_of
from recperf.data.events.kinds import DRAWN, POSITIVE
from recperf.data.events.manifest import DrawnNegatives
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import EventStore, open_store, originals, verify
from recperf.data.known.event_files import check_store
from recperf.data.streaming.config import HistoryConfig, WindowConfig
from recperf.data.streaming.history import Histories
from recperf.data.streaming.queries import RowQueries
from recperf.data.streaming.windows import WindowIndex
from recperf.data.tables import BadRow
from recperf.errors import DataError, UsageError
from recperf.workloads.dlrm_v4 import own_data


def imported(path: Path, content: str, *, folder: str = "store", **options: Any) -> EventStore:
    path.write_text(content)
    store = open_store(import_events(ImportOptions(events=path, **options), path.parent / folder))
    verify(store)
    return store


def clicks(users: int = 30, items: int = 50) -> list[tuple[int, int, int]]:
    random = np.random.default_rng(5)
    return [(user, int(item), int(time)) for user in range(users)
            for item, time in zip(random.integers(0, items, 12), np.sort(random.integers(0, 10**6, 12)))]  # fmt: skip


@pytest.fixture
def implicit(tmp_path: Path) -> EventStore:
    lines = "".join(f"{user},{item},{time}\n" for user, item, time in clicks())
    return imported(tmp_path / "log.csv", "user_id,item_id,ts\n" + lines, negatives=3)


def test_columns_are_recognised_by_usual_names(tmp_path: Path) -> None:
    lines = "7,1,5,9,A,1\n8,2,1,8,B,1\n8,1,1,8,B,2\n"
    store = imported(tmp_path / "log.csv", "Movie ID,userId,rating,timestamp,title,n\n" + lines)
    columns = {role: getattr(store.imported.options, role) for role in ("user", "item", "rating", "time")}
    assert columns == {"user": "userId", "item": "Movie ID", "rating": "rating", "time": "timestamp"}
    assert titles_of(store, np.arange(3)) == [None, "A", "B"]
    assert store.imported.unused_columns == {"n": ""}
    assert store.imported.distinct == {"users": 2, "items": 2}
    with pytest.raises(DataError, match="no column has a usual name for the user"):
        imported(tmp_path / "log.csv", "who,item,r\n1,2,3\n", folder="other")


def test_drawn_negatives_are_items_that_the_user_has_not_had_yet(implicit: EventStore) -> None:
    """They may be of the user's later events: else a negative would tell which items never come."""
    drawn = (implicit.kinds(slice(None)) & DRAWN) > 0
    items, times = implicit.items_at(slice(0, implicit.events)), implicit.times_E[:]
    users = implicit.users_of(np.arange(implicit.events))
    assert implicit.imported.negatives == DrawnNegatives(per_event=3, by="uniform", seed=7, drawn=1080, left_out=0)
    assert drawn.reshape(-1, 4).tolist() == [[True, True, True, False]] * 360, "each positive follows its negatives"
    assert (times.reshape(-1, 4) == times.reshape(-1, 4)[:, :1]).all()
    same = (users[:, None] == users) & (items[:, None] == items) & drawn[:, None] & ~drawn
    assert not (same & (times[:, None] >= times)).any()
    # As often as any other: of 50 items a user has about five more different ones, half of them later.
    assert 0.5 * 1080 * 5 / 50 < same.any(1).sum() < 2 * 1080 * 5 / 50
    assert len(set(items[drawn].tolist())) == 50
    assert implicit.split_note == "; 3 negatives drawn per event, uniform"


def test_histories_hold_no_drawn_events_and_are_those_of_the_positive(implicit: EventStore) -> None:
    index = WindowIndex.open(implicit, WindowConfig(seconds=1 << 30, min_history=5))
    anchors = np.sort(index.anchors(0))
    assert len(anchors) == 30 * 7 * 4
    batch = Histories(own_data.with_groups(implicit), HistoryConfig(length=50, strategy="last-n", scan=12)).batch(
        anchors
    )
    lengths = np.diff(batch.history_offsets_B1.numpy()).reshape(-1, 4)
    assert lengths.tolist() == [[count] * 4 for count in range(5, 12)] * 30
    assert set(batch.actions_T.tolist()) == {POSITIVE}
    assert batch.labels_B.reshape(-1, 4).tolist() == [[0, 0, 0, 1]] * 210
    assert (batch.query_times_B.reshape(-1, 4) == batch.query_times_B.reshape(-1, 4)[:, :1]).all()


def test_events_without_a_time_are_in_random_order_or_in_that_of_the_file(tmp_path: Path) -> None:
    content = "user,item,rating\n" + "".join(f"{row % 7},{row},{1 + row % 5}\n" for row in range(70))
    random = imported(tmp_path / "log.csv", content)
    assert random.split_note == "; events without times, in random order"
    assert sorted(random.times_E[:].tolist()) == list(range(70))
    assert np.corrcoef(random.times_E[:], random.items_at(slice(0, 70)))[0, 1] < 0.5
    in_order = imported(tmp_path / "log.csv", content, folder="rows", order="rows")
    assert in_order.times_E[:].tolist() == [row for user in range(7) for row in range(user, 70, 7)]
    assert imported(tmp_path / "log.csv", content, folder="seed", seed=8).digest != random.digest


@pytest.mark.parametrize("form", ["list in JSON", "list in Parquet", "bars", "commas", "printed list"])
def test_lists_of_categories(tmp_path: Path, form: str) -> None:
    genres = {10: ["War", "Drama"], 11: ["Drama", "War"], 12: [], 13: ["Drama"]}
    rows = [(user, item, 10 * user + item, genres[item]) for user in (1, 2) for item in genres]
    path = tmp_path / "log"
    names = ("userId", "movieId", "timestamp", "genres")
    if form == "list in Parquet":
        parquet.write_table(pa.table(dict(zip(names, map(list, zip(*rows))))), path)
        store = open_store(import_events(ImportOptions(events=path, negatives=0), tmp_path / "store"))
    elif form == "list in JSON":
        lines = "".join(json.dumps(dict(zip(names, row))) + "\n" for row in rows)
        store = imported(path, lines, negatives=0)
    else:
        text = {"bars": "|".join, "commas": ", ".join, "printed list": str}[form]
        lines = "".join(f'{user},{item},{time},"{text(values)}"\n' for user, item, time, values in rows)
        store = imported(path, ",".join(names) + "\n" + lines, negatives=0)
    column = columns_of(store)["genres"]
    assert column.kind == "categories"
    assert column.values.to_pylist() == [None, *genres.values()]
    # dlrm-v4 reads two groups in place of artist and album: the first value, and the set of all.
    groups = own_data.groups(store)
    assert groups is not None
    assert groups.names == (["Drama", "War"], ["Drama", "Drama|War"])
    assert groups.numbers_I2.tolist() == [[0, 0], [2, 2], [1, 2], [0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        (("1700000000", "1700000009"), "s"),
        (("1700000000000", "1700000009000"), "ms"),
        (("1700000000000000", "1700000009000000"), "us"),
        (("1700000000000000000", "1700000009000000000"), "ns"),
        (("2023-11-14T22:13:20", "2023-11-14T22:13:29"), "iso"),
    ],
)
def test_the_unit_of_times_follows_from_them(tmp_path: Path, times: tuple[str, str], unit: str) -> None:
    store = imported(tmp_path / "log.csv", f"user,item,time,label\n1,1,{times[0]},1\n2,1,{times[1]},0\n")
    assert store.times_E[:].tolist() == [1_700_000_000, 1_700_000_009]
    assert store.imported.options.time_unit == unit
    assert store.imported.days.first == "2023-11-14"


def test_notes_say_what_an_import_assumed(tmp_path: Path) -> None:
    def notes(content: str, name: str) -> list[str]:
        path = tmp_path / f"{name}.csv"
        path.write_text(content)
        options = ImportOptions(events=path, name=name)
        return import_dataset(options, tmp_path / name, progress=lambda *_: lambda *_: None)["notes"]

    assert notes("user,item,time,rating\n1,1,4102444800,5\n1,2,9,1\n", "one") == [
        "all rows have the same user: check --user",
        "the last event is in the future, 2100-01-01: check --time and --time-unit",
    ]
    without, drawn = notes("user,item\n1,1\n2,2\n", "bare")
    assert "random order" in without
    assert "4 negatives drawn for each (uniform, seed 7)" in drawn
    assert notes("user,item,time,rating\n1,1,1,0.9\n2,1,1,0.8\n", "same")[0].startswith("all rows are positive")


def test_a_store_of_another_version_is_refused_with_the_command_that_makes_it_anew(implicit: EventStore) -> None:
    path = implicit.folder / "store.json"
    content = path.read_text()
    path.write_text(content.replace('"version": 3', '"version": 2'))
    with pytest.raises(DataError, match="format 'recperf-events' 2; this recperf reads 'recperf-events' 3") as caught:
        open_store(implicit.folder)
    assert caught.value.fix == "recperf data import log.csv --name log --replace, with the other options as before"
    path.write_text(content.replace('"version": 3', '"version": 2').replace('"import"', '"other"'))
    with pytest.raises(DataError) as caught:
        open_store(implicit.folder)
    assert caught.value.fix == f"remove {implicit.folder}, then recperf data prepare log"


def test_check_covers_the_lists_of_own_ids(implicit: EventStore) -> None:
    assert {"users.jsonl", "items.jsonl"} <= set(check_store(implicit, lambda *_: None)["verified_by_digest"])
    path = implicit.folder / "users.jsonl"
    path.write_text(path.read_text().replace("7", "8", 1))
    with pytest.raises(DataError, match=r"users\.jsonl is not the file that was written"):
        check_store(implicit, lambda *_: None)


EVENTS = "user,item,time,label\n1,10,5,1\n1,7,6,0\n2,7,7,1\n2,9,8,1\n"


def with_items(folder: Path, items: str | bytes, name: str = "items.csv", **options: Any) -> EventStore:
    (folder / "log.csv").write_text(EVENTS)
    (folder / name).write_bytes(items if isinstance(items, bytes) else items.encode())
    requested = ImportOptions(events=folder / "log.csv", items=folder / name, **options)
    return open_store(import_events(requested, folder / "store"))


def test_columns_of_items_by_the_numbers_of_the_store(tmp_path: Path) -> None:
    rows = "brand,Item_ID,title,tags,url\nB,10,Ten,x|y,u1\nA,7,,y,u2\nA,8,Eight,z,u3\n,9, Nine ,,u4\n"
    store = with_items(tmp_path, rows)
    # Items 7, 9 and 10 have the numbers 1, 2 and 3; 8 has no events.
    assert titles_of(store, np.arange(4)) == [None, None, "Nine", "Ten"]
    columns = columns_of(store)
    assert {name: (one.kind, one.values.to_pylist()) for name, one in columns.items()} == {
        "brand": ("category", [None, "A", None, "B"]),
        "tags": ("categories", [None, ["y"], [], ["x", "y"]]),
        "url": ("text", [None, "u2", "u4", "u1"]),
    }
    assert store.imported.unused_columns == {}
    values = item_values(store)
    assert values.names == ["brand: A", "brand: B", "tags: x", "tags: y"]
    weighted = [dict(zip(*one)) for one in zip(values.rows_IK.tolist(), values.weights_IK.tolist())]
    assert [{row: one for row, one in item.items() if one} for item in weighted] == [
        {}, {1: 1, 4: 1}, {}, {2: 1, 3: 0.5, 4: 0.5}
    ]  # fmt: skip
    groups = own_data.groups(store)
    assert (groups.columns, groups.names) == (("brand", "tags"), (["A", "B"], ["x|y", "y"]))
    assert groups.numbers_I2.tolist() == [[0, 0], [1, 2], [0, 0], [2, 1]]
    assert "items.parquet" in check_store(store, lambda *_: None)["verified_by_digest"]
    (store.folder / "items.parquet").write_bytes(b"other")
    with pytest.raises(DataError, match="the event store is damaged"):
        columns_of(store)


def test_numbers_of_items_have_ranges_with_about_as_many_items_each(tmp_path: Path) -> None:
    lines = "".join(f"{user},{item},{user + item},{item + item / 4}\n" for user in range(3) for item in range(40))
    store = imported(tmp_path / "log.csv", "user,item,time,price\n" + lines, negatives=0)
    prices, values = columns_of(store)["price"], item_values(store)
    assert prices.kind == "number"
    assert prices.values.to_pylist()[1:] == [1.25 * item for item in range(40)]
    assert values.names[:2] == ["price: below 3.75", "price: 3.75 to 8.75"]
    assert values.names[-1] == "price: from 43.75 on"
    rows = values.rows_IK[1:, 0]
    assert set(np.bincount(rows)[1:].tolist()) <= {3, 4, 5}
    assert (np.diff(rows) >= 0).all()


def test_a_file_of_users_and_context_go_with_the_events(tmp_path: Path) -> None:
    """Drawn negatives have the context of their event."""
    lines = "".join(f"u{user},{item},{user * 9 + item},{'web' if item % 2 else 'app'}\n" for user in range(6)
                    for item in range(user, user + 8))  # fmt: skip
    users = "age;who;land\n" + "".join(f"{20 + user};u{user};{'AB'[user % 2]}\n" for user in range(1, 6))
    (tmp_path / "users.csv").write_text(users)
    options = {"user": "who", "negatives": 2, "context": "channel", "users": tmp_path / "users.csv"}
    store = imported(tmp_path / "log.csv", "who,item,time,channel\n" + lines, **options)
    columns = columns_of(store, "user")
    assert {name: (one.kind, one.values.to_pylist()) for name, one in columns.items()} == {
        "age": ("number", [None, None, 21.0, 22.0, 23.0, 24.0, 25.0]),
        "land": ("category", [None, None, "B", "A", "B", "A", "B"]),
    }
    assert (store.imported.tables["user"].id, store.imported.tables["user"].without) == ("who", 1)
    assert store.imported.context.columns == {"channel": "category"}
    stored = parquet.read_table(store.folder / "context.parquet").column(0).to_pylist()
    drawn, items = (store.kinds(slice(None)) & DRAWN) > 0, store.items_at(slice(None))
    positive = np.flatnonzero(~drawn)
    # Negatives come right before their event.
    events = positive[np.searchsorted(positive, np.arange(store.events))]
    own = np.array(originals(store.folder, "items"))[items[events] - 1]
    assert stored == ["web" if item % 2 else "app" for item in own.tolist()]


def test_a_file_without_a_header_in_latin_1_as_movielens_has(tmp_path: Path) -> None:
    rows = "7::Misérables, Les (1995)::Drama|Musical\n10::Heat::Drama\n"
    store = with_items(tmp_path, rows.encode("latin-1"), "movies.dat")
    assert titles_of(store, np.arange(4)) == [None, "Misérables, Les (1995)", None, "Heat"]
    assert columns_of(store)["3"].values.to_pylist() == [None, ["Drama", "Musical"], None, ["Drama"]]
    assert store.imported.tables["item"].without == 1


def test_bad_files_of_items_are_refused_by_row_and_cause(tmp_path: Path) -> None:
    for rows, message in (
        ("id,title\n7,a\n9,b\n7,c\n", "row 3: item '7' is in an earlier row, 1, too"),
        ("id,title\n7,a\n,b\n", "row 2: no item id"),
        ("id,title\n7,a\n9\n", "row 2 has 1 columns; the first line has 2"),
        ("id,title\n77,a\n78,b\n", "no item of the events is in items.csv, whose ids are like '77'"),
    ):
        with pytest.raises(DataError, match=message):
            with_items(tmp_path, rows)
        assert not (tmp_path / "store").exists()
    with pytest.raises(DataError, match="the file of items cannot be read"):
        import_events(ImportOptions(events=tmp_path / "log.csv", items=tmp_path / "none.csv"), tmp_path / "store")
    with pytest.raises(UsageError, match="a column of a file of items"):
        ImportOptions(events=tmp_path / "log.csv", items_id="1")
    store = with_items(tmp_path, "id,title\n7,a\n9,b\n7,c\n", skip_bad=1)
    assert titles_of(store, np.array([1])) == ["a"]


@pytest.fixture(scope="module")
def log() -> list[tuple[str, int, int, int]]:
    """Users of few events, many of them in the same second."""
    draw = np.random.default_rng(5)
    return [
        (f"u{user}", int(item), int(rating), int(time))
        for user, item, rating, time in zip(
            draw.integers(0, 12, 400), draw.integers(0, 30, 400), draw.integers(1, 6, 400), draw.integers(0, 9, 400)
        )
    ]


@pytest.fixture(scope="module")
def row_queries(log: list[tuple[str, int, int, int]], tmp_path_factory: pytest.TempPathFactory) -> RowQueries:
    folder = tmp_path_factory.mktemp("store")
    file = folder / "log.csv"
    lines = ["who,what,stars,at", *(f"{user},{item},{rating},{time * 1000 + 7}" for user, item, rating, time in log)]
    file.write_text("\n".join(lines))
    options = ImportOptions(events=file, user="who", item="what", rating="stars", time="at", time_unit="ms")
    return RowQueries(open_store(import_events(options, folder / "store")))


def test_a_history_ends_before_its_row(row_queries: RowQueries, log: list[tuple[str, int, int, int]]) -> None:
    store, draw = row_queries.store, np.random.default_rng(6)
    users = [f"u{user}" for user in draw.integers(0, 14, 300)]
    items, times = draw.integers(0, 33, 300), draw.integers(-1, 11, 300)
    asked = [None if time < 0 else int(time) * 1000 for time in times]
    queries, unknown = row_queries.queries({"user": pa.array(users), "item": pa.array(items), "time": pa.array(asked)})
    own_users, own_items = row_queries.users.values.to_pylist(), row_queries.items.values.to_pylist()
    assert {role: one.rows for role, one in unknown.items()} == {
        "user": sum(user not in own_users for user in users),
        "item": sum(int(item) not in own_items for item in items),
    }
    matched = 0
    for at, (user, item, time) in enumerate(zip(users, items.tolist(), times.tolist())):
        if user not in own_users:
            assert queries.users_B[at] == -1
            assert queries.ends_B[at] == 0
            continue
        place = own_users.index(user)
        assert queries.users_B[at] == place
        first, stop = store.user_first_U1[place : place + 2].tolist()
        number = row_queries.items.numbers_V[own_items.index(item)] if item in own_items else 0
        events = [(int(store.times_E[position]), int(store.items_E[position])) for position in range(first, stop)]
        if time < 0:
            assert queries.ends_B[at] == stop
            assert queries.times_B[at] == max(row[3] for row in log)
            continue
        assert queries.times_B[at] == time
        matched += (time, number) in events
        before = events.index((time, number)) if (time, number) in events else sum(one[0] < time for one in events)
        assert queries.ends_B[at] == first + before
    assert matched > 5


def test_times_are_read_in_the_unit_of_the_import(row_queries: RowQueries) -> None:
    assert row_queries.seconds(pa.array(["5000", "", "39999"])).tolist() == [5, -1, 39]
    assert row_queries.seconds(pa.array([5000.0, float("nan")])).tolist() == [5, -1]
    assert row_queries.seconds(pa.array([5], pa.timestamp("s"))).tolist() == [5]
    with pytest.raises(BadRow, match="row 2: time 'soon' is not a time in milliseconds"):
        row_queries.seconds(pa.array(["5", "soon"]))


def test_columns_have_the_names_of_the_import(row_queries: RowQueries) -> None:
    assert row_queries.spellings("user") == ("who", "user", "user_id")
    assert row_queries.own_times(np.array([5])).to_pylist() == [5000]
