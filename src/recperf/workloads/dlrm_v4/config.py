"""dlrm-v4: HSTU on listening events, trained on windows in time order and scored on later ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...config import require, within
from ...data.config import EventSplitOptions
from ...data.events.kinds import DAY_S
from ...data.streaming.config import HistoryConfig, Leftover, WindowConfig
from ...data.streaming.features import CROSSES
from ...distributed.config import DistributedConfig
from ...distributed.ranks import current
from ...errors import ConfigError, notice_once
from ...execution.tables import require_table_memory, table_share
from ...execution.workload import HASHED, Estimate, TrialsConfig, Workload, quality_claims
from ...measure.cost import FLOAT
from ...models.dlrm_v4 import config as models
from ...models.dlrm_v4.config import DLRMv4Config
from ...models.dlrm_v4.cost import full_load, step
from ...models.dlrm_v4.memory import memory
from ...models.tiers.config import TablesConfig
from ...ops.table_rules import RULES
from ...runs.mlperf.log import SubmissionConfig
from ...tasks import BIASES, EVENT_LABELS
from ...train.config import GraphTrainConfig, SparseTrainConfig, TargetConfig

if TYPE_CHECKING:
    from ...data.datasets import Dataset
    from ...data.events.store import EventStore
    from ...data.split.events import EventSplit

ROLES = {
    "item_id": "items",
    "artist_id": "first group",
    "album_id": "second group",
    "uid": "users",
    **dict.fromkeys(CROSSES, HASHED),
}
"""The ids of each table's rows; own events have groups of items in place of artists and albums."""
SMALLER = "smaller tables (--model.row-scale), a shorter --model.hstu.max-length, or a smaller --train.batch-size"


@dataclass(frozen=True, kw_only=True)
class EventsConfig(EventSplitOptions):
    path: Path | None = None
    """Folder of an event store or of a cache of the MLPerf reference; default: the embedded synthetic events."""
    split: Literal["windows", "time", "leave-one-out"] | None = None  # type: ignore[assignment]
    """What is held out: windows, the last ones of time or those that data.holdout-first and -windows name; time,
    everything from a boundary on; or leave-one-out, each user's last event. Default: of imported events as their split
    says, of others windows."""
    events: int = 300_000
    """Approximate number of embedded synthetic events."""
    history: HistoryConfig = field(default_factory=HistoryConfig)
    windows: WindowConfig = field(default_factory=WindowConfig)
    holdout_first: int | None = None
    """First hold-out window, before which all are trained on; default: the hold-out is at the end."""
    holdout_windows: int = 1
    """Number of hold-out windows, which are scored and never trained on."""
    validate: bool = False
    """With a split that is not windows: whether the part before what is held out chooses the epoch by its log loss and
    is not trained on. Otherwise the last epoch counts."""
    train_share: float = 1.0
    """Share of the anchors to train on, drawn at random, that is trained on; histories stay whole. A smaller share has
    part of the anchors of a larger one."""
    recent: float = 1.0
    """Share of the anchors to train on, the latest, that is trained on; needs times."""
    baselines: Literal["bias", "all"] = "bias"
    """Simple rules scored beside the model. bias: majority, item bias, user and item bias, popularity, fitted to the
    training windows. all: also running means, item-kNN, gradient boosting and a regression on all running rates, which
    read on through the hold-out as the model does."""
    leftover: Leftover = "carry"
    """Anchors that fill no batch at the end of a window: carry them into the next window's first batch, or drop them,
    as the MLPerf reference does."""
    workers: int = 1
    """Threads that prepare batches in advance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(1_000, self.events, 1 << 40, "data.events")
        if self.holdout_first is not None:
            within(1, self.holdout_first, 1 << 40, "data.holdout_first")
        within(1, self.holdout_windows, 1 << 20, "data.holdout_windows")
        asked, by_windows = self.split not in (None, "windows"), self.windows.train_share < 1 or self.names_windows
        require(not (asked and by_windows), "data.split", self.split, "windows with the windows or users to hold out")
        within(1, self.workers, 256, "data.workers")
        for name in ("train_share", "recent"):
            value = getattr(self, name)
            require(0.0 < value <= 1.0, f"data.{name}", value, "above 0, at most 1")

    @property
    def names_windows(self) -> bool:
        """Whether it says which windows are held out."""
        return self.holdout_first is not None or self.holdout_windows != EventsConfig.holdout_windows


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and what to evaluate; the end of training is always evaluated."""

    on: Literal["holdout", "next-window"] = "holdout"
    """What to score: the hold-out windows, or the first window that was not trained on yet."""
    every_windows: int = 0
    """Evaluate after every this many windows; 0: never."""
    every_share: float = 0.0
    """Evaluate each time this share of all training samples was trained on; 0: never."""
    skip_share: float | None = 0.0
    """Share of the training samples before the first evaluation; None follows the MLPerf rules."""
    batch_size: int = 0
    """Batch size of an evaluation; 0: that of training."""

    def __post_init__(self) -> None:
        within(0, self.every_windows, 1 << 40, "evaluate.every_windows")
        within(0.0, self.every_share, 1.0, "evaluate.every_share")
        within(0.0, self.skip_share or 0.0, 1.0, "evaluate.skip_share")
        within(0, self.batch_size, 1 << 24, "evaluate.batch_size")
        if self.every_windows and self.every_share:
            raise ConfigError(
                "evaluate.every_windows and evaluate.every_share are both set",
                where={"field": "evaluate.every_share"},
                fix="set one of them to 0",
            )

    def first_step(self, samples: int, batch_size: int) -> int:
        """Number of steps before the first evaluation."""
        if self.skip_share is not None:
            return math.ceil(self.skip_share * samples / batch_size)
        return math.ceil(mlperf_first_samples(batch_size) / batch_size)


