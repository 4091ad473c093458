"""The embedded generator: MovieLens in shape, taste in it, the same on every call, and honest on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recperf.data import movielens_like
from recperf.data.movielens import MovieLens, read
from recperf.data.movielens_like import generate, write
from recperf.errors import ConfigError, DataError, MachineError

ARRAYS = ("user", "item", "rating", "timestamp", "age", "gender", "occupation", "genres")


@pytest.fixture(scope="module")
def data() -> MovieLens:
    return generate(7)


def test_the_same_seed_gives_the_same_dataset_and_another_another(data: MovieLens) -> None:
    again, other = generate(7), generate(8)
    assert again.digest == data.digest
    assert other.digest != data.digest
    assert all(np.array_equal(getattr(again, name), getattr(data, name)) for name in ARRAYS)


def test_seed_7_is_the_dataset_that_was_published_with_the_code(data: MovieLens) -> None:
    assert data.digest == movielens_like.DEFAULT_DIGEST


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_sizes_and_long_tails_are_those_of_movielens(seed: int) -> None:
    data = generate(seed)
    assert (len(data.user), len(data.age), data.genres.shape) == (100_000, 944, (1683, 19))
    per_user, per_item = np.bincount(data.user)[1:], np.bincount(data.item)[1:]
    assert (len(per_user), len(per_item)) == (943, 1682)
    assert per_user.min() == 20
    assert 55 <= np.median(per_user) <= 75
    assert 650 <= per_user.max() <= 800
    assert per_item.min() >= 1
    assert 22 <= np.median(per_item) <= 32
    assert 480 <= per_item.max() <= 650
    assert len(np.unique(data.user * 10_000 + data.item)) == 100_000
    assert np.allclose(np.bincount(data.rating)[1:] / 1e5, [0.06, 0.11, 0.27, 0.34, 0.21], atol=0.01)


def test_ratings_depend_on_user_and_film_together(data: MovieLens) -> None:
    """Women's and men's average for the same genre differ far beyond chance, in the direction the generator states."""
    female = data.gender[data.user] == 1
    liked = data.rating >= 4

    def lift(genre: str) -> float:
        of_genre = data.genres[data.item, data.genre_names.index(genre)] == 1
        by_women = liked[female & of_genre].mean() - liked[female & ~of_genre].mean()
        by_men = liked[~female & of_genre].mean() - liked[~female & ~of_genre].mean()
        return float(by_women - by_men)

    assert lift("Romance") > 0.1
    assert lift("Sci-Fi") < -0.1


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


def test_writing_leaves_what_is_there_alone(tmp_path: Path) -> None:
    small = generate(5, users=3, items=4, ratings=6)
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "mine").write_text("precious")
    with pytest.raises(DataError, match="already"):
        write(small, occupied)
    assert (occupied / "mine").read_text() == "precious"
    with pytest.raises(DataError, match="already"):
        write(small, occupied / "mine")
    (tmp_path / "empty").mkdir()
    write(small, tmp_path / "empty")
    assert len(read(tmp_path / "empty").user) == 6


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = generate(5, users=3, items=4, ratings=6)
    plain = Path.write_bytes

    def full_disk(self: Path, content: bytes) -> int:
        if self.name == "u.item":
            raise OSError(28, "No space left on device")
        return plain(self, content)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(MachineError, match="the disk is full"):
        write(small, tmp_path / "full")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(MachineError):
        write(small, tmp_path / "file" / "below")
