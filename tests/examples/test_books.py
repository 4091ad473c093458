"""The example of docs/add-a-workload.md: a new file of ratings trains, and its tables have the sizes that it needs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from recperf import workloads
from recperf.cli import main
from recperf.data.config import RatingsConfig
from recperf.data.ratings import read_ratings
from recperf.errors import DataError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(workloads.WORKLOADS, "books", "books.config:BOOKS")


def write_ratings(path: Path, readers: int, books: int) -> None:
    """Some books are better than others; titles have commas and line breaks."""
    random = np.random.default_rng(1)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["finished", "reader", "book", "stars"])
        for time in range(4_000):
            reader, book = random.integers(readers), random.integers(books)
            stars = random.integers(3, 6) if book % 2 else random.integers(1, 5)
            writer.writerow([time, f"r{reader}", f"Title {book},\nvolume 1", stars])


def test_a_new_file_of_ratings_trains(tmp_path: Path) -> None:
    file, run = tmp_path / "ratings.csv", tmp_path / "run"
    write_ratings(file, readers=40, books=25)
    options = ["--data.path", str(file), "--train.device", "cpu", "--train.batch-size", "64", "--train.epochs", "4"]
    options += ["--target.beat", "none", "--target.auc", "0.65", "--no-peaks"]
    assert main(["run", "books", *options, "--run-dir", str(run)]) == 0
    result = json.loads((run / "result.json").read_text())
    assert result["quality"]["met"]
    assert result["data"]["rows"] == 4_000
    assert main(["check", str(run)]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("user,item\n1,2\n", "the file has no column 'rating'"),
        ("user,item,rating\n1,2,3\n1,,3\n", "line 3: no item"),
        ("user,item,rating\n1,2,good\n", "line 2: could not convert string to float: 'good'"),
        ("user,item,rating\n1,2,nan\n", "line 2: rating 'nan' is not a finite number"),
        ("user,item,rating\n1,2\n", "line 2: "),
        ("user,item,rating\n", "the file has no ratings"),
        ("", "the file has no column 'item', 'rating', 'user'"),
    ],
)
def test_a_bad_file_of_ratings_is_one_error(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_ratings(RatingsConfig(path=path))
    assert caught.value.what.startswith(message)
