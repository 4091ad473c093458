"""Configs of datasets. Torch-free, so that `--help` and `show` answer at once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from ..config import require, within
from ..errors import ConfigError

MAX_IDS_PER_BAG = 1 << 16
MAX_DISTINCT = 8
"""Maximum ids per bag where repeats are dropped: each id is compared with all before it."""


SplitKind = Literal["time", "leave-one-out", "random", "last", "cold"]
SPLIT_FIELDS = ("split", "holdout", "boundary", "split_seed")
"""Fields of a split's options."""


def moment_of(text: str) -> int:
    """The microseconds since 1970 of a date, of a date with a time, or of a number of seconds."""
    try:
        return round(float(text) * 1e6)
    except (ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        require(False, "boundary", text, "a date such as 2026-03-01, also with a time, or seconds since 1970")
        raise
    since = moment.replace(tzinfo=moment.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return since // timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class EventSplitOptions:
    """What is held out of events; None: what the dataset's split says."""

    split: Literal["time", "leave-one-out"] | None = None
    """What is held out: time, all events from a boundary on, or leave-one-out, each user's last event. Default: that of
    the dataset, time where it has times."""
    holdout: float | None = None
    """Share that is held out: of the events or rows, or with split cold of the users. Default: the dataset's, 0.2."""
    boundary: str | None = None
    """With split time, in place of a share: the date (UTC) from which on everything is held out."""

    def __post_init__(self) -> None:
        require(self.holdout is None or 0.0 < self.holdout < 1.0, "holdout", self.holdout, "above 0 and below 1")
        if self.boundary is not None:
            moment_of(self.boundary)
            require(self.split in (None, "time"), "boundary", self.boundary, "none but with split time")

    @property
    def given(self) -> bool:
        """Whether anything is asked for."""
        return any(getattr(self, name, None) is not None for name in SPLIT_FIELDS)


@dataclass(frozen=True, kw_only=True)
class SplitOptions(EventSplitOptions):
    """What is held out of events, or of rows with a label."""

    split: SplitKind | None = None  # type: ignore[assignment]
    """What is held out: time, everything from a boundary on; of events also leave-one-out, each user's last event; of
    rows with a label also random rows, the last rows of each user, or cold, all rows of some users. Default: that of
    the dataset, time where it has times."""
    split_seed: int | None = None
    """Seed of the random and cold splits. Default: the dataset's, 42."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(0, self.split_seed or 0, 1 << 53, "split_seed")


@dataclass(frozen=True, kw_only=True)
class SplitConfig(SplitOptions):
    """How a run divides rows with a label."""

    validate: bool = False
    """Whether rows before the held-out ones choose the epoch by their log loss and are not trained on: the latest
    tenth or, with split random or without times, rows at equal distances. Otherwise the last epoch counts."""
    events: Path | None = None
    """Folder of the events that the rows were made of, which are what is divided; none: the rows are."""
    train_share: float = 1.0
    """Share of the training rows, drawn at random, that is trained on; with split cold of their users. A smaller share
    has part of the rows of a larger one."""
    recent: float = 1.0
    """Share of the training rows, the latest, that is trained on; needs times."""
    without: tuple[str, ...] = ()
    """Columns that the model does not see: each is constant. Listed categories, and numbers that no row lacks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train_share", "recent"):
            value = getattr(self, name)
            require(0.0 < value <= 1.0, f"data.{name}", value, "above 0, at most 1")

    @property
    def whole(self) -> bool:
        """Whether all training rows and columns are used."""
        return self.train_share == self.recent == 1.0 and not self.without

    def rows_split(self) -> SplitConfig:
        """How rows are divided, without where they are."""
        return SplitConfig(**{name: getattr(self, name) for name in SplitConfig.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class MovieLensConfig(SplitConfig):
    split: SplitKind | None = "random"
    """What is held out: random rows, the last of each user by time, all from a moment on (time), or all rows of users
    that never train (cold); of imported data what its split says."""
    holdout: float | None = 0.2
    """Share that is held out: of the rows, or with split cold of the users; of imported data what its split says."""
    split_seed: int | None = 42
    """Seed of the random and cold splits; separate from the training seed, so that repeats share a split."""
    source: Literal["auto", "files", "embedded", "clicks"] = "auto"
    """Source of the ratings: files (a folder or the downloaded copy), embedded (synthetic), clicks that `recperf data
    import --clicks` imported, or auto: files if there are any, else embedded."""
    path: Path | None = None
    """Folder with u.data, u.item and u.user, or of imported clicks; none means the copy that `recperf data get
    movielens-100k` downloaded."""
    embedded_seed: int = 7
    """Seed of the synthetic ratings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(0, self.embedded_seed, 1 << 53, "data.embedded_seed")
        require(
            not (self.source == "embedded" and self.path is not None),
            "data.path",
            str(self.path),
            "none when data.source is embedded",
        )
        require(self.path is not None or self.source != "clicks", "data.path", None, "the folder of data.source clicks")
        validated = self.source == "clicks" or not self.validate
        require(validated, "data.validate", self.validate, "off, or on with data.source clicks")
        require(self.whole or self.source == "clicks", "data.source", self.source, "clicks, to train on a part of them")

    @property
    def has_clicks(self) -> bool:
        """Whether the data is a dataset that `recperf data import --clicks` wrote."""
        return self.source == "clicks"


@dataclass(frozen=True, kw_only=True)
class DramDataConfig(MovieLensConfig):
    ids: Literal["uniform", "zipf", "movielens"] = "uniform"
    """Ids to look up: random ones from a large virtual space, uniform or Zipf-distributed, or those of MovieLens."""
    ids_per_bag: int = 32
    """Ids per feature and sample; MovieLens has 1."""
    id_space: int = 1_000_000_000
    """Size of the virtual id space."""
    exponent: float = 1.05
    """With ids zipf: the k-th most popular id has a share proportional to k to the power of minus this."""
    batches: int = 60
    """Batches per epoch of virtual ids."""
    held_out_batches: int = 8
    """Batches of virtual ids used for evaluation only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(1, self.ids_per_bag, 1 << 16, "data.ids_per_bag")
        require(
            self.ids != "movielens" or self.ids_per_bag == 1,
            "data.ids_per_bag",
            self.ids_per_bag,
            "1 with ids movielens",
        )
        require(1 <= self.id_space <= 1 << 40, "data.id_space", self.id_space, f"1 to {1 << 40}")
        within(0.01, self.exponent, 20.0, "data.exponent")
        within(1, self.batches, 1 << 30, "data.batches")
        within(1, self.held_out_batches, 1 << 20, "data.held_out_batches")


@dataclass(frozen=True, kw_only=True)
class RandomBagsConfig:
    """Synthetic bags of ids."""

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
