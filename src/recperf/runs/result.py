"""result.json, the one file of a run that other tools read; docs/result.md shows these fields and docstrings."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from ..data.split.record import Split
from ..jsonfile import Meta, Number, Struct, as_json, require
from ..learn.records import QualityLimit
from ..measure.records import Percentiles
from ..tasks import of

SCHEMA = 4

Metrics = dict[str, Number]
"""Those of the task. Of labels accuracy, auc, log_loss, calibration (predicted over observed positives),
calibration_error (over 15 bins) and, where rows inside the training time chose the epoch, validation_log_loss of these;
of next items hit_rate_10, ndcg_10, mrr and validation_ndcg_10."""


Baselines = Annotated[dict[str, Metrics], Meta(min_length=1)]
"""Metrics of simple rules on the same split: majority, item_bias, user_item_bias; popularity for events."""


class Evaluation(Struct):
    step: int
    """Steps done at the time."""
    epoch: int
    """Epochs done at the time."""
    metrics: Metrics


class TrialResult(Struct, omit_defaults=True):
    """The training with one seed; the content of trial-<seed>.json."""

    seed: int
    metrics: Metrics
    """After the last step or, where validation chose the epoch, after that."""
    best: Evaluation
    """The evaluation with the best value of the metric by which the task chooses the epoch or, where no rows choose
    it, of the leading metric: that is optimistic, because it is chosen on the validation rows."""
    stopped_early: int | None = None
    """Steps done when the target was met or validation no longer improved; None: training ran to its end."""


class Target(Struct):
    """What the user wanted to be reached; None: no bound."""

    beat: str | None
    """The baseline that had to be beaten in the leading metric of the task."""
    accuracy: Number | None
    auc: Number | None

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that were set, by metric."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name != "beat"}
        return {name: bound for name, bound in values.items() if bound is not None}


class Interval(Struct):
    """The middle 95 % of bootstrap replicates."""

    low: Number
    high: Number


class ModelInterval(Interval):
    """Of the model's leading metric; with several seeds, of their mean: a replicate draws the seeds too."""

    by: str
    """What a replicate draws with replacement: users or rows."""
    units: int
    """How many there are."""
    replicates: int


class Difference(Interval, omit_defaults=True):
    """A metric of the model less that of a baseline, or of another model, from replicates with the same users or
    rows."""

    metric: str
    baseline: str
    difference: Number
    below_zero: Number
    """Share of the replicates in which it is negative."""
    seeds: int
    """Seeds that were scored on the rows that the baseline was scored on."""
    standing: str
    """above, level or below: level where the interval includes 0."""
    units: int = 0
    """Users, or rows, that the replicates draw."""
    by: str = "users"
    """Whether they are users or rows."""
    values: tuple[Number, Number] = (0.0, 0.0)
    """Of the model, and of what it is compared with."""
    needed: int | None = None
    """How many of them would make the interval so narrow that only a difference without meaning could hide in it: 5 %
    of the AUC above 0.5, 10 % of NDCG@10. None where the interval excludes 0, or is that narrow."""


class CalibrationBin(Struct):
    """Scored rows with neighbouring predictions, a tenth of all."""

    predicted: Number
    """Mean predicted probability."""
    observed: Number
    """Share of positive labels."""
    rows: int


class Segment(Struct, omit_defaults=True):
    """Scored rows whose user, or item, has few training rows; or the rest."""

    name: str
    """new_users, rare_items or the_rest."""
    rows: int
    at_most: int
    """The most that the user, or item, of a row in the segment has; 0 for the rest."""
    auc: Number | None
    """The AUC, or the leading metric of a task that has another. None: the rows have one class only."""
    baselines: Metrics
    """The same of each baseline."""
    ranking: Metrics | None
    """Of the ranked rows in the segment; None: there are none."""
    counted: str = "training rows"
    """What `at_most` counts: training rows, or events before the row."""


class Ranking(Struct, omit_defaults=True):
    """Where the item of a held-out row lands among other items; ties count against it."""

    users: int
    """Ranked: of each the first positive held-out row."""
    catalogue: int
    """Items that compete, all of the dataset."""
    negatives: int
    """Drawn from the catalogue for each row; 0: all of it competes."""
    metrics: Metrics
    """hit_rate_10, ndcg_10, mrr: means over users and seeds."""
    baselines: dict[str, Metrics]
    interval: Interval
    """Of ndcg_10."""
    differences: tuple[Difference, ...]
    """Of ndcg_10, to every baseline, the best first."""
    baseline_intervals: dict[str, Interval] | None = None
    """Of ndcg_10."""
    repeats: bool | None = None
    """Whether items that a user already has compete: where over 5 % of the training rows repeat an item of their
    user."""
    meeting: str | None = None
    """What says how likely a user sees an item: candidates are ranked by that times the predicted probability of a
    positive label. None: by the latter alone."""
    lists: Metrics | None = None
    """Of each user's ten highest items: coverage, overlap, same_first and popularity; None where not all items
    compete."""
    split: str | None = None
    """Of next items, which are ranked: leave-one-out or time."""
    one_ms: Percentiles | None = None
    """The time in which the model scores all items for one user and lists the ten highest; None: not measured."""


