"""A user's clicks: every format gives the same rows, what is fitted sees training rows only, bad files are one line."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recperf.data.config import SplitConfig
from recperf.data.rows.imported import ImportedClicks
from recperf.data.rows.imports import import_clicks
from recperf.data.rows.options import ClickOptions
from recperf.errors import RecperfError
from recperf.jsonfile import as_json

ROWS = 400
Record = dict[str, Any]


def records() -> list[Record]:
    draw = np.random.default_rng(3)
    return [
        {
            "user_id": int(draw.integers(1, 30)),
            "city": ["Rome", "Oslo", "", "São Paulo", 'a "b", c'][int(draw.integers(0, 5))],
            "genres": "|".join(draw.choice(["Action", "Comedy", "Drama"], int(draw.integers(0, 4)), replace=False)),
            "price": "" if draw.random() < 0.1 else round(float(draw.normal(0, 50)), 2),
            "ts": 1_600_000_000 + int(draw.integers(0, 10**6)),
            "clicked": int(draw.random() < 0.4),
        }
        for _ in range(ROWS)
    ]


def write_csv(path: Path, rows: list[Record]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def table(rows: list[Record]) -> pa.Table:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["price"] = [None if price == "" else price for price in columns["price"]]
    columns["genres"] = [text.split("|") if text else [] for text in columns["genres"]]
    return pa.table(columns)


CLICKS = {"label": "clicked", "categorical": "user_id,city", "numeric": "price", "multi": "genres", "time": "ts"}


def imported(path: Path, folder: Path, **more: Any) -> dict[str, Any]:
    return import_clicks(ClickOptions(clicks=path, **{**CLICKS, "user": "user_id", **more}), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("clicks")
    imported(write_csv(place / "clicks.csv", records()), place / "store")
    return place / "store"


def test_compressed_text_and_parquet_give_the_same_rows(folder: Path, tmp_path: Path) -> None:
    first, text = json.loads((folder / "clicks.json").read_text()), write_csv(tmp_path / "clicks.csv", records())
    (tmp_path / "gzip").write_bytes(gzip.compress(text.read_bytes()))
    pq.write_table(table(records()), tmp_path / "parquet")
    for name in ("gzip", "parquet"):
        other = imported(tmp_path / name, tmp_path / f"store of {name}")
        assert (first["digest"], first["rows"], first["columns"]) == (other.digest, ROWS, as_json(other.columns))


def test_encode_gives_what_the_import_stored(folder: Path) -> None:
    clicks = ImportedClicks(folder, SplitConfig())
    encoded, _ = clicks.encode(table(records()).append_column("more", pa.array(range(ROWS))))
    for split in ("train", "valid"):
        stored = clicks.rows_of(split, 0, clicks.count(split))  # type: ignore[arg-type]
        at = clicks.index[split]  # type: ignore[index]
        assert np.array_equal(encoded.dense_ND[at], stored.dense_ND)
        assert np.array_equal(encoded.ids_NS[at], stored.ids_NS)
    labels = np.array([row["clicked"] for row in records()], np.uint8)
    assert np.array_equal(clicks.labels("valid"), labels[clicks.index["valid"]])
    new, _ = clicks.encode(
        pa.table({"user_id": [1e6], "city": [" Oslo "], "genres": ["Comedy|None"], "price": ["nan"]})
    )
    names = clicks.categories("city")
    assert (new.ids_NS[0, 0], names[int(new.ids_NS[0, 1])]) == (0, "Oslo")
    assert [clicks.categories("genres")[row] for row in new.ids_NS[0, 2:] if row >= 0] == ["Comedy"]
    assert new.dense_ND.tolist() == [[0.0, 1.0]]
    with pytest.raises(RecperfError, match="no column 'city'; did you mean 'cty'"):
        clicks.encode(pa.table({"user_id": [1], "cty": ["Oslo"], "genres": [""], "price": [1.0]}))


def test_tables_and_scales_are_fitted_on_training_rows(tmp_path: Path) -> None:
    kinds = ["often"] * 60 + ["once"] + [""] * 9 + ["often"] * 29 + ["late"]
    rows = [{"t": at, "kind": kind, "x": 10.0**at if at > 95 else at, "y": at % 2} for at, kind in enumerate(kinds)]
    path = write_csv(tmp_path / "a.csv", rows)
    options = ClickOptions(clicks=path, label="y", categorical="kind", numeric="x", time="t")
    import_clicks(options, tmp_path / "store")
    clicks = ImportedClicks(tmp_path / "store", SplitConfig(split="time", holdout=0.2))
    assert clicks.table_rows == (3,)
    assert clicks.categories("kind") == [None, None, "often"]
    train, valid = clicks.rows_of("train", 0, 80), clicks.rows_of("valid", 0, 20)
    assert [int(train.ids_NS[at, 0]) for at in (0, 60, 61)] == [2, 0, 1]
    assert valid.ids_NS[-1, 0] == 0
    assert abs(float(train.dense_ND.mean())) < 1e-6
    assert float(valid.dense_ND.max()) == 10.0


def test_splits_by_time_and_by_user(folder: Path) -> None:
    rows = records()
    times = np.array([row["ts"] for row in rows])
    by_time = ImportedClicks(folder, SplitConfig(split="time"))
    assert times[by_time.index["train"]].max() <= times[by_time.index["valid"]].min()
    last = ImportedClicks(folder, SplitConfig(split="last"))
    users = np.array([row["user_id"] for row in rows])
    for user in set(users.tolist()):
        held = times[[at for at in last.index["valid"] if users[at] == user]]
        trained = times[[at for at in last.index["train"] if users[at] == user]]
        assert not len(held) or trained.max() <= held.min()
    cold = ImportedClicks(folder, SplitConfig(split="cold"))
    assert not set(users[cold.index["train"]]) & set(users[cold.index["valid"]])


def test_hashed_categories_need_no_vocabulary(tmp_path: Path) -> None:
    manifest = imported(write_csv(tmp_path / "a.csv", records()), tmp_path / "store", hash=20)
    assert [one.vocabulary for one in manifest.columns] == [None] * 4
    clicks = ImportedClicks(tmp_path / "store", SplitConfig())
    assert clicks.table_rows == (20, 20, 20)
    rows = clicks.rows_of("train", 0, clicks.count("train"))
    assert rows.ids_NS.max() <= 19
    assert abs(float(rows.dense_ND[:, 0].std()) - 1) < 0.1
    assert np.array_equal(clicks.encode(table(records()))[0].ids_NS[clicks.index["train"]], rows.ids_NS)


def test_ratings_and_criteo_need_no_options(tmp_path: Path) -> None:
    plain = tmp_path / "u.data"
    plain.write_text("".join(f"{at % 9}\t{at % 7}\t{1 + at % 5}\t{880000000 + at}\n" for at in range(200)))
    facts = import_clicks(ClickOptions(clicks=plain), tmp_path / "one")
    assert (facts.user, facts.item, facts.time, facts.label.positive_from) == (
        "user", "item", "timestamp", 4.0,
    )  # fmt: skip
    assert [one.name for one in facts.columns] == ["user", "item"]
    header = ["label", *(f"I{at}" for at in range(1, 14)), *(f"C{at}" for at in range(1, 27))]
    lines = [
        [at % 2, *(at % 3 + k for k in range(13)), *(f"{(at % 5) + k:08x}" for k in range(26))] for at in range(100)
    ]
    log = tmp_path / "criteo.tsv"
    log.write_text("\n".join("\t".join(map(str, line)) for line in [header, *lines]) + "\n")
    facts = import_clicks(ClickOptions(clicks=log), tmp_path / "two")
    assert [one.kind for one in facts.columns] == ["numeric"] * 13 + ["categorical"] * 26
    log.write_text("\n".join("\t".join(map(str, line)) for line in lines) + "\n")
    facts = import_clicks(ClickOptions(clicks=log, hash=20), tmp_path / "three")
    names = [*(f"i{at}" for at in range(1, 14)), *(f"c{at}" for at in range(1, 27))]
    assert [one.name for one in facts.columns] == names
    assert facts.rows == 100
    clicks = ImportedClicks(tmp_path / "three", SplitConfig(split="time"))
    assert clicks.table_rows == (20,) * 26
    assert clicks.labels("valid").tolist() == [0, 1] * 10


def test_types_decide_where_no_column_is_given(tmp_path: Path) -> None:
    rows = [{**row, "number": at, "name": f"n{at}", "half": at / 2} for at, row in enumerate(records())]
    facts = import_clicks(ClickOptions(clicks=write_csv(tmp_path / "a.csv", rows)), tmp_path / "store")
    kinds = {one.name: one.kind for one in facts.columns}
    assert kinds == {
        "user_id": "categorical", "city": "categorical", "genres": "multi", "price": "numeric", "number": "numeric",
        "half": "numeric",
    }  # fmt: skip
    assert facts.left_out == {"name": "almost every row has a value of its own"}
    assert (facts.time, facts.user) == ("ts", "user_id")


BAD = "a,b,y\n1,x,0\n2,x,1\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (BAD, {"label": "yy", "numeric": "a"}, "there is no column 'yy' for the label; did you mean 'y'"),
        (BAD, {"label": "y", "numeric": "b"}, "row 1: column 'b': 'x' is not a number"),
        ("a,y\n1,0\nx2,1\n", {"label": "y", "numeric": "a"}, "row 2: column 'a': 'x2' is not a number"),
        ("", {"label": "y"}, "the file is empty"),
        ("a,y\n", {"label": "y", "numeric": "a"}, "the file has a header and no rows"),
        ("a,y\n1,0\n1,1\n1,2\n", {"label": "y", "numeric": "a"}, "the label 'y' has 3 values (0, 1, 2)"),
        ("a,y\n1,0\n1,0\n", {"label": "y", "numeric": "a"}, "no row is a click by the label 'y'"),
        ("a,y\n1,1\n1,1\n", {"label": "y", "numeric": "a"}, "every row is a click by the label 'y'"),
        ("a,y\n1,1\n1,\n", {"label": "y", "numeric": "a"}, "row 2: no label"),
        (BAD, {"label": "y", "numeric": "a,y"}, "column 'y' is given as label and as numeric"),
        (BAD, {"label": "y", "numeric": "a,3"}, "column 'y' is given as label and as numeric"),
        (BAD, {"label": "y", "numeric": "a", "user": "3"}, "column 'y' is given as label and as user"),
        ("a,a,y\n1,2,0\n1,2,1\n", {"label": "y"}, "the file has 2 columns named 'a'"),
        ("a,y\n1,0\n1\n", {"label": "y", "numeric": "a"}, "row 2 has 1 columns; the first line has 2"),
        ("a,z\n1,0\n1,1\n", {}, "no column is recognised as the label"),
        ("a,y,t\n1,0,1700000000\n1,1,1700000000000\n", {"numeric": "a", "label": "y", "time": "t"}, "is not a time of"),
        ("a,y\n1,0\n\0,1\n", {"label": "y", "numeric": "a"}, "row 2 has a NUL byte"),
        ('[{"a": 1}]', {"label": "y"}, "this is one JSON array"),
        ("a,y,t\n1,0,x\n1,1,5\n", {"label": "y", "numeric": "a", "time": "t"}, "row 1: time 'x' is not"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_clear_line(tmp_path: Path, content: str, options: Record, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(RecperfError) as caught:
        import_clicks(ClickOptions(clicks=path, **options), tmp_path / "store")
    assert message in caught.value.what
    assert "\n" not in caught.value.what
    assert [place.name for place in tmp_path.iterdir()] == ["bad.csv"]


def test_damage_is_found_when_it_is_read(tmp_path: Path) -> None:
    imported(write_csv(tmp_path / "a.csv", records()), tmp_path / "store")
    path = tmp_path / "store" / "ids.array"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(RecperfError, match=r"damaged: ids.array differs from its checksum"):
        ImportedClicks(tmp_path / "store", SplitConfig())
    vocabulary = next((tmp_path / "store").glob("vocabulary-*"))
    vocabulary.write_bytes(vocabulary.read_bytes()[:-9])
    with pytest.raises(RecperfError, match=r"damaged: vocabulary-\d+.parquet differs from its checksum"):
        ImportedClicks(tmp_path / "store", SplitConfig())


def test_an_import_of_other_options_does_not_replace_one(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", records())
    first = imported(path, tmp_path / "store")
    assert imported(path, tmp_path / "store") == first
    with pytest.raises(RecperfError, match="exists already"):
        imported(path, tmp_path / "store", min_count=3)


def test_rare_categories_are_counted_in_the_training_rows(tmp_path: Path) -> None:
    """Six rows of a, four of b, and c to j once each, of which a fixed share trains: all but a are rare."""
    letters = "a" * 6 + "b" * 4 + "cdefghij"
    path = tmp_path / "log.csv"
    path.write_text("label,letter\n" + "".join(f"{at % 2},{letter}\n" for at, letter in enumerate(letters * 2)))
    options = ClickOptions(clicks=path, label="label", categorical="letter", min_count=7, name="letters")
    import_clicks(options, tmp_path / "store")
    clicks = ImportedClicks(tmp_path / "store", SplitConfig(holdout=0.25, split_seed=3))
    trained = [(letters * 2)[row] for row in clicks.index["train"]]
    counts = {letter: trained.count(letter) for letter in set(trained)}
    rare = {letter: count for letter, count in counts.items() if count < 7}
    assert counts["a"] >= 7
    assert clicks.rare == {"letter": (len(rare), len(counts), pytest.approx(sum(rare.values()) / len(trained)))}


def test_a_part_of_the_rows_and_columns(folder: Path) -> None:
    whole = ImportedClicks(folder, SplitConfig(split="time", validate=True))
    parts = [ImportedClicks(folder, SplitConfig(split="time", validate=True, train_share=one)) for one in (0.5, 0.25)]
    for larger, smaller in zip((whole, *parts), parts):
        assert set(smaller.index["fit"]) < set(larger.index["fit"])
        for split in ("choose", "valid"):
            assert smaller.index[split].tolist() == whole.index[split].tolist()
    recent = ImportedClicks(folder, SplitConfig(split="time", validate=True, recent=0.5))
    times, dropped = whole.split.times_N, np.setdiff1d(whole.index["fit"], recent.index["fit"])
    assert times is not None
    assert times[dropped].max() <= times[recent.index["fit"]].min()
    key = whole.keys[0]
    hidden = ImportedClicks(folder, SplitConfig(split="time", validate=True, without=(key,)))
    assert set(hidden.every("valid", 1).ids_NS[:, 0]) == {0}
    assert hidden.every("valid", 1).ids_NS[:, 1:].tolist() == whole.every("valid", 1).ids_NS[:, 1:].tolist()
    with pytest.raises(RecperfError, match="no listed category"):
        ImportedClicks(folder, SplitConfig(without=("none",)))


def test_a_number_that_all_rows_have_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("label,letter,x\n" + "".join(f"{at % 2},{'ab'[at % 3 > 0]},{at}\n" for at in range(40)))
    options = ClickOptions(clicks=path, label="label", categorical="letter", numeric="x", name="numbers")
    import_clicks(options, tmp_path / "store")
    seen, hidden = (ImportedClicks(tmp_path / "store", SplitConfig(without=one)) for one in ((), ("x",)))
    assert len(set(seen.every("valid", 1).dense_ND[:, 0].tolist())) > 1
    assert not hidden.every("valid", 1).dense_ND.any()
    assert hidden.every("valid", 1).ids_NS.tolist() == seen.every("valid", 1).ids_NS.tolist()
