"""A shop's own log from its file to recommendations: each command takes the file as it is, in the shop's words."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

Recperf = Callable[..., str]
KINDS = ("Tee", "Kaffee", "Tassen", "Bücher")
SUMMER = timezone(timedelta(hours=2))


@pytest.fixture
def recperf(call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recperf:
    """What a command prints; another exit code than expected is an error."""
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))

    def run(*words: object, code: int = 0) -> str:
        found, out, err = call(*words)
        assert found == code, (words, out, err)
        return out + err

    return run


def purchases(path: Path, *, start: datetime, buyers: int) -> list[dict[str, str]]:
    """A log whose columns have no usual names and whose times have a zone; one of its rows is there twice."""
    draw = random.Random(buyers)
    rows = []
    for buyer in range(buyers):
        moment, liked = start + timedelta(days=40 * draw.random()), draw.randrange(4)
        for _ in range(draw.randrange(8, 20)):
            article = draw.randrange(15) * 4 + (liked if draw.random() < 0.8 else draw.randrange(4))
            moment += timedelta(hours=30 * draw.random())
            stars = 5 if article % 4 == liked else draw.randrange(1, 5)
            row = {"Kundin-Nr": f"k{buyer}", "wann?": moment.isoformat(timespec="seconds"), "sterne": str(stars)}
            rows.append({"ARTIKEL": f"A{article:02d}", **row, "menge": str(draw.randrange(1, 4))})
    rows.append(rows[0])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=";")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def column(path: Path, name: str) -> list[str]:
    return [row[name] for row in csv.DictReader(path.read_text().splitlines())]


def test_a_shop_never_names_a_column_twice(recperf: Recperf, tmp_path: Path, untraced: None) -> None:
    rows = purchases(tmp_path / "log.csv", start=datetime(2026, 1, 1, tzinfo=SUMMER), buyers=60)
    goods = {f"A{number:02d}": (KINDS[number % 4], f"{1.5 * number + 2:.2f}", "neu|rot" if number % 3 else "alt")
             for number in range(60)}  # fmt: skip
    lines = [f"{key},Ware Nr. {key[1:]},{','.join(known)}\n" for key, known in goods.items()]
    (tmp_path / "waren.csv").write_text("".join(["ARTIKEL,bezeichnung,sorte,preis,etiketten\n", *lines]))
    lines = [f"k{buyer},{('Bern', 'Genf')[buyer % 2]},{20 + buyer}\n" for buyer in range(60)]
    (tmp_path / "kunden.csv").write_text("".join(["Kundin-Nr,ort,alter\n", *lines]))
    columns = ("--user", "Kundin-Nr", "--item", "ARTIKEL", "--rating", "sterne")
    said = recperf(
        "data", "import", "log.csv", *columns, "--items", "waren.csv", "--users", "kunden.csv", "--name", "laden"
    )
    assert "recognised  by its values: wann? (time)\n" in said
    assert "--time none: wann? is no time" in said
    assert "menge       not used" in said
    items = "bezeichnung (title), sorte (4 categories), preis (number), etiketten (3 categories, several each)"
    assert f"waren.csv   of items: ARTIKEL (id), {items}\n" in said
    assert "kunden.csv  of users: Kundin-Nr (id), ort (2 categories), alter (number)\n" in said
    assert "note: 1 row repeats the user, item, time and rating of another (0.1%)" in said
    assert "next: recperf run next-item --data laden" in said
    described = recperf("data", "info", "laden")
    assert f"laden: {len(rows)} events of 60 users and 60 items, 2026-01-02 to" in described
    assert not any(word in described for word in ("listen", "artist", "album", "anchor"))

    for name in ("next-item", "dlrm"):
        recperf("run", name, "--data", "laden", "--run-dir", f"runs/{name}", "--train.max-steps", 8, "--no-peaks",
                "--target.beat", "none", "--no-report", "--quiet")  # fmt: skip
        assert json.loads((tmp_path / "runs" / name / "data.json").read_text())["split"] == "time"
        listed = recperf("recommend", f"runs/{name}", "--users", "k1", "k2", "--k", 3)
        assert listed.split()[:4] == ["Kundin-Nr", "rank", "ARTIKEL", "title"]
        assert "Ware Nr. " in listed

    # The imported file, in another order of columns, and with what the dataset knows of the items anyway.
    said = recperf("score", "runs/dlrm", "--input", "log.csv", "--output", "scores.csv")
    assert "not read by the model: wann?, sterne, menge\n" in said
    with (tmp_path / "whole.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["sterne", "sorte", "Kundin-Nr", "etiketten", "ARTIKEL", "wann?", "preis"])
        writer.writeheader()
        known = ({key: row[key] for key in row if key != "menge"} for row in rows)
        more = (dict(zip(("sorte", "preis", "etiketten"), goods[row["ARTIKEL"]])) for row in rows)
        writer.writerows({**one, **others} for one, others in zip(known, more))
    recperf("score", "runs/dlrm", "--input", "whole.csv", "--output", "same.csv")
    recperf("score", "runs/dlrm", "--held-out", "--output", "held-out.csv")
    scores = column(tmp_path / "scores.csv", "logit")
    assert len(scores) == len(rows)
    assert column(tmp_path / "same.csv", "logit") == scores
    by_pair = {(row["Kundin-Nr"], row["ARTIKEL"]): score for row, score in zip(rows, scores)}
    held_out = zip(*(column(tmp_path / "held-out.csv", name) for name in ("Kundin-Nr", "ARTIKEL", "logit")))
    assert all(by_pair[user, item] == logit for user, item, logit in held_out)
    (tmp_path / "other.csv").write_text((tmp_path / "log.csv").read_text().replace("Kundin-Nr", "Kundin"))
    refused = recperf("score", "runs/dlrm", "--input", "other.csv", "--output", "none.csv", code=3)
    assert "the rows have no column 'Kundin-Nr'; is it 'Kundin'?" in refused

    recperf("export", "runs/next-item", "--output", "exported")
    exported = parquet.read_table(tmp_path / "exported" / "items.parquet")
    assert exported.column_names == ["ARTIKEL", "sorte", "preis", "etiketten", "bezeichnung"]
    assert exported.slice(4, 1).to_pylist() == [
        {"ARTIKEL": "A04", "sorte": "Tee", "preis": 8.0, "etiketten": ["neu", "rot"], "bezeichnung": "Ware Nr. 04"}
    ]

    # New days go on with the model, and the old log is replaced only when no import fails.
    purchases(tmp_path / "new.csv", start=datetime(2026, 4, 1, tzinfo=SUMMER), buyers=62)
    recperf("data", "import", "new.csv", *columns, "--items", "waren.csv", "--name", "april")
    recperf("run", "--start-from", "runs/next-item", "--data", "april", "--run-dir", "runs/next",
            "--train.max-steps", 8, "--no-peaks", "--no-report", "--quiet")  # fmt: skip
    assert "k61" in recperf("recommend", "runs/next", "--users", "k61", "--k", 3)
    recperf("data", "import", "new.csv", *columns, "--name", "laden", code=3)
    said = recperf("data", "import", "new.csv", *columns, "--name", "laden", "--replace")
    assert "can no longer be resumed or scored: runs/dlrm, runs/next-item" in said
    refused = recperf("data", "remove", "laden", code=3)
    assert "runs need laden to be resumed, scored or started from: runs/dlrm, runs/next-item" in refused
    recperf("data", "remove", "laden", "--force")
    assert "there is no dataset and no file 'laden'" in recperf("data", "remove", "laden", code=2)


def test_files_as_others_write_them(recperf: Recperf, tmp_path: Path) -> None:
    """Parquet without ratings, JSON lines, RecBole's .inter, and MovieLens' files with ::, each recognised as it is."""
    table = {"buyer": [1, 2, 2, 3] * 9, "product_id": [*range(12)] * 3, "quantity": [*range(36)]}
    when = [datetime(2026, 1, 1 + row % 28, row % 24) for row in range(36)]
    parquet.write_table(pa.table({**table, "order_date": when}), tmp_path / "purchases.parquet")
    said = recperf("data", "import", "purchases.parquet", "--user", "buyer")
    assert "purchases: 36 events of 3 users and 12 items, 2026-01-01 to 2026-01-28" in said
    assert "by name: product_id (item), order_date (time)" in said
    assert "no rating or label: --user" in said
    assert "with 4 negatives drawn for each" in said

    views = (
        {
            "visitor": f"v{row % 4}",
            "article": f"a{row % 7}",
            "ts": 1_770_000_000_000 + row,
            "tags": ["x", "y"][: row % 7],
        }
        for row in range(70)
    )
    (tmp_path / "views.jsonl").write_text("".join(json.dumps(view) + "\n" for view in views))
    said = recperf("data", "import", "views.jsonl")
    assert "by name: visitor (user), article (item), ts (time)" in said
    assert "ts       time, in milliseconds" in said
    assert "tags     of the item: 2 categories, several each" in said

    lines = (f"u{row % 5}\ti{row % 9}\t{1 + row % 5}\t{880_000_000 + row}\n" for row in range(45))
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    (tmp_path / "set.inter").write_text("".join([header, *lines]))
    said = recperf("data", "import", "set.inter")
    assert "by name: user_id (user), item_id (item), timestamp (time), rating (rating)" in said
    assert "set: 45 events of 5 users and 9 items" in said

    ratings = "".join(f"{row % 5}::{row % 9}::{1 + row % 5}::{row}\n" for row in range(45))
    (tmp_path / "ratings.dat").write_text(ratings)
    films = "".join(f"{item}::Film {item}::{'Drama|' * (item % 2)}War\n" for item in range(9))
    (tmp_path / "movies.dat").write_text(films)
    (tmp_path / "users.dat").write_text("".join(f"{user}::{'FM'[user % 2]}::{user}\n" for user in range(5)))
    numbered = ("--user", 1, "--item", 2, "--rating", 3, "--time", 4)
    files = ("--items", "movies.dat", "--users", "users.dat")
    said = recperf("data", "import", "ratings.dat", *numbered, *files, "--name", "films")
    assert "movies.dat  of items: 1 (id), 2 (title), 3 (2 categories, several each)" in said
    assert "users.dat   of users: 1 (id), 2 (2 categories)" in said


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ("user,item,placed,sent", ["1,2,2026-01-0{n},2026-02-0{n}"], "columns 'placed' and 'sent' both have times"),
        ("user,item,placed,price", ["1,2,2026-01-0{n},2026"], ""),
        ("user,item,placed,price", ["1,2,2026/01/0{n} 10:00:00,2026"], ""),
        ("user,item,seconds,price", ["1,2,180000000{n},7"], ""),
        ("user,item,milliseconds,number", ["1,2,1800000000{n}00,70000000{n}"], ""),
    ],
)
def test_a_time_is_recognised_by_its_values(
    recperf: Recperf, tmp_path: Path, columns: str, rows: list[str], message: str
) -> None:
    lines = [row.replace("{n}", str(number)) for row in rows for number in range(1, 10)]
    (tmp_path / "log.csv").write_text("\n".join([columns, *lines, ""]))
    if message:
        assert message in recperf("data", "import", "log.csv", code=2)
        assert "time, in dates" in recperf("data", "import", "log.csv", "--time", "sent")
    else:
        said = recperf("data", "import", "log.csv")
        assert f"by its values: {columns.split(',')[2]} (time)" in said
        assert "not used" in said
        assert "the file has no time" in recperf("data", "import", "log.csv", "--name", "n", "--time", "none")


def test_a_made_up_shop_is_imported_without_options(recperf: Recperf) -> None:
    facts = json.loads(recperf("data", "make", "shop", "--out", "shop.csv", "--customers", 40, "--json"))
    assert (facts["users"], len(column(Path("shop.csv"), "customer"))) == (40, facts["events"])
    imported = json.loads(recperf(*facts["next"].split()[1:], "--json"))
    assert (imported["events"], imported["users"], imported["items"]) == (facts["events"], 40, facts["items"])
    first = Path("shop.csv").read_bytes()
    recperf("data", "make", "shop", "--out", "shop.csv", "--customers", 40, "--seed", 8)
    assert Path("shop.csv").read_bytes() != first
    Path("notes.csv").write_text("mine")
    assert "not the log of a shop" in recperf("data", "make", "shop", "--out", "notes.csv", code=3)
    assert Path("notes.csv").read_text() == "mine"
    recperf("data", "make", "shop", "--out", "notes.csv", "--customers", 40, "--force")
    assert Path("notes.csv").read_bytes() == first
    assert "--out shop.csv" in recperf("data", "make", "shop", code=2)
    assert "customers is 0" in recperf("data", "make", "shop", "--out", "x.csv", "--customers", 0, code=3)
