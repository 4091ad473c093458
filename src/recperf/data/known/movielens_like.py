"""Synthetic ratings in the shape of MovieLens-100K, for machines without the real files.

Sizes, long tails, rating histogram and demography follow the real dataset. A rating depends on the user, the film, and
their interaction (genres by age, gender, occupation and person; a few latent traits), so that a model which learns the
interaction is better than one with user and film biases only.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...config import require
from .movielens import GENRES, MovieLens

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)

DEFAULT_DIGEST = "e0c1d3fd965ea0f557af6b52d15c1d412e0e9084fd1fbc31df9ac7ffe455cf33"
"""The digest of `generate(7)`; another one means that the arithmetic of this machine gives other ratings."""

# Films of each genre among 1,682, then how the taste for it changes with age (per 12 years) and for women.
_GENRES: dict[str, tuple[int, float, float]] = {
    "unknown": (2, 0.0, 0.0),
    "Action": (251, -0.5, -0.9),
    "Adventure": (135, -0.3, -0.5),
    "Animation": (42, -0.5, 0.4),
    "Children's": (122, -0.6, 0.6),
    "Comedy": (505, -0.4, 0.3),
    "Crime": (109, 0.3, -0.5),
    "Documentary": (50, 0.6, 0.2),
    "Drama": (725, 0.7, 0.6),
    "Fantasy": (22, -0.5, 0.1),
    "Film-Noir": (24, 0.8, -0.1),
    "Horror": (92, -0.9, -0.8),
    "Musical": (56, 0.4, 0.9),
    "Mystery": (61, 0.4, 0.1),
    "Romance": (247, 0.3, 1.0),
    "Sci-Fi": (101, -0.4, -1.0),
    "Thriller": (251, -0.2, -0.4),
    "War": (71, 0.6, -0.7),
    "Western": (27, 0.7, -0.4),
}
_GENRES_PER_FILM = (833, 569, 215, 51, 11, 3)
_OCCUPATIONS = {
    "administrator": 79, "artist": 28, "doctor": 7, "educator": 95, "engineer": 67, "entertainment": 18,
    "executive": 32, "healthcare": 16, "homemaker": 7, "lawyer": 12, "librarian": 51, "marketing": 26, "none": 9,
    "other": 105, "programmer": 66, "retired": 14, "salesman": 12, "scientist": 31, "student": 196, "technician": 27,
    "writer": 45,
}  # fmt: skip
_AGES = {"student": (21.5, 4.5), "retired": (62.0, 6.0), "none": (25.0, 8.0), "educator": (42.0, 9.0)}
_OTHER_AGES = (36.5, 10.5)
_FEMALE_SHARE = 0.29
_RATING_SHARES = (0.061, 0.114, 0.271, 0.342, 0.212)
_FIRST_SECOND, _SECONDS = 874_724_710, 18_561_928

# Quantiles of the number of ratings per user and per film.
_RANKS = (0.0, 0.1, 0.2, 0.5, 0.8, 0.9, 0.99, 1.0)
_RATINGS_PER_USER = (20.0, 23.0, 29.0, 65.0, 171.0, 244.0, 442.0, 737.0)
_RATINGS_PER_FILM = (1.0, 2.0, 5.0, 27.0, 100.0, 169.0, 369.0, 583.0)
_MIN_PER_USER = 20

# Standard deviations of the parts of a score; that of the noise is 1.
_USER_BIAS, _FILM_BIAS, _POPULARITY = 0.72, 0.68, 0.22
_DEMOGRAPHIC_TASTE, _OCCUPATION_TASTE, _PERSONAL_TASTE = 1.1, 0.25, 0.2
_TRAITS, _TRAIT_TASTE = 2, 0.4


def generate(seed: int, *, users: int = 943, items: int = 1682, ratings: int = 100_000) -> MovieLens:
    """Generate a dataset; the same arguments give the same dataset."""
    require(seed >= 0, "seed", seed, "0 or more")
    rng = np.random.Generator(np.random.PCG64(seed))
    occupation, names = _draw_occupations(rng, users)
    age, female = _draw_people(rng, occupation, names)
    genres = _draw_genres(rng, items)
    user, item = _draw_pairs(rng, users, items, ratings)
    popularity = np.bincount(item, minlength=items)
    score = _fit(rng, age, female, occupation, genres)[user, item] + _bias(rng, users, popularity)[user, item]
    rating = _to_ratings(np.round(score + rng.standard_normal(ratings), 6))
    timestamp = _draw_times(rng, user, users)
    order = rng.permutation(ratings)
    data = MovieLens(
        name="movielens-like",
        synthetic=True,
        digest="",
        user=user[order] + 1,
        item=item[order] + 1,
        rating=rating[order],
        timestamp=timestamp[order],
        age=_one_based(age),
        gender=_one_based(female),
        occupation=_one_based(occupation + 1),
        occupations=names,
        genres=_one_based(genres),
        genre_names=GENRES,
    )
    return replace(data, digest=array_digest(data))


def array_digest(data: MovieLens) -> str:
    """SHA-256 of the ratings (user, item, rating, timestamp), the users (age, gender, occupation) and the genres."""
    digest = hashlib.sha256("|".join(data.occupations).encode())
    for column in (data.user, data.item, data.rating, data.timestamp, data.age, data.gender, data.occupation):
        digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    digest.update(np.ascontiguousarray(data.genres).tobytes())
    return digest.hexdigest()


def _one_based(rows: NDArray[T]) -> NDArray[T]:
    return np.concatenate([np.zeros_like(rows[:1]), rows])


def _draw_occupations(rng: np.random.Generator, users: int) -> tuple[Ints, tuple[str, ...]]:
    names = sorted(_OCCUPATIONS)
    shares = np.array([_OCCUPATIONS[name] for name in names], dtype=np.float64)
    drawn = rng.choice(len(names), size=users, p=shares / shares.sum())
    used, occupation = np.unique(drawn, return_inverse=True)
    return occupation.astype(np.int64), tuple(names[index] for index in used)


def _draw_people(rng: np.random.Generator, occupation: Ints, names: tuple[str, ...]) -> tuple[Ints, Ints]:
    mean, spread = np.array([_AGES.get(name, _OTHER_AGES) for name in names]).T
    age = np.rint(np.round(mean[occupation] + spread[occupation] * rng.standard_normal(len(occupation)), 6))
    female = rng.random(len(occupation)) < _FEMALE_SHARE
    return np.clip(age, 7, 73).astype(np.int64), female.astype(np.int64)


def _draw_genres(rng: np.random.Generator, items: int) -> NDArray[np.uint8]:
    shares = np.array([_GENRES[name][0] for name in GENRES], dtype=np.float64)
    per_film = np.array(_GENRES_PER_FILM, dtype=np.float64)
    count = rng.choice(len(per_film), size=items, p=per_film / per_film.sum()) + 1
    arrival = rng.standard_exponential((items, len(GENRES))) / shares
    rank = np.argsort(np.argsort(arrival, axis=1, kind="stable"), axis=1, kind="stable")
    return (rank < count[:, None]).astype(np.uint8)


def _counts(shape: tuple[float, ...], size: int, total: int, low: int, high: int) -> Ints:
    """Integers in low..high with a long-tailed distribution and the given sum."""
    ranks = (np.arange(size) + 0.5) / size
    weights = np.round(np.exp(np.interp(ranks, _RANKS, np.log(shape))), 6)
    smallest, largest = 0.0, total / float(weights.min())
    for _ in range(60):
        scale = (smallest + largest) / 2
        if np.clip(np.rint(weights * scale), low, high).sum() > total:
            largest = scale
        else:
            smallest = scale
    counts: Ints = np.clip(np.rint(weights * smallest), low, high).astype(np.int64)
    while missing := total - int(counts.sum()):
        increased = np.flatnonzero(counts < high)[::-1][:missing]
        counts[increased] += 1
    return counts


def _draw_pairs(rng: np.random.Generator, users: int, items: int, ratings: int) -> tuple[Ints, Ints]:
    """The pairs of users and films with a rating; popular films are drawn more often."""
    activity = rng.permutation(_counts(_RATINGS_PER_USER, users, ratings, min(_MIN_PER_USER, ratings // users), items))
    popularity = rng.permutation(_counts(_RATINGS_PER_FILM, items, ratings, min(1, ratings // items), users))
    arrival = rng.standard_exponential((users, items)) / _draw_weights(activity, popularity)
    films = [np.sort(np.argpartition(arrival[row], k - 1)[:k]) for row, k in enumerate(activity)]
    user, item = np.repeat(np.arange(users), activity), np.concatenate(films).astype(np.int64)
    _place_unrated(rng, user, item, items)
    return user, item


def _draw_weights(activity: Ints, popularity: Ints) -> Floats:
    """Weights with which drawing without replacement gives the requested popularity.

    A user of reach t draws a film of weight w with probability 1 - exp(-w t). Users of similar activity share a reach,
    which keeps the table small.
    """
    groups = np.array_split(np.sort(activity), min(32, len(activity)))
    size = np.array([len(group) for group in groups], dtype=np.float64)
    mean = np.array([group.mean() for group in groups])
    weight, reach = np.maximum(popularity, 0.1).astype(np.float64), mean / popularity.sum()
    for _ in range(25):
        drawn = -np.expm1(-np.outer(reach, weight))
        reach = np.minimum(reach * mean / drawn.sum(axis=1), 1e3)
        drawn = -np.expm1(-np.outer(reach, weight))
        weight = np.clip(weight * np.maximum(popularity, 0.1) / (size @ drawn), 1e-3, 1e6)
    return weight


def _place_unrated(rng: np.random.Generator, user: Ints, item: Ints, items: int) -> None:
    """Move a rating of a popular film to each film without ratings, because every real film has at least one."""
    count = np.bincount(item, minlength=items)
    unrated = np.flatnonzero(count == 0)
    popular = rng.permutation(np.flatnonzero(count[item] >= np.quantile(count, 0.9)))
    _, first = np.unique(user[popular], return_index=True)
    rows = popular[first][: len(unrated)]
    rows = rows[count[item[rows]] > len(rows)]
    item[rows] = unrated[: len(rows)]


def _standard(values: Floats) -> Floats:
    spread = values.std()
    return np.asarray((values - values.mean()) / (spread if spread > 0 else 1.0))


def _bias(rng: np.random.Generator, users: int, popularity: Ints) -> Floats:
    user = _USER_BIAS * rng.standard_normal(users)
    item = _FILM_BIAS * rng.standard_normal(len(popularity)) + _POPULARITY * _standard(np.log1p(popularity))
    return np.asarray(user[:, None] + item[None, :])


def _fit(rng: np.random.Generator, age: Ints, female: Ints, occupation: Ints, genres: NDArray[np.uint8]) -> Floats:
    """The interaction of every user and film, [users, items], centred by rows and columns."""
    users, items = len(age), len(genres)
    slopes = np.array([_GENRES[name][1:] for name in GENRES])
    people = np.stack([(age - 34.0) / 12.0, female - _FEMALE_SHARE], axis=1)
    by_occupation = rng.standard_normal((int(occupation.max()) + 1, len(GENRES)))
    taste = _DEMOGRAPHIC_TASTE * people @ slopes.T
    taste += _OCCUPATION_TASTE * by_occupation[occupation]
    taste += _PERSONAL_TASTE * rng.standard_normal((users, len(GENRES)))
    content = genres / np.sqrt(np.maximum(genres.sum(axis=1, keepdims=True), 1))
    traits = rng.standard_normal((users, _TRAITS)) @ rng.standard_normal((_TRAITS, items))
    fit = taste @ content.T + _TRAIT_TASTE * traits
    return np.asarray(fit - fit.mean(axis=0) - fit.mean(axis=1, keepdims=True) + fit.mean())


def _to_ratings(score: Floats) -> Ints:
    """Map scores to 1..5 so that each rating has its share."""
    ends = np.rint(np.cumsum(_RATING_SHARES)[:-1] * len(score)).astype(np.int64)
    cuts = np.sort(score)[np.minimum(ends, len(score) - 1)]
    return 1 + np.searchsorted(cuts, score, side="right").astype(np.int64)


def _draw_times(rng: np.random.Generator, user: Ints, users: int) -> Ints:
    """Unix times over seven months; each user has one to four sessions within a few weeks."""
    start = rng.random(users) * 0.85
    sessions = np.minimum(rng.geometric(0.55, users), 4)
    session = (rng.random(len(user)) * sessions[user]).astype(np.int64)
    begins = start[:, None] + np.cumsum(rng.random((users, 4)) * 0.04, axis=1)
    within = (rng.random(len(user)) * 2_700).astype(np.int64)
    moment = np.floor(begins[user, session] * _SECONDS).astype(np.int64) + within
    return np.asarray(_FIRST_SECOND + np.minimum(moment, _SECONDS), dtype=np.int64)
