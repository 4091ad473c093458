"""Events as click rows: what is known of items and users, and the context of each event, by the user's own names."""

from __future__ import annotations

from pathlib import Path

import pytest

from recperf.data import datasets
from recperf.data.config import SplitConfig
from recperf.data.events.imports import import_events
from recperf.data.events.options import ImportOptions
from recperf.data.rows.from_events import clicks_of
from recperf.data.rows.imported import ImportedClicks

GOODS = {f"a{number}": (f"kind {number % 3}", number / 4, ["x", "y"][: number % 3]) for number in range(12)}


@pytest.mark.parametrize("lists", [True, False])
def test_rows_have_what_is_known_of_items_users_and_events(tmp_path: Path, lists: bool) -> None:
    events = [
        (f"u{row % 7}", f"a{row * 5 % 12}", 1000 + row, row % 2, ("web", "app")[row % 5 % 2]) for row in range(84)
    ]
    lines = "".join(",".join(map(str, row)) + "\n" for row in events)
    (tmp_path / "log.csv").write_text("wer,was,wann,kauf,kanal\n" + lines)
    known = "".join(f"{item},{kind},{price},{'|'.join(tags)}\n" for item, (kind, price, tags) in GOODS.items())
    (tmp_path / "goods.csv").write_text("was,sorte,preis,tags\n" + known)
    (tmp_path / "people.csv").write_text("wer,name\n" + "".join(f"u{user},{'AB'[user % 2]}\n" for user in range(7)))
    options = ImportOptions(
        events=tmp_path / "log.csv", user="wer", item="was", time="wann", label="kauf", context="kanal",
        items=tmp_path / "goods.csv", users=tmp_path / "people.csv", min_count=2,
    )  # fmt: skip
    clicks, store = clicks_of(datasets.at(import_events(options, tmp_path / "store")), lists=lists)
    assert clicks.folder is not None
    rows = ImportedClicks(clicks.folder, SplitConfig(split="time", events=store))
    names = ["wer", "was", "sorte", "name", "kanal", *(["tags"] if lists else []), "preis"]
    assert sorted(one.name for one in rows.manifest.columns) == sorted(names)
    assert (rows.manifest.user, rows.manifest.item, rows.manifest.time) == ("wer", "was", "wann")
    assert rows.manifest.min_count == 2
    by_event = {(user, item): (label, channel) for user, item, _, label, channel in events}
    for split in ("train", "valid"):
        count = rows.count(split)
        own = rows.own_columns(split, 0, count)
        columns = {name: values.to_pylist() for name, values in own.items()}
        for place, label in enumerate(rows.labels(split)):
            one = {name: values[place] for name, values in columns.items()}
            kind, price, tags = GOODS[one["was"]]
            expected = {"sorte": kind, "preis": price, "name": "AB"[int(one["wer"][1:]) % 2]}
            expected |= {"kanal": by_event[one["wer"], one["was"]][1]} | ({"tags": "|".join(tags)} if lists else {})
            assert {name: one[name] for name in expected} == expected
            assert by_event[one["wer"], one["was"]][0] == label
    half = ImportedClicks(clicks.folder, SplitConfig(split="time", events=store, train_share=0.5))
    assert 0 < len(half.index["fit"]) < len(rows.index["fit"])
    assert set(half.index["fit"]) < set(rows.index["fit"])
    assert list(half.index["valid"]) == list(rows.index["valid"])
