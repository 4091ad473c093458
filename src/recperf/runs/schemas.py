"""The files of a run that are read back, apart from result.json (see `result.py`): their declared content, and the
events of its log, events.jsonl, one JSON object per line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec import field

from .. import jsonfile
from ..config import ConfigValues
from ..errors import DataError
from ..jsonfile import Count, Number, Problem, Struct, decode, fit
from ..learn.records import QualityEvidence
from ..measure.records import Percentiles
from .result import CalibrationBin, Change, Evaluation, Metrics

T = TypeVar("T")


class SavedConfig(Struct, omit_defaults=True):
    """config.json."""

    schema: int
    workload: str
    config: ConfigValues
    changed: tuple[Change, ...] = ()
    """Fields that were changed on purpose when the run was resumed."""
    task: str = ""
    """What the workload predicts; empty in a profile, and in runs from before they named it."""


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
    waited: dict[str, Number] = field(default_factory=dict)
    """Seconds that the user waited, by phase, over the processes of the run."""


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


class SampledRanking(Struct, omit_defaults=True):
    metrics: Metrics
    segments: dict[str, Metrics]
    ndcg_replicates: list[Number]
    lists: Metrics = field(default_factory=dict)
    """What the first items of different users have in common, and how popular these are."""
    ranks: list[Count] = field(default_factory=list)
    """Of the held-out items of the users in `keys`, from 1 on."""
    one_ms: Percentiles | None = None
    """Of a model: the time to score all items for one user."""


class SegmentFacts(Struct):
    rows: int
    at_most: int
    """Training rows, or what `counted` says, that the user, or the item, of each row has at most."""
    counted: str = "training rows"


class RankingFacts(Struct, omit_defaults=True):
    users: int
    catalogue: int
    negatives: int
    baselines: dict[str, SampledRanking] = field(default_factory=dict)
    repeats: bool | None = None
    """Whether items that a user already has compete."""
    meeting: str | None = None
    """What says how likely users see items; None: candidates are ranked by predicted labels alone."""
    split: str | None = None
    """Of a workload that ranks held-out items: leave-one-out or time."""
    keys: list[Count] = field(default_factory=list)
    """A number for each ranked user with the held-out item, made of the ids in the user's file; at most 10,000."""


class SampledScores(Struct, omit_defaults=True):
    """The quality of a baseline or of a trained seed, and of bootstrap replicates of the scored rows."""

    leading: Number | None = None
    """The leading metric of the task; None where nothing is labelled."""
    replicates: dict[str, list[Number]] = field(default_factory=dict)
    """Of the leading metric and of others, by their names."""
    segments: Metrics = field(default_factory=dict)
    """The leading metric in segments of the rows."""
    rows_digest: str | None = None
    """Digest of the scored rows' labels and users; None for baselines, whose rows scores.json names."""
    calibration: tuple[CalibrationBin, ...] = ()
    ranking: SampledRanking | None = None


class StrongestFeature(Struct):
    name: str
    auc: Number


class SavedScores(Struct, omit_defaults=True):
    """scores.json, with a digest of itself."""

    rows: int
    rows_digest: str
    by: str
    """What the replicates draw: users or rows."""
    units: int
    """The number of users or rows."""
    baselines: dict[str, SampledScores] = field(default_factory=dict)
    seeds: dict[str, SampledScores] = field(default_factory=dict)
    segments: dict[str, SegmentFacts] = field(default_factory=dict)
    ranking: RankingFacts | None = None
    not_ranked: str | None = None
    """Why nothing was ranked."""
    strongest_feature: StrongestFeature | None = None
    left_out: tuple[str, ...] = ()
    """Baselines for which there was no time."""


LEARNING = "learning.json"


class SavedLearning(Struct):
    """learning.json: what each training showed of what limits its quality."""

    seeds: dict[str, QualityEvidence] = field(default_factory=dict)


class Machine(Struct):
    """machine.json."""

    fingerprint: str
    caches: dict[str, Count] | None = None


