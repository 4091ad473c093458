"""Ratings as the files of MovieLens-100K, for tests that read such files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recperf.data.known.movielens import MovieLens
from recperf.data.known.movielens_like import generate


def write_files(folder: Path, data: MovieLens | None = None) -> None:
    """Write u.data, u.item and u.user, by default of 120 users."""
    data = data or generate(3, users=120, items=200, ratings=5000)
    ratings = (column.tolist() for column in (data.user, data.item, data.rating, data.timestamp))
    films = enumerate(data.genres.tolist()[1:], start=1)
    people = (
        (user, data.age[user], "MF"[data.gender[user]], data.occupations[data.occupation[user] - 1])
        for user in np.flatnonzero(data.occupation).tolist()
    )
    contents = {
        "u.data": "".join("\t".join(map(str, row)) + "\n" for row in zip(*ratings)),
        "u.item": "".join(f"{at}|Film {at}|01-Jan-1997|||{'|'.join(map(str, of))}\n" for at, of in films),
        "u.user": "".join(f"{user}|{age}|{gender}|{occupation}|00000\n" for user, age, gender, occupation in people),
    }
    folder.mkdir(parents=True)
    for file, text in contents.items():
        (folder / file).write_text(text)
