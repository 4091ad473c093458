"""MovieLens files: the arrays of good ones and one typed error for bad ones; the generator of ratings like them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from movielens_files import write_files as write_dataset

from recperf.data.config import MovieLensConfig
from recperf.data.known import movielens, movielens_like
from recperf.data.known.movielens import PUBLISHED_SHA256, MovieLens, read
from recperf.data.known.movielens_files import load
from recperf.data.known.movielens_like import generate
from recperf.errors import DataError

REAL = Path(__file__).parents[3] / "shared" / "data" / "ml-100k"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real MovieLens-100K is not at {REAL}")

RATINGS = ["1\t1\t5\t881250949", "2\t3\t1\t891717742", "3\t2\t4\t878887116", "1\t3\t3\t880606923"]
USERS = ["1|24|M|technician|85711", "2|53|F|other|94043", "3|23|M|writer|32067"]


def item_row(item: int, *genres: str) -> str:
    flags = "|".join(str(int(name in genres)) for name in movielens.GENRES)
    return f"{item}|Am\xe9lie {item} (1995)|01-Jan-1995||http://example.org/{item}|{flags}"


ITEMS = [item_row(1, "Drama"), item_row(2, "Comedy", "Romance"), item_row(3, "Action")]


def write_files(folder: Path, *, ratings: list[str] = RATINGS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines, encoding in (
        ("u.data", ratings, "ascii"),
        ("u.item", ITEMS, "latin-1"),
        ("u.user", USERS, "utf-8"),
    ):
        (folder / file).write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))
    return folder


def read_error(folder: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read(folder)
    error = caught.value
    assert error.exit_code == 3
    assert error.fix
    return error


def test_the_arrays_of_good_files(tmp_path: Path) -> None:
    data = read(write_files(tmp_path))
    assert (data.name, data.synthetic) == ("movielens (local files)", False)
    assert data.user.tolist() == [1, 2, 3, 1]
    assert data.item.tolist() == [1, 3, 2, 3]
    assert data.rating.tolist() == [5, 1, 4, 3]
    assert data.timestamp.tolist() == [881250949, 891717742, 878887116, 880606923]
    assert data.age.tolist() == [0, 24, 53, 23]
    assert data.gender.tolist() == [0, 0, 1, 0]
    assert data.occupations == ("other", "technician", "writer")
    assert data.occupation.tolist() == [0, 2, 1, 3]
    assert [data.genre_names[g] for g in np.flatnonzero(data.genres[2])] == ["Comedy", "Romance"]
    assert data.genres.shape == (4, 19)
    assert data.genres.dtype == np.uint8
    assert all(array.dtype == np.int64 for array in (data.user, data.item, data.rating, data.timestamp, data.age))


BAD_ROWS = [
    ("u.data", "9\t1\t3\t1", "user is not in u.user"),
    ("u.data", "1\t9\t3\t1", "item is not in u.item"),
    ("u.data", "1\t1\t3", r"'1\t1\t3' is not user, item, a rating of 1 to 5, time, with tabs"),
    ("u.data", "1\t1\t3.5\t1", "is not user, item"),
    ("u.data", "1\t1\t6\t1", "is not user, item"),
    ("u.data", "99999999999999999999999\t1\t3\t1", "is not user, item"),
    ("u.user", "4|900|M|technician|1", "'4|900|M|technician|1' is not id, age, M or F"),
    ("u.user", "4|24|X|technician|1", "is not id, age, M or F"),
    ("u.user", "4|24|M||1", "is not id, age, M or F"),
    ("u.user", "2|24|M|technician|1", "1 row whose user id came before (first: line 4, user id 2)"),
    ("u.item", item_row(4).rsplit("|", 1)[0], "is not 24 columns, the last 19 of 0 or 1"),
    ("u.item", item_row(4)[:-1] + "2", "is not 24 columns"),
    ("u.item", item_row(3), "1 row whose item id came before (first: line 4, item id 3)"),
]


@pytest.mark.parametrize(("file", "row", "reason"), BAD_ROWS)
def test_a_bad_row_is_named_by_line(tmp_path: Path, file: str, row: str, reason: str) -> None:
    path = write_files(tmp_path) / file
    path.write_bytes(path.read_bytes() + f"{row}\n".encode("latin-1"))
    error = read_error(tmp_path)
    assert reason in error.what
    assert error.where == {"file": str(path), "line": "5" if file == "u.data" else "4"}


def test_several_bad_rows_are_counted_and_the_first_named(tmp_path: Path) -> None:
    error = read_error(write_files(tmp_path, ratings=[*RATINGS, "1\t4\t3\t1", "1\t2\t3\t1", "2\t8\t1\t1"]))
    assert error.what == "u.data has 2 rows whose item is not in u.item (first: line 5, item 4; u.item has 3 items)"
    error = read_error(write_files(tmp_path, ratings=["1\t1\t9\t1", *RATINGS, "x\t1\t3\t1", "1\t1"]))
    assert error.what.startswith(r"u.data has 3 rows at fault (first: line 1, '1\t1\t9\t1' is not user, item")


@pytest.mark.parametrize("file", movielens.FILES)
def test_a_file_cut_in_its_last_line_looks_cut_off(tmp_path: Path, file: str) -> None:
    path = write_files(tmp_path) / file
    whole = path.read_bytes()
    separator = b"\t" if file == "u.data" else b"|"
    path.write_bytes(whole[: whole.rindex(separator)])
    error = read_error(tmp_path)
    assert error.where["line"] == str(whole.count(b"\n"))
    assert error.fix is not None
    assert "cut off" in error.fix


def test_a_file_cut_inside_its_last_number_is_noticed(tmp_path: Path) -> None:
    path = write_files(tmp_path) / "u.data"
    path.write_bytes(path.read_bytes()[:-4])
    error = read_error(tmp_path)
    assert "ends inside a row (line 4, time 880606)" in error.what
    assert error.where == {"file": str(path), "line": "4"}


@pytest.mark.parametrize("file", movielens.FILES)
def test_every_file_must_be_readable(tmp_path: Path, file: str) -> None:
    path = write_files(tmp_path) / file
    path.write_bytes(b"\n\n  \n")
    assert read_error(tmp_path).what == f"{file} cannot be read: it is empty"
    path.unlink()
    error = read_error(tmp_path)
    assert (error.what, error.where["file"]) == (f"{file} cannot be read: No such file or directory", str(path))
    os.mkfifo(path)
    assert read_error(tmp_path).what.startswith(f"{file} cannot be read: ")


def test_another_encoding_is_an_error(tmp_path: Path) -> None:
    path = write_files(tmp_path) / "u.user"
    text = path.read_text()
    for encoding in ("utf-16", "utf-16-le", "utf-8-sig"):
        path.write_bytes(text.encode(encoding))
        assert read_error(tmp_path).where == {"file": str(path), "line": "1"}
    path.write_bytes(text.encode().replace(b"\n", b"\n\xfe\xfa", 1))
    assert read_error(tmp_path).what == "u.user is not utf-8 text (line 2)"


def test_load_prefers_the_download_to_synthetic_ratings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path))
    assert load(MovieLensConfig()).name == "movielens-like"
    assert load(MovieLensConfig(source="embedded", embedded_seed=3)).synthetic
    with pytest.raises(DataError) as caught:
        load(MovieLensConfig(source="files"))
    assert caught.value.fix == "recperf data get movielens-100k"
    folder = write_files(tmp_path / "data" / "movielens-100k")
    with pytest.raises(DataError, match="has changed on disk"):
        load(MovieLensConfig())
    digests = {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in movielens.FILES}
    monkeypatch.setattr(movielens, "PUBLISHED_SHA256", digests)
    for config in (MovieLensConfig(), MovieLensConfig(source="files")):
        data = load(config)
        assert (data.name, data.synthetic, len(data.user)) == ("movielens-100k", False, 4)


@pytest.mark.parametrize("source", ["auto", "files"])
def test_a_given_folder_is_never_replaced_by_synthetic_ratings(tmp_path: Path, source: Any) -> None:
    (tmp_path / "file").write_text("x")
    for path, message in (("nowhere", "does not exist"), ("file", "is a file"), ("", r"u\.data cannot be read")):
        with pytest.raises(DataError, match=message):
            load(MovieLensConfig(source=source, path=tmp_path / path))
    data = load(MovieLensConfig(source=source, path=write_files(tmp_path / "good")))
    assert data.name == "movielens (local files)"


@needs_real
def test_the_real_files() -> None:
    data = read(REAL)
    assert (data.name, data.synthetic) == ("movielens-100k", False)
    assert (len(data.user), len(data.age), data.genres.shape, len(data.occupations)) == (100_000, 944, (1683, 19), 21)
    assert (data.rating >= 4).mean() == pytest.approx(0.55375)
    assert data.gender.sum() == 273
    assert data.occupations[data.occupation[1] - 1] == "technician"
    assert hashlib.sha256((REAL / "u.data").read_bytes()).hexdigest() == PUBLISHED_SHA256["u.data"]


ARRAYS = ("user", "item", "rating", "timestamp", "age", "gender", "occupation", "genres")


@pytest.fixture(scope="module")
def data() -> MovieLens:
    return generate(7)


def test_seed_7_is_the_dataset_that_was_published_with_the_code(data: MovieLens) -> None:
    assert data.digest == movielens_like.DEFAULT_DIGEST


def test_generated_ratings_written_as_files_read_back_the_same(tmp_path: Path, data: MovieLens) -> None:
    write_dataset(tmp_path / "a", data)
    back = read(tmp_path / "a")
    for name in ARRAYS:
        assert np.array_equal(getattr(back, name), getattr(data, name))
        assert getattr(back, name).dtype == getattr(data, name).dtype
    assert (back.occupations, back.genre_names) == (data.occupations, data.genre_names)
    assert movielens_like.array_digest(back) == data.digest
