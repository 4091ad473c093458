"""Rows of user, item and time as queries of a store, compared with a search event by event."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recperf.data.rows import BadRow
from recperf.data.yambda.import_options import ImportOptions
from recperf.data.yambda.imports import import_events
from recperf.data.yambda.moments import Moments
from recperf.data.yambda.store import open_store


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, int, int, int]]:
    """Users of few events, many of them in the same second."""
    draw = np.random.default_rng(5)
    return [
        (f"u{user}", int(item), int(rating), int(time))
        for user, item, rating, time in zip(
            draw.integers(0, 12, 400), draw.integers(0, 30, 400), draw.integers(1, 6, 400), draw.integers(0, 9, 400)
        )
    ]


@pytest.fixture(scope="module")
def moments(rows: list[tuple[str, int, int, int]], tmp_path_factory: pytest.TempPathFactory) -> Moments:
    folder = tmp_path_factory.mktemp("store")
    file = folder / "log.csv"
    lines = ["who,what,stars,at", *(f"{user},{item},{rating},{time * 1000 + 7}" for user, item, rating, time in rows)]
    file.write_text("\n".join(lines))
    options = ImportOptions(events=file, user="who", item="what", rating="stars", time="at", time_unit="ms")
    return Moments(open_store(import_events(options, folder / "store")))


def test_a_history_ends_before_its_row(moments: Moments, rows: list[tuple[str, int, int, int]]) -> None:
    store, draw = moments.store, np.random.default_rng(6)
    users = [f"u{user}" for user in draw.integers(0, 14, 300)]
    items, times = draw.integers(0, 33, 300), draw.integers(-1, 11, 300)
    asked = [None if time < 0 else int(time) * 1000 for time in times]
    queries, unknown = moments.queries({"user": pa.array(users), "item": pa.array(items), "time": pa.array(asked)})
    own_users, own_items = moments.users.values.to_pylist(), moments.items.values.to_pylist()
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
        number = moments.items.numbers_V[own_items.index(item)] if item in own_items else 0
        events = [(int(store.times_E[position]), int(store.items_E[position])) for position in range(first, stop)]
        if time < 0:
            assert queries.ends_B[at] == stop
            assert queries.times_B[at] == max(row[3] for row in rows)
            continue
        assert queries.times_B[at] == time
        matched += (time, number) in events
        before = events.index((time, number)) if (time, number) in events else sum(one[0] < time for one in events)
        assert queries.ends_B[at] == first + before
    assert matched > 5


def test_times_are_read_in_the_unit_of_the_import(moments: Moments) -> None:
    assert moments.seconds(pa.array(["5000", "", "39999"])).tolist() == [5, -1, 39]
    assert moments.seconds(pa.array([5000.0, float("nan")])).tolist() == [5, -1]
    assert moments.seconds(pa.array([5], pa.timestamp("s"))).tolist() == [5]
    with pytest.raises(BadRow, match="row 2: time 'soon' is not a time in milliseconds"):
        moments.seconds(pa.array(["5", "soon"]))


def test_columns_have_the_names_of_the_import(moments: Moments, tmp_path: Path) -> None:
    assert moments.spellings("user") == ("who", "user", "user_id")
    assert moments.own_times(np.array([5])).to_pylist() == [5000]
