"""A shop's own log from its file to recommendations: each command takes the file as it is, in the shop's words."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

Recperf = Callable[..., str]
SORTS = ("tea", "coffee", "cups", "books")


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
    """A log whose column of times has no usual name; one of its rows is there twice."""
    draw = random.Random(buyers)
    rows = []
    for buyer in range(buyers):
        moment, liked = start + timedelta(days=40 * draw.random()), draw.randrange(4)
        for _ in range(draw.randrange(8, 20)):
            product = draw.randrange(15) * 4 + (liked if draw.random() < 0.8 else draw.randrange(4))
            moment += timedelta(hours=30 * draw.random())
            stars = 5 if product % 4 == liked else draw.randrange(1, 5)
            row = {"client": f"c{buyer}", "happened": moment.isoformat(timespec="seconds"), "stars": str(stars)}
            rows.append({"sku": f"P{product:02d}", **row})
    rows.append(rows[0])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def test_a_shop_never_names_a_column_twice(recperf: Recperf, tmp_path: Path) -> None:
    rows = purchases(tmp_path / "log.csv", start=datetime(2026, 1, 1, tzinfo=UTC), buyers=60)
    items = [f"P{number:02d},Product {number},{SORTS[number % 4]}\n" for number in range(60)]
    (tmp_path / "products.csv").write_text("".join(["sku,name,sort\n", *items]))
    said = recperf("data", "import", "log.csv", "--items", "products.csv", "--name", "shop")
    assert "recognised  by name: client (user), sku (item), stars (rating); by its values: happened (time)" in said
    assert "note: 1 row (0.1%) repeats the user, item, time and label of another" in said
    assert "next: recperf run next-item --data shop" in said
    assert f"shop: {len(rows)} events of 60 users" in recperf("data", "info", "shop")

    for name in ("next-item", "micro-dlrm"):
        recperf("run", name, "--data", "shop", "--run-dir", f"runs/{name}", "--train.max-steps", 8, "--no-peaks",
                "--target.beat", "none", "--no-report", "--quiet")  # fmt: skip
        data = json.loads((tmp_path / "runs" / name / "data.json").read_text())
        assert data["split"] == "time"
    listed = recperf("recommend", "runs/next-item", "--users", "c1", "c2", "--k", 3)
    assert listed.split()[:4] == ["client", "rank", "sku", "title"]
    assert "Product" in listed
    recperf("recommend", "runs/micro-dlrm", "--users", "c1", "--k", 3)

    # The imported file, in another order of columns, and with what the dataset knows of the items anyway.
    recperf("score", "runs/micro-dlrm", "--input", "log.csv", "--output", "scores.csv")
    whole = tmp_path / "whole.csv"
    sorts = {f"P{number:02d}": SORTS[number % 4] for number in range(60)}
    with whole.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["stars", "sort", "client", "sku", "happened"])
        writer.writeheader()
        writer.writerows({**row, "sort": sorts[row["sku"]]} for row in rows)
    recperf("score", "runs/micro-dlrm", "--input", "whole.csv", "--output", "same.csv")
    scores, same = (
        [row["logit"] for row in csv.DictReader((tmp_path / name).read_text().splitlines())]
        for name in ("scores.csv", "same.csv")
    )
    assert len(scores) == len(rows)
    assert scores == same

    # New days go on with the model, and the old log is replaced only when no import fails.
    purchases(tmp_path / "new.csv", start=datetime(2026, 4, 1, tzinfo=UTC), buyers=62)
    recperf("data", "import", "new.csv", "--name", "shop", code=3)
    said = recperf("data", "import", "new.csv", "--items", "products.csv", "--name", "shop", "--replace")
    assert "can no longer be resumed or scored: runs/micro-dlrm, runs/next-item" in said
    refused = recperf("data", "remove", "shop", code=3)
    assert "runs need shop to be resumed, scored or started from: runs/micro-dlrm, runs/next-item" in refused
    recperf("data", "remove", "shop", "--force")
    assert "there is no dataset and no file 'shop'" in recperf("data", "remove", "shop", code=2)


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ("user,item,placed,sent", ["1,2,2026-01-0{n},2026-02-0{n}"], "columns 'placed' and 'sent' both have times"),
        ("user,item,placed,price", ["1,2,2026-01-0{n},2026"], ""),
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
