"""ratings: the stars that a user gives a film, predicted by micro-dlrm's model and compared by the RMSE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..config import require
from ..execution.workload import RankingConfig, Workload, quality_claims
from ..tasks import RATINGS
from .micro_dlrm.config import MicroDLRMConfig, check, estimate, on_movielens


@dataclass(frozen=True, kw_only=True)
class RatingsConfig(MicroDLRMConfig):
    ranking: RankingConfig = field(default_factory=lambda: RankingConfig(users=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.data.has_clicks, "data.source", self.data.source, "not clicks, which have no stars")


def bounds(config: RatingsConfig) -> dict[str, Any]:
    return config.target.bounds("user_item_bias", *RATINGS.baselines)


RATING_WORKLOAD = Workload(
    name="ratings",
    summary="the stars of a rating of MovieLens-100K; seconds on a laptop",
    task=RATINGS,
    config=RatingsConfig,
    presets={"default": RatingsConfig},
    estimate=estimate,
    claims=quality_claims(bounds),
    checks=check,
    build="recperf.workloads.ratings_build:PreparedRatings",
    datasets={"movielens": on_movielens},
)
