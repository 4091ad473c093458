"""Ratings as micro-dlrm reads them: MovieLens as click rows, checked against the model's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...data.catalogue import load
from ...data.clicks import Clicks, build
from ...data.config import MovieLensConfig
from ...data.movielens import MovieLens
from ...errors import ConfigError
from ...models.config import DLRMConfig
from .config import MicroDLRMConfig, require_room

if TYPE_CHECKING:
    from ...data.click_store.imported import ImportedClicks


def check(config: MicroDLRMConfig) -> str:
    """Check memory, data and table sizes without training; the line names the data."""
    require_room(config)
    if config.data.has_clicks:
        facts = imported(config.data).describe()
        return f"{facts['name']}, {facts['rows']:,} rows, split {facts['split']}"
    ratings, rows = read(config.data)
    check_sizes(config.model, rows)
    return describe(ratings)


def imported(config: MovieLensConfig) -> ImportedClicks:
    """Imported clicks whose columns have one category in a row."""
    assert config.path is not None
    from ...data.click_store.imported import open_clicks

    clicks = open_clicks(config.path, config.rows_split())
    several = [key for key, slots in zip(clicks.keys, clicks.slots) if slots > 1]
    if several:
        what = f"column {several[0]!r} has several categories in a row, which micro-dlrm does not read"
        raise ConfigError(what, fix=f"recperf run dlrm --data {clicks.manifest.name}")
    return clicks


def read(config: MovieLensConfig) -> tuple[MovieLens, Clicks]:
    ratings = load(config)
    return ratings, build(ratings, config)


def describe(ratings: MovieLens) -> str:
    synthetic = " (synthetic)" if ratings.synthetic else ""
    return f"{ratings.name}, {len(ratings.rating):,} ratings{synthetic}"


def check_sizes(model: DLRMConfig, clicks: Clicks) -> None:
    """Refuse tables that are too small for the data's ids: a lookup in stacked tables would read another table."""
    if model.features != clicks.feature_names:
        raise ConfigError(f"model.features is {model.features}; the data has {clicks.feature_names}")
    for name, rows, needed in zip(model.features, model.rows, clicks.rows):
        if rows < needed:
            raise ConfigError(
                f"table {name!r} has {rows} rows, the data needs {needed}",
                where={"field": "model.rows"},
                fix=f"--model.rows {' '.join(map(str, clicks.rows))}",
            )
    if model.dense != len(clicks.dense_names):
        raise ConfigError(
            f"model.bottom starts with {model.dense} dense features, the data has {len(clicks.dense_names)}",
            where={"field": "model.bottom"},
        )