def mlperf_first_samples(batch_size: int) -> int:
    """Samples before the first evaluation that the MLPerf rules allow with this global batch size."""
    return (4480 * batch_size + 135_331_840) // 3


@dataclass(frozen=True, kw_only=True)
class HistoryTrainConfig(GraphTrainConfig, SparseTrainConfig):
    """Adam (0.95, 0.999) for dense parameters, by default row-wise Adagrad for tables; after a linear warm-up rates
    are constant or fall."""

    epochs: int = 1
    """Passes over the training windows."""
    batch_size: int = 64
    """Samples per step."""
    learning_rate: float = 3e-3
    """Learning rate of Adam after warm-up."""
    rise: float = 0.1
    """Warm-up as a share of all steps; used if warmup_steps is 0."""
    warmup_steps: int = 0
    """Warm-up steps; 0: the share `rise` of all steps."""
    table_learning_rate: float = 0.1
    """Learning rate of the tables after warm-up."""
    final_rate: float = 1.0
    """Share of both learning rates that is left at the last step: after warm-up they fall linearly; 1: constant."""
    clip: float = 1.0
    """Maximum norm of the dense gradient; 0: no clipping."""
    weight_decay: float = 0.0
    """AdamW weight decay of the dense parameters; 0, as in the benchmark: Adam."""
    table_weight_decay: float = 0.0
    """Must be 0: table rows have no weight decay."""
    checkpoint_windows: int = 0
    """Save a checkpoint after every this many windows; 0: never."""
    deterministic: bool = False
    """On a GPU: bit-equal repeats and resumes, by slower kernels where others vary. On a CPU they always are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(0, self.warmup_steps, 1 << 40, "train.warmup_steps")
        within(0, self.checkpoint_windows, 1 << 40, "train.checkpoint_windows")
        within(0.0, self.final_rate, 1.0, "train.final_rate")
        require(self.table_weight_decay == 0, "train.table_weight_decay", self.table_weight_decay, "0")


@dataclass(frozen=True, kw_only=True)
class DLRMv4WorkloadConfig(TrialsConfig):
    data: EventsConfig = field(default_factory=EventsConfig)
    model: DLRMv4Config = field(default_factory=models.laptop)
    train: HistoryTrainConfig = field(default_factory=HistoryTrainConfig)
    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)
    mlperf: SubmissionConfig = field(default_factory=SubmissionConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distributed.require_tables(self.model.tables)
        longest, room, history = self.data.history.longest, self.model.max_history, self.data.history.length
        evaluated, optimizer = self.evaluate.every_windows or self.evaluate.every_share, self.train.table_optimizer
        next_window = self.evaluate.on == "next-window"
        again, divided = next_window and self.train.epochs > 1, self.data.split in ("time", "leave-one-out")
        fits = f"histories of at most {room:,} events: model.hstu.max_length less {self.model.context_tokens} context "
        for holds, name, value, allowed in (
            (longest <= room, "data.history.length", history, f"{fits}tokens and the candidate"),
            (not (self.train.evaluate_steps and evaluated), "train.evaluate_steps", self.train.evaluate_steps,
             "0 if evaluate.every_windows or every_share is set"),
            (not self.mlperf.log or self.seeds == 1, "seeds", self.seeds,
             "1 with mlperf.log: a log describes one training"),
            (not self.mlperf.log or optimizer == "rowwise-adagrad", "train.table_optimizer", optimizer,
             "rowwise-adagrad with mlperf.log, as the benchmark prescribes"),
            (not (next_window and divided), "evaluate.on", self.evaluate.on, "holdout unless data.split is windows"),
            (not again, "train.epochs", self.train.epochs,
             "1 with evaluate.on next-window: a second epoch has already trained on it"),
        ):  # fmt: skip
            require(holds, name, value, allowed)


def laptop() -> DLRMv4WorkloadConfig:
    """Embedded events and a small model: trains in minutes on a CPU. Windows are shuffled, since unshuffled a batch
    of this size has one user. One thread: operators this small do not gain from a second one."""
    events = EventsConfig(
        events=160_000,
        history=HistoryConfig(length=36, scan=400),
        windows=WindowConfig(seconds=10 * DAY_S, min_history=20, shuffle=1.0),
    )
    train = HistoryTrainConfig(batch_size=128, learning_rate=6e-3, table_learning_rate=0.05, rise=0.02, threads=1)
    return DLRMv4WorkloadConfig(data=events, model=models.laptop(), train=train)


def gpu() -> DLRMv4WorkloadConfig:
    """The published model with 40 GB of tables, for one large GPU; the embedded events grown to 60 million."""
    train = HistoryTrainConfig(batch_size=1024, learning_rate=1e-3, table_learning_rate=1e-2)
    return DLRMv4WorkloadConfig(data=EventsConfig(events=60_000_000, workers=8), model=models.gpu(), train=train)


def mlperf() -> DLRMv4WorkloadConfig:
    """The published sizes and rates; the tables need many devices, or lie in host memory or files."""
    train = HistoryTrainConfig(
        batch_size=1024,
        learning_rate=1e-6,
        table_learning_rate=1e-6,
        warmup_steps=24_000,
        stop_at_target=True,
    )
    return replace(
        gpu(),
        data=EventsConfig(events=60_000_000, workers=8, leftover="drop"),
        model=models.mlperf(),
        train=train,
        evaluate=EvaluationConfig(every_share=0.001, skip_share=None),
        target=TargetConfig(beat="none", auc=0.75),
    )


def on_events(config: DLRMv4WorkloadConfig, dataset: Dataset) -> DLRMv4WorkloadConfig:
    """The config for the events of a store, or for the embedded ones. The default preset follows the data; another
    config gets only the path."""
    if dataset.folder is None or config != laptop():
        return replace(config, data=replace(config.data, path=dataset.folder, boundary=None))
    return following(dataset.folder)


def following(path: Path) -> DLRMv4WorkloadConfig:
    """The laptop's sizes and a recipe for own events: sizes follow the data, and what a small log teaches is visible to
    the model from its first step."""
    from ...data.known.event_files import open_events
    from . import own_data

    config, store = laptop(), open_events(path)
    if (own := own_data.groups(store)) is not None:
        first, every = own.columns
        read = first if first == every else f"the first value of {first} and all values of {every}"
        notice_once(f"of items dlrm-v4 reads {read}")
    history, rates = own_data.history(store), own_data.rates_fit(store)
    data = replace(
        config.data, path=path, history=history, windows=own_data.windows(store),
        validate=True, baselines="all" if rates else "bias",
    )  # fmt: skip
    hstu = replace(
        config.model.hstu, max_length=history.longest + config.model.context_tokens + 1, dropout=own_data.DROPOUT
    )
    model = replace(
        config.model, hstu=hstu, rates_hidden=32 if rates else 0, rows=own_data.rows(store, config.model),
        token_scale=1.0, position_std=1.0, recent=own_data.RECENT, input_dropout=own_data.DROPOUT,
    )  # fmt: skip
    train = replace(
        config.train, epochs=own_data.epochs(store), learning_rate=3e-3, table_learning_rate=0.1, final_rate=0.0,
        weight_decay=own_data.WEIGHT_DECAY,
    )  # fmt: skip
    # Scoring has no gradients to keep: in batches of a thousand it is twice as fast as in batches of training.
    evaluate = replace(config.evaluate, batch_size=1024)
    return replace(config, data=data, model=model, train=train, evaluate=evaluate)


def resolve(config: DLRMv4WorkloadConfig) -> DLRMv4WorkloadConfig:
    """With what decides the split of own events. A job for other machines may name events that are not here."""
    from ...data.known.event_files import open_events
    from ...data.split.record import with_split

    if config.data.path is None or not config.data.path.exists():
        return config
    split = split_of(open_events(config.data.path), config)
    data = replace(config.data, split="windows") if split is None else with_split(config.data, split)
    return replace(config, data=data)


def split_of(store: EventStore, config: DLRMv4WorkloadConfig) -> EventSplit | None:
    """The split of events; None where windows are held out."""
    from ...data.split.events import of_events

    data = config.data
    by_windows = data.names_windows or data.windows.train_share < 1 or config.evaluate.on == "next-window"
    if data.split == "windows" or (data.split is None and not data.given and (store.imported is None or by_windows)):
        return None
    return of_events(store, data)


def with_rows(config: DLRMv4WorkloadConfig) -> DLRMv4WorkloadConfig:
    """With rows for all ids of the events; users share a row, and crosses have theirs by a hash, as before."""
    from ...data.known.event_files import open_events
    from .own_data import with_groups

    assert config.data.path is not None
    store, rows = with_groups(open_events(config.data.path)), config.model.table_rows
    artists, albums = (int(ids.max(initial=0)) + 1 for ids in store.groups_IG.T)
    users = store.originals["users"].lines + 1 if rows["uid"] > 1 else 1
    ids = {"item_id": store.items, "artist_id": artists, "album_id": albums, "uid": users}
    model = replace(config.model, row_scale=1.0, rows=tuple({**rows, **ids}[name] for name in config.model.tables))
    return replace(config, model=model)


SMALL = 16
"""Up to this many output elements per resident GPU thread, a kernel takes about as long as its launch."""


def layer_numbers(config: DLRMv4WorkloadConfig, samples: int) -> int:
    """Numbers that the projection of a layer computes for a padded batch."""
    return samples * config.model.hstu.max_length * config.model.hstu.uvqk_width


def lacking_for_graph(config: DLRMv4WorkloadConfig, samples: int, threads: int | None) -> str:
    """The reason why a step of this many samples cannot run as a CUDA graph, or an empty text. `threads` is the number
    of threads that the GPU holds at once; None: any number."""
    model, numbers = config.model, layer_numbers(config, samples)
    if model.input_dropout or model.hstu.dropout:
        return "what dropout drops is computed on the host, from the number of the step"
    if model.hstu.attention_scale != "fixed":
        return "attention is scaled by the longest row of a batch"
    if config.train.graph == "auto" and threads is not None and numbers > SMALL * threads:
        return f"a layer computes {numbers:,} numbers, more than {SMALL} for each thread of this GPU"
    if RULES[config.train.table_optimizer].counts:
        return f"rows fill up the batch, and {config.train.table_optimizer} changes those without a gradient"
    return ""


def estimate(config: DLRMv4WorkloadConfig) -> Estimate:
    """Counts a step whose rows all have the maximum length."""
    model, load = config.model, full_load(config.model, config.train.batch_size)
    state = table_state(config)
    return Estimate(
        parameters={"tables": model.table_parameters, **model.part_parameters},
        table_bytes=FLOAT * model.table_parameters,
        step=step(model, [load], state=state),
        memory=memory(model, [load], state=state),
        state_bytes=FLOAT * state * sum(model.table_rows.values()),
        table_rows=sum(model.table_rows.values()),
    )


def table_state(config: DLRMv4WorkloadConfig) -> int:
    """Numbers of optimizer state that a row has."""
    return RULES[config.train.table_optimizer].state_width(config.model.table_dim)


def require_room(config: DLRMv4WorkloadConfig) -> None:
    share = table_share(DLRM_V4.planned(config), config.distributed, on_host=True)
    more = current().reduction_bytes(config.model.dense_parameters)
    require_table_memory(config.tables, estimate(config), share=share, more=more, fix=SMALLER)


def bounds(config: DLRMv4WorkloadConfig, *, neighbours: bool = True) -> dict[str, Any]:
    """Quality to reach; large stores have no `neighbours`, and so no item-kNN."""
    running = ("running_means", "gradient_boosting", "rates_regression", *(["item_knn"] if neighbours else ()))
    rules = (*BIASES, "popularity", *(running if config.data.baselines == "all" else ()))
    return config.target.bounds(*(rules if config.data.path is None else ("best", *rules)))


DLRM_V4 = Workload(
    name="dlrm-v4",
    summary="HSTU on listening events (MLPerf's DLRMv4); trained on the past and scored on the future",
    task=EVENT_LABELS,
    config=DLRMv4WorkloadConfig,
    presets={"laptop": laptop, "gpu": gpu, "mlperf": mlperf},
    estimate=estimate,
    claims=quality_claims(bounds),
    checks="recperf.workloads.dlrm_v4.data:check",
    build="recperf.workloads.dlrm_v4.build:PreparedHistories",
    plan="recperf.workloads.dlrm_v4.plan:planned",
    plan_preset="mlperf",
    datasets={"events": on_events},
    serve="recperf.workloads.dlrm_v4.serve:ServedHistories",
    id_tables={f"tables.{name}{part}": role for name, role in ROLES.items() for part in ("", "_state")},
    resolve=resolve,
    with_rows=with_rows,
    id_names="recperf.workloads.dlrm_v4.own_data:group_names",
    submission="recperf.workloads.dlrm_v4.build:submission",
)
