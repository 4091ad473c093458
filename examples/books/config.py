"""A file of book ratings. No number of readers or books is written here: the tables take their sizes from the file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from recperf.data.config import RatingsConfig
from recperf.execution.workload import Estimate, Workload
from recperf.runs.contract import Claim, quality_target
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig
from recperf.workloads.micro_dlrm.config import estimate as estimate_micro_dlrm
from recperf.workloads.micro_dlrm.data import describe, read


def _books() -> RatingsConfig:
    return RatingsConfig(path=Path("books.csv"), user="reader", item="book", rating="stars", time="finished")


@dataclass(frozen=True, kw_only=True)
class BooksConfig(MicroDLRMConfig):
    data: RatingsConfig = field(default_factory=_books)  # type: ignore[assignment]


def sized(config: BooksConfig) -> BooksConfig:
    """The config whose model has the features of the file, and tables as large as its ids need."""
    _, clicks = read(config.data)
    bottom = (len(clicks.dense_names), *config.model.bottom[1:])
    return replace(config, model=replace(config.model, features=clicks.feature_names, rows=clicks.rows, bottom=bottom))


def check(config: BooksConfig) -> str:
    return describe(read(config.data)[0])


def estimate(config: BooksConfig) -> Estimate:
    return estimate_micro_dlrm(sized(config))


def claims(config: BooksConfig) -> tuple[Claim, ...]:
    return (quality_target(lambda *_: config.target.bounds("user_item_bias")),)


BOOKS = Workload(
    name="books",
    summary="DLRM on ratings of books",
    config=BooksConfig,
    presets={"default": BooksConfig},
    estimate=estimate,
    claims=claims,
    checks="books.config:check",
    build="books.build:PreparedBooks",
)