class Quality(Struct, omit_defaults=True):
    """How good the model is on the validation rows after the last step."""

    metrics: Metrics
    """Mean over the seeds."""
    spread: Metrics
    """Sample standard deviation over the seeds; empty with one seed."""
    seeds: list[TrialResult]
    target: Target
    met: bool
    """Whether the mean metrics meet every bound of the target, as they do without one; a baseline to beat, by more than
    the interval of the difference."""
    baselines: dict[str, Metrics]
    """Metrics of simple rules on the same split."""
    left_out: tuple[str, ...] = ()
    """Baselines for which there was no time: they would have taken longer than the training and
    `baseline_seconds`."""
    interval: ModelInterval | None = None
    """Of the leading metric of labels; None for more than 20 million rows."""
    baseline_intervals: dict[str, Interval] | None = None
    differences: tuple[Difference, ...] = ()
    """Of the leading metric of labels, to every baseline, the best first."""
    probabilities: tuple[Difference, ...] = ()
    """Of the log loss and of the calibration error, to the baseline with the lowest log loss: more AUC may come with a
    loss there. Of a task that leads with another metric, of the others that have replicates, to the best in the first
    of them."""
    segments: tuple[Segment, ...] = ()
    calibration: tuple[CalibrationBin, ...] = ()
    """Means over the seeds."""
    ranking: Ranking | None = None
    not_ranked: str | None = None
    """Why there is no ranking."""
    limit: QualityLimit | None = None
    """What limits it; None in runs of earlier versions, of several ranks and with an MLPerf log."""
    warnings: tuple[str, ...] = ()
    """Reasons to doubt the metrics."""


class Throughput(Struct):
    """Samples over the wall time between moments at which the device was idle."""

    samples_per_s: Number
    samples: int
    steps: int
    seconds: Number


class Overall(Throughput):
    """From the first step to the end, of all processes and seeds; its parts sum to `seconds`."""

    steady_s: Number
    warmup_s: Number
    evaluation_s: Number
    save_s: Number
    """While training waited."""
    shuffle_s: Number
    """Before the first step of epochs; part of the warm-up and of the steady time."""


class Waited(Struct):
    """The time that the user waited until the result, in all processes of the run that were not killed; its parts add
    up to `seconds`."""

    seconds: Number
    training_s: Number
    """Steps, evaluations and saves."""
    baselines_s: Number
    scoring_s: Number
    """Intervals and rankings of the trained models."""
    measuring_s: Number
    """What limits a step, and the ceilings of the machine where they were measured."""
    other_s: Number
    """Such as imports, reading the data and making the model."""


class Performance(Struct, omit_defaults=True):
    """How fast training was."""

    device: str
    """cpu, or the name of the GPU."""
    settings: dict[str, str]
    """What was chosen for speed, and why."""
    steady: Throughput | None
    """Warm-up, evaluations and saves excluded; None: nothing was trained."""
    overall: Overall | None
    """Everything included."""
    step_ms: Percentiles | None
    """Time of a training step, data included and warm-up excluded; None: too few steps."""
    difference: str | None
    """Why steady throughput is more than 10 % from a batch per median step; None: it is not."""
    budget: dict[str, Number] | None
    """Share of each part in a step, sums to 1, from profile.json."""
    waited: Waited | None = None
    device_bytes: int | None = None
    """Peak memory that tensors took of the GPU of rank 0 until the end of training; None on a CPU."""
    mfu: Number | None = None
    """Counted FLOPs at the steady throughput over the peak of this machine; None: not measured for this
    precision and number of threads."""


class Data(Struct, omit_defaults=True):
    """What the model was trained on; the content of data.json."""

    name: str
    digest: str
    """SHA-256 of the content."""
    rows: int
    train_rows: int
    valid_rows: int
    split: str
    synthetic: bool
    baseline_rows: int | None = None
    """Training rows, at equal distances, that the baselines were fitted on; only if not all were."""
    chosen_rows: int | None = None
    """Those of them on which gradient boosting chose its columns and rounds; only if not all did."""
    skipped: dict[str, int] | None = None
    """Lines of a log that were left out, by reason; only if there are any."""
    held_out: Split | None = None
    """What is held out of a dataset, which its split or an option of the run decided; None for other data, and for
    runs of earlier versions."""
    held_out_from: int | None = None
    """With times: the second before which everything is trained on and nothing is scored; of leave-one-out that of
    the newest event. None for splits that are not by time."""
    features: list[str] | None = None
    """Names of the numbers that were computed from ratings: a model trained on others cannot read them."""

    @property
    def held_out_text(self) -> str:
        """What is held out, in a line."""
        rows = f"{self.split}: {self.valid_rows:,} of {self.rows:,} rows"
        return rows if self.held_out is None else self.held_out.text

    def divided_as(self, earlier: Data) -> bool:
        """Whether the same is held out as in the data of an earlier process, which may not have recorded what."""
        if self.held_out is None:
            return True
        if earlier.held_out is not None:
            return self.held_out.digest == earlier.held_out.digest
        return (self.train_rows, self.valid_rows) == (earlier.train_rows, earlier.valid_rows)