def read_file(
    path: Path,
    kind: type[T],
    schema: int | None = None,
    *,
    what: str = "does not fit its description",
    fix: str | None = None,
    named: bool = False,
) -> T:
    """The content of a JSON file as `kind`; one of another schema, or that recperf did not write, is refused. Fields
    that a later version added are ignored. A file that the user has `named` may be a link or a pipe."""
    value = jsonfile.read(path, named=named)
    if schema is not None:
        require_schema(path, value, schema)
    return jsonfile.require(value, kind, path, what=what, fix=fix)


def require_schema(path: Path, value: Any, schema: int) -> None:
    """Refuse a file of another version, or one that recperf did not write."""
    if not isinstance(value, dict) or "schema" not in value:
        raise DataError(f"{path.name} is not a file that recperf wrote: it has no schema", where={"file": path})
    if value["schema"] != schema or isinstance(value["schema"], bool):
        what, fix = (
            f"{path.name} has schema {value['schema']!r}; this recperf reads {schema}",
            "use the version of recperf that wrote it",
        )
        if path.name == "result.json":
            fix += f", or train again: recperf run --config {shlex.quote(str(path.parent))}"
        raise DataError(what, where={"file": path}, fix=fix)


class BadEvent(Exception):
    """A line that is not an event."""

    def __init__(self, line: int, problem: object) -> None:
        super().__init__(f"events.jsonl line {line} is not an event: {problem}")
        self.line = line


class Event(Struct, kw_only=True):
    """The fields that every event has. Events about one training name its seed."""

    kind: str
    seed: int | None = None
    step: int = 0
    """Steps done at the time."""


class Step(Event, kw_only=True):
    """A training step; the loss and the norm are None if they were not finite."""

    seed: int
    step: int
    loss: Number | None
    gradient_norm: Number | None = None
    """Of the dense gradient, over all ranks and before clipping; in some steps only, with the learning rate."""
    learning_rate: Number | None = None


class Scores(Event, kw_only=True):
    """An evaluation, or the metrics of the training batches since the one before; in the log the metrics are fields of
    the event itself."""

    seed: int
    step: int
    metrics: dict[str, Any]
    epoch: int | None = None
    split: str | None = None


class Timing(Event, kw_only=True):
    """The wall time of a stretch of training, or of an evaluation or a save, which have no steps."""

    seed: int
    step: int
    part: str
    """warmup, steady, evaluation or save."""
    seconds: Number
    steps: int = 0
    samples: int = 0
    batch: int = 0
    """Samples of the largest batch."""
    shuffle_s: Number = 0.0
    """Seconds before the first step of epochs."""
    other_work: Number | None = None
    """Share of the cores that others took meanwhile."""
    step_ms: tuple[Number, ...] = ()
    """The time of every step, without the warm-up."""


class MemoryEvent(Event, kw_only=True):
    """What tensors took of the GPU so far."""

    device_bytes: Count


class ChangeEvent(Event, kw_only=True):
    """A config field that differs from then on; `step` is the last step before."""

    seed: int
    step: int
    field: str
    was: Any
    now: Any


KINDS: dict[str, type[Event]] = {
    "step": Step, "metric": Scores, "training": Scores, "timing": Timing, "change": ChangeEvent, "memory": MemoryEvent
}  # fmt: skip
ABOUT = ("kind", "t", "seed", "step", "epoch", "split")
"""Fields of `Scores` in the log that say where and when; the others are metrics."""


def event_of(value: Any) -> Event | Problem:
    """A parsed line of the log, validated by its kind."""
    kind = value.get("kind") if isinstance(value, dict) else None
    declared = KINDS.get(kind, Event) if isinstance(kind, str) else Event
    if declared is Scores:
        metrics = {name: value.pop(name) for name in list(value) if name not in ABOUT}
        value["metrics"] = metrics
    return fit(value, declared)


def parse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Every line of a log, validated by its kind."""
    for number, line in enumerate(lines, 1):
        try:
            event = event_of(decode(line))
        except ValueError as error:
            raise BadEvent(number, error) from None
        if isinstance(event, Problem):
            raise BadEvent(number, event)
        yield event
