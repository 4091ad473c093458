"""MovieLens-100K as raw tables, read from its three files.

A file that does not fit the format raises one `DataError` that names the file and the line; nothing is repaired or
skipped.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

NAME = "movielens-100k"
FILES = ("u.data", "u.item", "u.user")
PUBLISHED_SHA256 = {
    "u.data": "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
    "u.item": "553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",
    "u.user": "f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c",
}
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
SYNTHETIC_MARK = "recperf:made-up"
"""In the address column of u.item of movielens-like, so that its files never pass for real ones."""

LARGEST_ID = 10_000_000
LARGEST_TIME = 10**12
LARGEST_FILE = 1 << 28
OLDEST = 150
_MOST_DIGITS = 18
_GENRES_USED = 12
_LIKED_FROM = 4
_CUT_OFF = f"the file looks cut off; fetch it again: recperf data get {NAME}"

Ints = NDArray[np.int64]
Columns = tuple[Callable[[str], Any], ...]
"""How the text in each column of a file is parsed; a parser raises ValueError with the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MovieLens:
    """Ratings of 1 to 5, and tables indexed by the ids in the files. Ids count from 1: row 0 of a table serves ids that
    no training row has."""

    name: str
    """movielens-100k for the published files, movielens (local files) for others, movielens-like for synthetic ones."""
    synthetic: bool
    digest: str
    """SHA-256 of u.data, u.item and u.user one after the other, or of the arrays of synthetic ratings."""
    user: Ints
    """The user of each rating."""
    item: Ints
    rating: Ints
    timestamp: Ints
    """Unix seconds."""
    age: Ints
    gender: Ints
    """1 is F, 0 is M."""
    occupation: Ints
    """1 + the index in `occupations`; 0 where no user has that id."""
    occupations: tuple[str, ...]
    genres: NDArray[np.uint8]
    """[largest item id + 1, 19], 1 where the item is of the genre."""
    genre_names: tuple[str, ...]

    @property
    def liked(self) -> NDArray[np.bool_]:
        """Whether each rating is a click: 4 or 5."""
        return np.asarray(self.rating >= _LIKED_FROM)

    def id_features(self) -> dict[str, tuple[Ints, int]]:
        """For each sparse feature the id of every rating, and the rows of its table: its largest id + 1."""
        return {
            "user": (self.user, len(self.age)),
            "item": (self.item, len(self.genres)),
            "occupation": (self.occupation[self.user], len(self.occupations) + 1),
        }

    def user_features(self) -> dict[str, NDArray[Any]]:
        """Numbers about the user of every rating, by name."""
        return {"age": (self.age[self.user] - 36.0) / 12.0, "gender": self.gender[self.user]}

    def item_features(self) -> dict[str, NDArray[Any]]:
        """Numbers about the item of every rating, by name."""
        return {self.genre_names[index]: self.genres[self.item, index] for index in self.common_genres()}

    def common_genres(self) -> list[int]:
        """The most common genres of the catalogue; ties keep the catalogue's order."""
        count = self.genres.sum(axis=0, dtype=np.int64)
        return [int(index) for index in np.argsort(-count, kind="stable")[:_GENRES_USED]]


def read_download(folder: Path) -> MovieLens:
    """Read the copy that `recperf data get` downloaded, and verify its checksums."""
    data = read(folder)
    if data.name != NAME:
        raise DataError(
            "the downloaded MovieLens-100K has changed on disk",
            where={"folder": folder},
            fix=f"recperf data get {NAME}, which replaces it; for files of your own use data.path",
        )
    return data


def locate(folder: Path) -> Path:
    """The folder itself, or the folder ml-100k inside it if the files are there."""
    folder = folder.expanduser()
    inside = folder / "ml-100k"
    return inside if not os.path.lexists(folder / "u.data") and os.path.isdir(inside) else folder


