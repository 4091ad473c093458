"""The declared content of the files of a run that are read back, apart from result.json (see `result.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import field

from ..config import ConfigValues
from ..errors import DataError
from ..jsonfile import Count, Number, Struct
from .result import CalibrationBin, Evaluation, Metrics


class SavedConfig(Struct, omit_defaults=True):
    """config.json."""

    schema: int
    workload: str
    config: ConfigValues
    changed: tuple[Change, ...] = ()
    """Fields that were changed on purpose when the run was resumed."""


class Change(Struct, omit_defaults=True):
    """A config field that differs from what a run was started with."""

    field: str
    was: Any
    now: Any
    when: str = ""
    """The time at which config.json recorded it."""

    @property
    def text(self) -> str:
        return f"{self.field} is {self.now!r}; this run has {self.was!r}"


class Progress(Struct, omit_defaults=True):
    """progress.json."""

    started: str
    resumes: int
    operators: dict[str, str] | None = None
    """The implementations that the finished trainings used."""
    ranks: int | None = None
    """The number of ranks that finished the last finished training."""
    saved: tuple[int, ...] | None = None
    """Seeds that have a checkpoint; a run whose checkpoints were lost must not start over in silence. None: not known,
    since progress.json was lost."""
    log: tuple[str, ...] = ()
    """The tools that its curves go to, as --log names them."""


class SavedPosition(Struct):
    epoch: Count
    batch: Count
    step: Count


class SavedState(Struct):
    """The state in a checkpoint; the tensors are in `trial` and `rng`."""

    position: SavedPosition
    history: list[Evaluation]
    contract: dict[str, Any]
    baselines: str | None
    event_bytes: Count
    event_digest: str
    mlperf: dict[str, Any] | None
    trial: dict[str, Any]
    rng: dict[str, Any]
    seed: int


class SampledRanking(Struct):
    metrics: Metrics
    segments: dict[str, Metrics]
    ndcg_replicates: list[Number]
    lists: Metrics = field(default_factory=dict)
    """What the first items of different users have in common, and how popular these are."""


class SampledUsers(Struct):
    users: int
    metrics: Metrics
    ndcg_replicates: list[Number]


class SegmentFacts(Struct):
    rows: int
    at_most: int
    """Training rows, or what `counted` says, that the user, or the item, of each row has at most."""
    counted: str = "training rows"


class RankingFacts(Struct):
    users: int
    catalogue: int
    negatives: int
    baselines: dict[str, SampledRanking]
    repeats: bool | None = None
    """Whether items that a user already has compete."""
    meeting: str | None = None
    """What says how likely users meet items; None: candidates are ranked by predicted labels alone."""
    split: str | None = None
    """Of a workload that ranks held-out items: leave-one-out or time."""


class SampledScores(Struct):
    """The quality of a baseline or of a trained seed, and of bootstrap replicates of the scored rows."""

    auc: Number | None
    """None where nothing is labelled."""
    auc_replicates: list[Number]
    segments: Metrics
    """The AUC in segments of the rows."""
    probability_replicates: dict[str, list[Number]] = field(default_factory=dict)
    """Of the log loss and of the calibration error."""
    rows_digest: str | None = None
    """Digest of the scored rows' labels and users; None for baselines, whose rows scores.json names."""
    calibration: tuple[CalibrationBin, ...] = ()
    ranking: SampledRanking | None = None
    within_users: SampledUsers | None = None


class StrongestFeature(Struct):
    name: str
    auc: Number


class Scores(Struct):
    """scores.json."""

    rows: int
    rows_digest: str
    by: str
    """What the replicates draw: users or rows."""
    units: int
    """The number of users or rows."""
    baselines: dict[str, SampledScores]
    seeds: dict[str, SampledScores]
    segments: dict[str, SegmentFacts]
    ranking: RankingFacts | None = None
    not_ranked: str | None = None
    """Why nothing was ranked."""
    strongest_feature: StrongestFeature | None = None
    seal: str | None = None
    """Digest of the other fields."""


class Machine(Struct):
    """machine.json."""

    fingerprint: str
    caches: dict[str, Count] | None = None


def require_schema(path: Path, value: Any, schema: int) -> None:
    """Refuse a file of another version, or one that recperf did not write."""
    if not isinstance(value, dict) or "schema" not in value:
        raise DataError(f"{path.name} is not a file that recperf wrote: it has no schema", where={"file": path})
    if value["schema"] != schema or isinstance(value["schema"], bool):
        what = f"{path.name} has schema {value['schema']!r}; this recperf reads {schema}"
        raise DataError(what, where={"file": path}, fix="use the version of recperf that wrote it")
