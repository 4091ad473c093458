"""A store with the ids of an earlier one: what is known of items and users goes on with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recperf.data.events.earlier_ids import matched, with_earlier_ids
from recperf.data.events.imports import import_events
from recperf.data.events.item_table import columns_of, item_values, titles_of
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import EventStore, open_store, originals, verify


def imported(folder: Path, name: str, items: range, users: range, price: float) -> EventStore:
    rows = "".join(f"u{user},i{item:02d},{user + item}\n" for user in users for item in items)
    (folder / f"{name}.csv").write_text("user,item,time\n" + rows)
    goods = "".join(f"i{item:02d},Item {item},{price * item},{'|'.join('xyz'[: item % 3])}\n" for item in items)
    (folder / f"{name}-items.csv").write_text("item,title,price,tags\n" + goods)
    people = "".join(f"u{user},{'AB'[user % 2]}\n" for user in users)
    (folder / f"{name}-users.csv").write_text("user,land\n" + people)
    options = ImportOptions(
        events=folder / f"{name}.csv", items=folder / f"{name}-items.csv", users=folder / f"{name}-users.csv",
        negatives=0, name=name,
    )  # fmt: skip
    return open_store(import_events(options, folder / name))


def test_what_is_known_of_items_and_users_goes_on(tmp_path: Path) -> None:
    earlier = imported(tmp_path, "march", range(20), range(4), 1.25)
    store = imported(tmp_path, "april", range(15, 40), range(2, 6), 2.5)
    both = open_store(with_earlier_ids(store, earlier, 0))
    verify(both)
    assert both.digest != store.digest
    items, users = originals(both.folder, "items"), originals(both.folder, "users")
    assert items == [f"i{item:02d}" for item in (*range(15, 40), *range(15))]
    assert users == [f"u{user}" for user in (*range(2, 6), 0, 1)]
    # Of items in both, what the new events say counts.
    prices = columns_of(both)["price"].values.to_pylist()[1:]
    assert prices == [*(2.5 * item for item in range(15, 40)), *(1.25 * item for item in range(15))]
    assert titles_of(both, np.array([1, 26])) == ["Item 15", "Item 0"]
    assert columns_of(both)["tags"].values.to_pylist()[26:29] == [[], ["x"], ["x", "y"]]
    assert columns_of(both, "user")["land"].values.to_pylist()[1:] == ["A", "B", "A", "B", "A", "B"]
    # Ranges of numbers are those of the earlier events, whose rows they go on with.
    before, after = item_values(earlier), item_values(both)
    assert before is not None
    assert after is not None
    ranges = [name for name in before.names if name.startswith("price")]
    assert [name for name in after.names if name.startswith("price")] == ranges
    assert matched(earlier, both, 0).counts["features"] == {
        "taken": len(before.names), "without_events": 0, "new": len(after.names) - len(before.names), "forgotten": 0
    }  # fmt: skip