def read(folder: Path) -> MovieLens:
    """Read u.data, u.item and u.user and check that they fit each other."""
    folder = locate(folder)
    _check_folder(folder)
    contents = {file: _read_file(folder / file) for file in FILES}
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    genres, in_catalogue = _parse_items(folder / "u.item", contents["u.item"])
    age, gender, occupation, occupations = _parse_users(folder / "u.user", contents["u.user"])
    ratings = _parse_ratings(folder / "u.data", contents["u.data"])
    _check_ratings(folder / "u.data", ratings, occupation > 0, in_catalogue)
    synthetic = f"|{SYNTHETIC_MARK}|".encode() in contents["u.item"]
    own_name = "movielens-like" if synthetic else "movielens (local files)"
    return MovieLens(
        name=NAME if digests == PUBLISHED_SHA256 else own_name,
        synthetic=synthetic,
        digest=hashlib.sha256(b"".join(contents[file] for file in FILES)).hexdigest(),
        user=ratings[0],
        item=ratings[1],
        rating=ratings[2],
        timestamp=ratings[3],
        age=age,
        gender=gender,
        occupation=occupation,
        occupations=occupations,
        genres=genres,
        genre_names=GENRES,
    )


def _check_folder(folder: Path) -> None:
    if os.path.isdir(folder):
        return
    problem = "is a file, not a folder" if os.path.lexists(folder) else "does not exist"
    raise DataError(
        f"the MovieLens folder {problem}",
        where={"folder": folder},
        fix=f"name a folder that holds u.data, u.item and u.user, or run: recperf data get {NAME}",
    )


def _read_file(path: Path) -> bytes:
    get_again = f"unpack ml-100k.zip again, or run: recperf data get {NAME}"
    try:
        # A pipe or device in place of the file would block forever.
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{path.name} is not a file", where={"file": path}, fix=get_again)
        if facts.st_size > LARGEST_FILE:
            what = f"{path.name} has {facts.st_size:,} bytes; the published files have fewer than 2,000,000"
            raise DataError(what, where={"file": path}, fix="recperf data import takes larger files")
        content = path.read_bytes()
    except OSError as error:
        what = f"{path.name} cannot be read: {error.strerror or error}"
        raise DataError(what, where={"file": path}, fix=get_again) from None
    if not content.strip():
        raise DataError(f"{path.name} is empty", where={"file": path, "line": 1}, fix=get_again)
    return content


def _fault(path: Path, line: int, what: str, fix: str | None = None) -> DataError:
    advice = fix or f"correct the line, or fetch the published files: recperf data get {NAME}"
    return DataError(what, where={"file": path, "line": line}, fix=advice)


def _lines(path: Path, content: bytes, encoding: str) -> list[str]:
    """The lines of a file, without blank lines at its end."""
    fix = f"save {path.name} as plain {encoding} text without a byte-order mark, or fetch the published files"
    if content.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        raise _fault(path, 1, f"{path.name} starts with a byte-order mark: it was saved as UTF-16 or UTF-8", fix)
    nul = content.find(b"\0")
    if nul >= 0:
        line = content.count(b"\n", 0, nul) + 1
        raise _fault(path, line, f"{path.name} holds NUL bytes, so it is not {encoding} text", fix)
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"{path.name} holds bytes that are not {encoding} text (first: line {line}, {content[error.start]:#04x})"
        raise _fault(path, line, what, fix) from None
    return text.replace("\r\n", "\n").rstrip("\n").split("\n")


