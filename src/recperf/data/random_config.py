"""The configuration of synthetic bags of ids, and profiles: files with the frequency of each id. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config import require, within
from ..errors import ConfigError, DataError
from ..files import write_atomic
from ..jsonfile import Struct, read
from ..jsonfile import require as require_kind

Counts = Mapping[str, Mapping[int, int]]
"""How often each id of each feature occurs."""

MAX_IDS_PER_BAG = 1 << 16
MAX_DISTINCT = 8
"""Maximum ids per bag where repeats are dropped: each id is compared with all before it."""
KINDS = ("uniform", "gaussian", "zipf", "replay")
MAX_COUNT = 1 << 53
"""Larger counts are not exact in JSON, where numbers are doubles."""
_FIX = "correct the file, or use data.random_config.write_profile"


class _Profile(Struct):
    """A JSON file of frequencies."""

    features: dict[str, list[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class RandomBagsConfig:
    ids: Literal["uniform", "gaussian", "zipf", "replay"] = "uniform"
    """Distribution of ids: uniform, around the middle of a table, a power law, or the frequencies of a profile."""
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
    profile: Path | None = None
    """With ids replay: a JSON file {"features": {name: [[id, count], ...]}}."""
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
        require(
            (self.profile is not None) == (self.ids == "replay"),
            "data.profile",
            str(self.profile),
            "a file with data.ids replay, unset otherwise",
        )
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


def write_profile(path: Path, counts: Counts) -> None:
    """Write a profile for `ids replay`."""
    features = {name: [[index, count] for index, count in ids.items()] for name, ids in counts.items()}
    write_atomic(path, (json.dumps({"features": features}) + "\n").encode())


def read_profile(path: Path, rows: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Read the frequencies of the ids of these features; ids of a feature with R rows are 0 to R - 1.

    Other features of the file are only checked for their format.
    """
    stored = require_kind(read(path, named=True), _Profile, path, what="is not a profile of ids", fix=_FIX)
    profile: dict[str, dict[int, int]] = {}
    for name, pairs in stored.features.items():
        counts, table = profile.setdefault(name, {}), rows.get(name)
        for place, (index, count) in enumerate(pairs):
            where = {"file": path, "feature": name, "entry": place}
            entry = f"id {index} of feature {name!r}"
            _check(index not in counts, f"{entry} occurs twice", where)
            _check(0 <= count <= MAX_COUNT, f"count {count} of {entry} is outside 0 to 2^53", where)
            _check(table is None or 0 <= index < table, f"{entry} is outside its table of {table} rows", where)
            counts[index] = count
    for name in rows:
        _check(any(profile.get(name, {}).values()), f"feature {name!r} has no id that occurs", {"file": path})
    return {name: profile[name] for name in rows}


def _check(holds: bool, problem: str, where: dict[str, object]) -> None:
    if not holds:
        raise DataError(problem, where=where, fix=_FIX)
