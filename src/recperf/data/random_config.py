"""The configuration of synthetic bags of ids. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import require, within
from ..errors import ConfigError

MAX_IDS_PER_BAG = 1 << 16
MAX_DISTINCT = 8
"""Maximum ids per bag where repeats are dropped: each id is compared with all before it."""
KINDS = ("uniform", "gaussian", "zipf")


@dataclass(frozen=True, kw_only=True)
class RandomBagsConfig:
    ids: Literal["uniform", "gaussian", "zipf"] = "uniform"
    """Distribution of ids: uniform, around the middle of a table, or a power law."""
    ids_per_bag: int = 1
    """Maximum number of ids in a bag; where a table has fewer rows, its number of rows is the maximum."""
    fixed: bool = False
    """Give every bag its maximum length. Otherwise its length is round(max(1, u * maximum)), u uniform in [0, 1)."""
    ids_per_feature: tuple[int, ...] = ()
    """Maximum number of ids in a bag, feature by feature, in place of ids_per_bag."""
    distinct: bool = False
    """Drop repeated ids of a bag, which shortens it; only where no bag has more than 8 ids."""
    exponent: float = 1.05
    """With ids zipf: the k-th most popular id has a share proportional to k to the minus this."""
    mean: float = 0.5
    """With ids gaussian: the mean, as a share of the table."""
    deviation: float = 0.15
    """With ids gaussian: the standard deviation, as a share of the table; ids outside become its first or last."""
    batches: int = 100
    """Batches per epoch."""
    held_out_batches: int = 8
    """Batches for evaluation, never trained on."""

    def __post_init__(self) -> None:
        require(self.ids in KINDS, "data.ids", self.ids, ", ".join(KINDS))
        within(1, self.ids_per_bag, MAX_IDS_PER_BAG, "data.ids_per_bag")
        for index, longest in enumerate(self.ids_per_feature):
            within(1, longest, MAX_IDS_PER_BAG, f"data.ids_per_feature.{index}")
        within(0.01, self.exponent, 20.0, "data.exponent")
        within(-10.0, self.mean, 10.0, "data.mean")
        within(0.0, self.deviation, 1000.0, "data.deviation")
        within(1, self.batches, 1 << 30, "data.batches")
        within(1, self.held_out_batches, 1 << 20, "data.held_out_batches")

    def max_ids(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """The maximum number of ids in a bag of each feature, for tables with these rows."""
        requested = self.ids_per_feature or (self.ids_per_bag,) * len(rows)
        require(
            len(requested) == len(rows),
            "data.ids_per_feature",
            self.ids_per_feature,
            f"empty, or one number for each of the {len(rows)} features",
        )
        longest = tuple(min(ids, table) for ids, table in zip(requested, rows))
        if self.distinct and max(longest) > MAX_DISTINCT:
            raise ConfigError(
                f"data.distinct is set, but a bag may have {max(longest)} ids; at most {MAX_DISTINCT} can be compared",
                where={"field": "data.distinct"},
                fix=f"--data.no-distinct, or --data.ids-per-bag {MAX_DISTINCT}",
            )
        return longest