def _number(name: str, low: int, high: int) -> Callable[[str], int]:
    """A parser of whole numbers from low to high."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()):
            raise ValueError(f"{name} {text[:40]!r} is not a whole number")
        if len(digits) > _MOST_DIGITS or not low <= int(text) <= high:
            raise ValueError(f"{name} {text[:40]} is outside {low} to {high}")
        return int(text)

    return parse


def _flag(name: str, no: str, yes: str) -> Callable[[str], int]:
    """A parser of two values, as 0 and 1."""

    def parse(text: str) -> int:
        if text not in (no, yes):
            raise ValueError(f"{name} {text[:40]!r} is not {no} or {yes}")
        return int(text == yes)

    return parse


def _occupation(text: str) -> str:
    if not text.strip():
        raise ValueError("occupation is empty")
    return text


_RATING_COLUMNS: Columns = (
    _number("user id", 1, LARGEST_ID),
    _number("item id", 1, LARGEST_ID),
    _number("rating", 1, 5),
    _number("time", 0, LARGEST_TIME),
)
_USER_COLUMNS: Columns = (
    _number("user id", 1, LARGEST_ID), _number("age", 0, OLDEST), _flag("gender", "M", "F"), _occupation, str,
)  # fmt: skip
_GENRE_COLUMNS: Columns = tuple(_flag(f"flag of genre {name}", "0", "1") for name in GENRES)
_ITEM_COLUMNS: Columns = (_number("item id", 1, LARGEST_ID), str, str, str, str, *_GENRE_COLUMNS)


def _parse(path: Path, content: bytes, encoding: str, separator: str, columns: Columns) -> list[list[Any]]:
    """Parse every line; on errors say how many lines are wrong, and why the first is."""
    lines = _lines(path, content, encoding)
    rows: list[list[Any]] = []
    faults: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        cells = line.split(separator)
        try:
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells) if line else 0} columns where {len(columns)} are expected")
            rows.append([parse(cell) for parse, cell in zip(columns, cells)])
        except ValueError as error:
            faults.append((number, str(error)))
    if faults:
        line_number, reason = faults[0]
        what = f"{path.name} has {_rows(len(faults))} at fault (first: line {line_number}, {reason})"
        raise _fault(path, line_number, what, _CUT_OFF if line_number == len(lines) and "columns" in reason else None)
    return rows


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def _refuse_repeats(path: Path, ids: Ints, name: str) -> None:
    _, first = np.unique(ids, return_index=True)
    repeated = np.setdiff1d(np.arange(len(ids)), first)
    if len(repeated):
        line = int(repeated[0]) + 1
        rows = _rows(len(repeated))
        raise _fault(
            path, line, f"{path.name} has {rows} whose {name} came before (first: line {line}, {name} {ids[line - 1]})"
        )


def _parse_items(path: Path, content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Genres by item id, and which ids exist."""
    rows = _parse(path, content, "latin-1", "|", _ITEM_COLUMNS)
    ids = np.array([row[0] for row in rows], dtype=np.int64)
    _refuse_repeats(path, ids, "item id")
    genres = np.zeros((int(ids.max()) + 1, len(GENRES)), dtype=np.uint8)
    genres[ids] = [row[-len(GENRES) :] for row in rows]
    known = np.zeros(len(genres), dtype=np.bool_)
    known[ids] = True
    return genres, known


def _parse_users(path: Path, content: bytes) -> tuple[Ints, Ints, Ints, tuple[str, ...]]:
    """Age, gender and occupation by user id, and the names of the occupations."""
    rows = _parse(path, content, "utf-8", "|", _USER_COLUMNS)
    names = tuple(sorted({row[3] for row in rows}))
    table = np.array([(user, age, gender, 1 + names.index(name)) for user, age, gender, name, _ in rows], np.int64)
    _refuse_repeats(path, table[:, 0], "user id")
    by_id = np.zeros((3, int(table[:, 0].max()) + 1), dtype=np.int64)
    by_id[:, table[:, 0]] = table[:, 1:].T
    return by_id[0], by_id[1], by_id[2], names


def _parse_ratings(path: Path, content: bytes) -> Ints:
    """Parse u.data to an array [4, ratings]."""
    ratings = np.array(_parse(path, content, "ascii", "\t", _RATING_COLUMNS), dtype=np.int64).T
    times = ratings[3]
    # A file truncated inside its last number still parses, but that number has fewer digits than all others.
    if not content.endswith(b"\n") and len(times) > 1 and len(str(times[-1])) < len(str(times[:-1].min())):
        raise _fault(path, len(times), f"{path.name} ends inside a row (line {len(times)}, time {times[-1]})", _CUT_OFF)
    return np.ascontiguousarray(ratings)


def _check_ratings(path: Path, ratings: Ints, users: NDArray[np.bool_], items: NDArray[np.bool_]) -> None:
    for kind, ids, known, table in (("user", ratings[0], users, "u.user"), ("item", ratings[1], items, "u.item")):
        strangers = np.flatnonzero(~known[np.minimum(ids, len(known) - 1)] | (ids >= len(known)))
        if len(strangers):
            line = int(strangers[0]) + 1
            first = f"first: line {line}, {kind} {ids[line - 1]}; {table} has {np.count_nonzero(known)} {kind}s"
            raise _fault(
                path,
                line,
                f"u.data has {_rows(len(strangers))} whose {kind} is not in {table} ({first})",
                f"use u.data and {table} of one download, then: recperf data check {NAME} --path {path.parent}",
            )