class Change(Struct, omit_defaults=True):
    """A config field that differs from what a run was started with."""

    field: str
    was: Any
    now: Any
    when: str = ""
    """The time at which config.json recorded it."""
    after_step: int | None = None
    """In a result, the last step with the old value; 0: no step of this seed had it; None: all steps of every seed."""
    seed: int | None = None

    @property
    def text(self) -> str:
        return f"{self.field} is {self.now!r}; this run has {self.was!r}"


class RowCounts(Struct):
    """What became of the rows of a kind of ids when a run started from another."""

    taken: int
    """Of ids in both datasets: they start with the weights of the other run."""
    without_events: int
    """Of ids that only the other dataset has: they start with its weights too."""
    new: int
    """Of ids that only this dataset has, and of those that were forgotten."""
    forgotten: int
    """Of ids without an event for the stated time: dropped, or new again where this dataset has them."""


MOST_KINDS = 6
"""Counts of more kinds of ids than these are added up where they are printed."""


class StartedFrom(Struct):
    """The run whose weights this one started from; the content of start.json."""

    run: str
    """Name of its folder."""
    seed: int
    checkpoint: str
    digest: str
    """SHA-256 of the checkpoint's manifest."""
    forget_days: int
    rows: dict[str, RowCounts]
    """What became of the rows, by kind of id."""
    rows_digest: str
    """SHA-256 of the list of matched rows in the run's folder `start`."""
    trained_until: int | None = None
    """The second until which it, or a run that it started from, was trained; None: not known."""
    held_out_from: int | None = None
    """The second from which on this run scores."""

    @property
    def overlap(self) -> str:
        """A warning where the weights may know what is scored."""
        if self.trained_until is None or self.held_out_from is None or self.held_out_from >= self.trained_until:
            return ""
        # A column of times may count something else.
        days = (datetime.fromtimestamp(min(at, 1 << 37), UTC).date() for at in (self.trained_until, self.held_out_from))
        until, begin = days
        return (
            f"{self.run} was trained on data until {until}, this run scores data from {begin} on: its weights may know "
            "what is scored, so that results may be too good"
        )

    @property
    def text(self) -> str:
        rows = self.rows
        if len(rows) > MOST_KINDS:
            sums = (sum(getattr(one, name) for one in rows.values()) for name in RowCounts.__struct_fields__)
            rows = {f"{len(rows)} columns": RowCounts(*sums)}
        parts = [
            f"{role} {counts.taken:,} taken over, {counts.without_events:,} without events, {counts.new:,} new"
            + (f", {counts.forgotten:,} forgotten" if self.forget_days else "")
            for role, counts in rows.items()
        ]
        warned = [self.overlap] if self.overlap else []
        return f"{self.run}, {self.checkpoint}: {'; '.join([*parts, *warned])}"


class Verified(Struct):
    """How much of the data was compared with its digests: for more than that, a result does not vouch."""

    bytes: int
    of: int
    """All bytes that the digest of the data stands for."""


class Provenance(Struct, omit_defaults=True):
    """Where the result comes from."""

    commit: str | None
    """Commit of the checkout; None outside one."""
    dirty: bool | None
    """Whether the checkout had uncommitted changes."""
    packages: dict[str, str]
    machine: str
    """Fingerprint of the facts in machine.json."""
    seed: int
    """First training seed."""
    data_digest: str
    command: list[str]
    """Command line of the process that finished the run."""
    started: str
    ended: str
    resumes: int
    changes: tuple[Change, ...] = ()
    """Only if there are any."""
    started_from: StartedFrom | None = None
    """Only of a run that started from another."""
    data_verified: Verified | None = None
    """By the process that finished the run; only for data in files that are verified as they are read."""


class Result(Struct):
    schema: int
    workload: str
    run: str
    """Name of the run's folder."""
    quality: Quality
    performance: Performance
    data: Data
    provenance: Provenance
    task: str = ""
    """What the workload predicts: click-labels, event-labels or next-item. It says which metrics there are, and which
    leads."""

    def __post_init__(self) -> None:
        self.task = self.task or of(self.quality.metrics).name

    def keys(self) -> Iterator[str]:
        return iter(self.__struct_fields__)

    def __getitem__(self, name: str) -> Any:
        """The value of a field as result.json has it: `result["quality"]["metrics"]` and `dict(result)` work too."""
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return as_json(getattr(self, name))


def checked(result: Result) -> dict[str, Any]:
    """The result as JSON, which must fit its declaration."""
    value: dict[str, Any] = as_json(result)
    require(value, Result, Path("result.json"), what="would not fit its declaration")
    return value
