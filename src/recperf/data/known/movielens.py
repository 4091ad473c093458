"""MovieLens-100K as raw tables, read from its three files.

A file that does not fit the format raises one `DataError` that names the file and the line; nothing is repaired or
skipped.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...jsonfile import content_of

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

_ID = "([1-9][0-9]{0,6})"
_FORMS = {
    "u.data": (
        "ascii",
        rf"{_ID}\t{_ID}\t([1-5])\t([0-9]{{1,12}})",
        "user, item, a rating of 1 to 5, time, with tabs",
    ),
    "u.item": ("latin-1", rf"{_ID}(?:\|[^|]*){{4}}((?:\|[01]){{{len(GENRES)}}})", "24 columns, the last 19 of 0 or 1"),
    "u.user": (
        "utf-8",
        rf"{_ID}\|([0-9]{{1,2}}|1[0-4][0-9]|150)\|([MF])\|([^|]*[^|\s][^|]*)\|[^|]*",
        "id, age, M or F, occupation and zip code, with |",
    ),
}
"""Encoding of each file, and what its lines are: a regular expression, and in words."""
_GENRES_USED = 12
_LIKED_FROM = 4
_CUT_OFF = f"the file looks cut off; fetch it again: recperf data get {NAME}"

Ints = NDArray[np.int64]


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
    if not os.path.isdir(folder):
        raise DataError(
            f"the MovieLens folder {'is a file, not a folder' if os.path.lexists(folder) else 'does not exist'}",
            where={"folder": folder},
            fix=f"name a folder that holds u.data, u.item and u.user, or run: recperf data get {NAME}",
        )
    contents = {file: _read_file(folder / file) for file in FILES}
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    ratings = _parse_ratings(folder / "u.data", contents["u.data"])
    items, people = (_parse(folder / file, contents[file]) for file in ("u.item", "u.user"))
    known = {"item": np.array([int(row[0]) for row in items]), "user": np.array([int(row[0]) for row in people])}
    for kind, ids in known.items():
        repeated = np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])
        _refuse(folder / f"u.{kind}", f"{kind} id", ids, repeated, f"{kind} id came before")
    for kind, ids in (("user", ratings[0]), ("item", ratings[1])):
        fix = f"use u.data and u.{kind} of one download, then: recperf data check {NAME} --path {folder}"
        strangers, more = np.flatnonzero(~np.isin(ids, known[kind])), f"; u.{kind} has {len(known[kind])} {kind}s"
        _refuse(folder / "u.data", kind, ids, strangers, f"{kind} is not in u.{kind}", more, fix)
    occupations = tuple(sorted({row[3] for row in people}))
    by_user = np.zeros((3, int(known["user"].max()) + 1), dtype=np.int64)
    by_user[:, known["user"]] = np.array(
        [(int(age), gender == "F", 1 + occupations.index(name)) for _, age, gender, name in people]
    ).T
    genres = np.zeros((int(known["item"].max()) + 1, len(GENRES)), dtype=np.uint8)
    genres[known["item"]] = [[int(flag) for flag in flags[1::2]] for _, flags in items]
    return MovieLens(
        name=NAME if digests == PUBLISHED_SHA256 else "movielens (local files)",
        synthetic=False,
        digest=hashlib.sha256(b"".join(contents[file] for file in FILES)).hexdigest(),
        user=ratings[0],
        item=ratings[1],
        rating=ratings[2],
        timestamp=ratings[3],
        age=by_user[0],
        gender=by_user[1],
        occupation=by_user[2],
        occupations=occupations,
        genres=genres,
        genre_names=GENRES,
    )


def _read_file(path: Path) -> bytes:
    try:
        content = content_of(path, follow_links=True)
        if not content.strip():
            raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        fix = f"unpack ml-100k.zip again, or run: recperf data get {NAME}"
        raise DataError(f"{path.name} cannot be read: {reason}", where={"file": path}, fix=fix) from None
    return content


def _fault(path: Path, line: int, what: str, fix: str | None = None) -> DataError:
    advice = fix or f"correct the line, or fetch the published files: recperf data get {NAME}"
    return DataError(what, where={"file": path, "line": line}, fix=advice)


def _parse(path: Path, content: bytes) -> list[tuple[str, ...]]:
    """The columns of every line that are used; on errors say how many lines are wrong, and why the first is."""
    encoding, form, meaning = _FORMS[path.name]
    try:
        lines = content.decode(encoding).replace("\r\n", "\n").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _fault(path, line, f"{path.name} is not {encoding} text (line {line})") from None
    rows = [re.fullmatch(form, line) for line in lines]
    wrong = [number for number, row in enumerate(rows, start=1) if row is None]
    if wrong:
        first = f"line {wrong[0]}, {lines[wrong[0] - 1][:60]!r} is not {meaning}"
        what = f"{path.name} has {_rows(len(wrong))} at fault (first: {first})"
        raise _fault(path, wrong[0], what, _CUT_OFF if wrong == [len(lines)] else None)
    return [row.groups() for row in rows if row]


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def _refuse(path: Path, kind: str, ids: Ints, wrong: Ints, why: str, more: str = "", fix: str | None = None) -> None:
    """Refuse a file in which some rows have a wrong id; the first is named."""
    if len(wrong):
        line = int(wrong[0]) + 1
        first = f"first: line {line}, {kind} {ids[line - 1]}{more}"
        raise _fault(path, line, f"{path.name} has {_rows(len(wrong))} whose {why} ({first})", fix)


def _parse_ratings(path: Path, content: bytes) -> Ints:
    """Parse u.data to an array [4, ratings]."""
    ratings = np.array(_parse(path, content)).astype(np.int64).T
    times = ratings[3]
    # A file truncated inside its last number still parses, but that number has fewer digits than all others.
    if not content.endswith(b"\n") and len(times) > 1 and len(str(times[-1])) < len(str(times[:-1].min())):
        raise _fault(path, len(times), f"{path.name} ends inside a row (line {len(times)}, time {times[-1]})", _CUT_OFF)
    return np.ascontiguousarray(ratings)
