"""The embedded generator: MovieLens in shape, taste in it, the same on every call, and honest on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recperf.data import movielens_like
from recperf.data.movielens import MovieLens, read
from recperf.data.movielens_like import generate, write
from recperf.errors import ConfigError

ARRAYS = ("user", "item", "rating", "timestamp", "age", "gender", "occupation", "genres")


@pytest.fixture(scope="module")
def data() -> MovieLens:
    return generate(7)


def test_seed_7_is_the_dataset_that_was_published_with_the_code(data: MovieLens) -> None:
    assert data.digest == movielens_like.DEFAULT_DIGEST


@pytest.mark.parametrize(
    ("users", "items", "ratings"), [(1, 1, 1), (1, 30, 30), (5, 10, 12), (5, 10, 50), (30, 7, 100), (50, 4000, 900)]
)
def test_other_sizes_work(users: int, items: int, ratings: int) -> None:
    data = generate(3, users=users, items=items, ratings=ratings)
    assert (len(data.user), len(data.age), len(data.genres)) == (ratings, users + 1, items + 1)
    assert len(np.unique(data.user * 10_000 + data.item)) == ratings
    assert (data.user.min(), data.item.min()) >= (1, 1)
    assert (data.user.max() <= users, data.item.max() <= items) == (True, True)
    assert set(np.unique(data.rating)) <= {1, 2, 3, 4, 5}
    assert len(np.unique(data.user)) == users


@pytest.mark.parametrize(
    "wrong", [{"users": 0}, {"items": 0}, {"ratings": 10}, {"ratings": 10**9}, {"users": 10**6, "ratings": 10**7}]
)
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        generate(0, **wrong)
    with pytest.raises(ConfigError, match="seed"):
        generate(-1)


def test_what_is_written_reads_back_the_same_and_still_says_it_is_synthetic(tmp_path: Path, data: MovieLens) -> None:
    write(data, tmp_path / "a")
    write(data, tmp_path / "b")
    back = read(tmp_path / "a")
    for name in ARRAYS:
        assert np.array_equal(getattr(back, name), getattr(data, name))
        assert getattr(back, name).dtype == getattr(data, name).dtype
    assert (back.occupations, back.genre_names) == (data.occupations, data.genre_names)
    assert (back.name, back.synthetic) == ("movielens-like", True)
    assert movielens_like.array_digest(back) == data.digest
    assert read(tmp_path / "b").digest == back.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
