"""next-item: the next item of a user's sequence, ranked among all items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...config import require, within
from ...data.config import EventSplitOptions
from ...distributed.config import DistributedConfig
from ...errors import ConfigError
from ...execution.tables import require_table_memory
from ...execution.workload import Estimate, TrialsConfig, Workload, quality_claims
from ...measure.cost import FLOAT
from ...models.next_item.config import FULL_ON_GPU, NextItemConfig, memory, step
from ...models.tiers.config import TablesConfig
from ...ops.table_rules import RULES, TableRule
from ...tasks import NEXT_ITEM
from ...train.config import AnyTableOptimizer, TableTrainConfig, TrainConfig
from .own_data import has_gpu, settings_for, sizes_for

if TYPE_CHECKING:
    from ...data.datasets import Dataset
    from ...data.events.store import EventStore
    from ...data.next_item import NextItemData

SMALLER = "a smaller --train.batch-size, --model.dim or --model.max-length, or --tables.placement file"


@dataclass(frozen=True, kw_only=True)
class SequencesConfig(EventSplitOptions):
    """Sequences of items, and which of them are held out. With a split by time each user's first positive event from
    the boundary on is ranked; the embedded sequences are split leave-one-out."""

    path: Path | None = None
    """Folder of an event store; default: embedded sequences. In these the group of the next item follows from the
    last two."""
    seen: Literal["auto", "left-out", "kept"] = "auto"
    """Whether items of a user's history compete. auto: where over 5 % of the training events repeat an item."""
    horizon: float = 0.0
    """With split time: also predict what a user takes within so many days after the first held-out event, each item by
    itself, from the events before all of them. 0: the first one alone."""
    validation_users: int = 2000
    """Users, drawn at random, whose validation item chooses the epoch; 0: all."""
    test_users: int = 200_000
    """Users, drawn at random, whose test item is ranked; 0: all."""
    train_share: float = 1.0
    """Share of the training sequences, drawn at random, that is trained on. A smaller share has part of a larger
    one."""
    users: int = 4000
    """Users of the embedded sequences."""
    groups: int = 8
    """Groups of items in the embedded sequences."""
    group_items: int = 40
    """Items of each group in the embedded sequences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.path is not None or self.split != "time", "data.split", self.split, "leave-one-out without data")
        within(0.0, self.horizon, 1e6, "data.horizon")
        require(self.path is not None or not self.horizon, "data.horizon", self.horizon, "0 without data")
        within(0, self.validation_users, 1 << 40, "data.validation_users")
        within(0, self.test_users, 1 << 40, "data.test_users")
        require(0.0 < self.train_share <= 1.0, "data.train_share", self.train_share, "above 0, at most 1")
        within(10, self.users, 1 << 32, "data.users")
        within(2, self.groups, 1 << 12, "data.groups")
        within(1, self.group_items, 1 << 20, "data.group_items")


@dataclass(frozen=True, kw_only=True)
class FeaturedConfig(SequencesConfig):
    """The same, with features of items."""

    features: bool = True
    """Whether what is known of items, categories and ranges of numbers, is part of their vectors."""


@dataclass(frozen=True, kw_only=True)
class SequenceTrainConfig(TrainConfig):
    """The weights of the epoch with the best validation NDCG@10 count."""

    epochs: int = 100
    """Passes over the training sequences, at most."""
    batch_size: int = 128
    """Sequences in a step."""
    windows: Literal["last", "all"] = "last"
    """Of sequences longer than the model reads: train on the latest items, or on windows that cover all items."""
    evaluate_epochs: int = 1
    """Evaluate after every this many epochs, and after the last."""
    patience: int = 10
    """Stop after this many evaluations without a better validation NDCG@10; 0: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(1, self.evaluate_epochs, 1_000_000, "train.evaluate_epochs")


@dataclass(frozen=True, kw_only=True)
class NextItemTrainConfig(SequenceTrainConfig, TableTrainConfig):
    """AdamW (0.9, 0.98) with a constant rate."""

    learning_rate: float = 1e-3
    """Learning rate of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of the blocks."""
    table_weight_decay: float = 0.0
    """Weight decay of the embeddings of items and positions."""
    average_steps: int = 0
    """Evaluate and keep the mean of the weights over so many of the last steps, with adamw; 0: the weights of the last
    step."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """Precision of matrix products; weights and the softmax over items stay float32. bfloat16: of those in transformer
    blocks, the others as with tf32. auto: on a GPU bfloat16 with transformer blocks, else tf32; float32 on a CPU."""
    table_optimizer: Literal["auto", AnyTableOptimizer] = "auto"  # type: ignore[assignment]
    """adamw (0.9, 0.98) changes the embeddings of all items in every step; the others those that the step uses: with
    the sampled loss a few, with the full softmax all. auto: adam (0.9, 0.999) where tables.placement is host or file,
    else adamw."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(0, self.average_steps, 1 << 40, "train.average_steps")


@dataclass(frozen=True, kw_only=True)
class NextItemRunConfig(TrialsConfig):
    data: FeaturedConfig = field(default_factory=FeaturedConfig)
    model: NextItemConfig = field(default_factory=NextItemConfig)
    train: NextItemTrainConfig = field(default_factory=NextItemTrainConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distributed.require_copies("next-item models", rows=True)
        if self.distributed.sharding and (self.rule is not None or (self.model.items and not self.model.full_softmax)):
            what = "distributed.sharding is row, which needs the softmax over all items, and adamw for them"
            fix = "--model.loss full --train.table-optimizer adamw --tables.placement device"
            raise ConfigError(what, where={"field": "distributed.sharding"}, fix=fix)
        if self.train.precision == "bfloat16" and self.model.encoder == "hstu":
            what = "train.precision is bfloat16, which HSTU blocks do not have here"
            raise ConfigError(what, where={"field": "train.precision"}, fix="--train.precision tf32")
        placement, outside = self.tables.placement, self.tables.placement in ("host", "file")
        if outside and self.rule is None:
            what = f"tables.placement is {placement}, but adamw changes every item in every step"
            raise ConfigError(what, where={"field": "train.table_optimizer"}, fix="--train.table-optimizer adam")
        if outside and self.model.items and self.model.full_softmax:
            what = f"tables.placement is {placement}, but the full softmax uses all {self.model.items:,} items in "
            raise ConfigError(f"{what}every step", where={"field": "model.loss"}, fix="--model.loss sampled")

    @property
    def optimizer(self) -> AnyTableOptimizer:
        """The optimizer of the items."""
        optimizer, outside = self.train.table_optimizer, self.tables.placement in ("host", "file")
        return optimizer if optimizer != "auto" else "adam" if outside else "adamw"

    @property
    def rule(self) -> TableRule | None:
        """How the rows of items that a step uses are updated; None: all rows are, by adamw."""
        return RULES.get(self.optimizer)

    @property
    def low(self) -> bool:
        """Whether a GPU multiplies in bfloat16."""
        fits = self.model.encoder == "transformer" and self.train.precision in ("auto", "bfloat16")
        return fits and has_gpu(self.train.device)

    @property
    def averaged_steps(self) -> int:
        """Steps over which all weights are averaged. Where a step updates some rows of items only, the mean of the
        others would be of another time."""
        return self.train.average_steps if self.rule is None else 0

    @property
    def some_rows(self) -> bool:
        """Whether a step uses only some rows of items, so that the others can lie elsewhere."""
        return self.rule is not None and not self.model.full_softmax


def embedded(config: NextItemRunConfig) -> NextItemRunConfig:
    """With the items of the embedded sequences, which have no times."""
    items = config.data.groups * config.data.group_items
    return replace(config, model=replace(config.model, items=items, time_buckets=0))


def default() -> NextItemRunConfig:
    """Embedded sequences and a small model: trains in less than a minute on two cores."""
    model = NextItemConfig(
        encoder="transformer",
        dim=32,
        blocks=2,
        heads=2,
        head_dim=16,
        max_length=32,
        dropout=0.1,
        temperature=0.07,
        counts="on",
    )
    train = NextItemTrainConfig(epochs=15, batch_size=32, learning_rate=3e-3, patience=4)
    return embedded(NextItemRunConfig(model=model, train=train))


def on_events(config: NextItemRunConfig, dataset: Dataset) -> NextItemRunConfig:
    """The config for an event store. The default preset follows the data; another config gets its items only."""
    return sized(config, dataset, following if config == default() else None)


def following(store: EventStore) -> NextItemRunConfig:
    """A model for the events of a store."""
    from ...data.next_item import NextItemData

    return for_data(NextItemData.from_store(store))


def for_data(data: NextItemData) -> NextItemRunConfig:
    """The settings that follow from data; `with_sizes` sets the sizes, for the encoder and device that are chosen."""
    settings = settings_for(data)
    return NextItemRunConfig(model=NextItemConfig(**settings["model"]), train=NextItemTrainConfig(**settings["train"]))


def with_sizes(config: NextItemRunConfig, data: NextItemData) -> NextItemRunConfig:
    """With the usual sizes where none were set."""
    model = config.model
    if all((model.dim, model.blocks, model.heads, model.head_dim)):
        return config
    usual: dict[str, Any] = sizes_for(data, model.encoder, has_gpu(config.train.device))
    # A width that was set need not be a multiple of the usual one of a head.
    usual["head_dim"] = max(1, (model.dim or usual["dim"]) // (model.heads or usual["heads"]))
    return replace(config, model=replace(model, **{name: getattr(model, name) or one for name, one in usual.items()}))


def sized(
    config: NextItemRunConfig, dataset: Dataset, following: Callable[[EventStore], NextItemRunConfig] | None
) -> NextItemRunConfig:
    """The config for an event store, which `following` may derive from its events."""
    if dataset.folder is None:
        return config
    if following is not None:
        from ...data.known.event_files import open_events

        config = replace(following(open_events(dataset.folder)), data=config.data)
    buckets = NextItemConfig.time_buckets if config.start.run is None else config.model.time_buckets
    model = replace(config.model, items=0, time_buckets=buckets)
    return replace(config, data=replace(config.data, path=dataset.folder, boundary=None), model=model)


def resolve(config: NextItemRunConfig) -> NextItemRunConfig:
    """With the number of items that the data has and what decides its split, and without a bias by time where it has no
    times. A run that is resumed with its table in another place keeps its optimizer."""
    config = replace(config, train=replace(config.train, table_optimizer=config.optimizer))
    if config.model.encoder == "auto":
        # On every log and device tried so far it learns more in less time.
        config = replace(config, model=replace(config.model, encoder="transformer"))
    if config.data.path is None:
        return embedded(config)
    from ...data.next_item import read
    from ...data.split.record import with_split

    data = read(config.data.path, config.data)
    config = replace(config, data=with_split(config.data, data.split))
    model = with_sizes(config, data).model
    if config.low and model.loss == "auto" and config.rule is None and data.items <= FULL_ON_GPU:
        model = replace(model, loss="full")
    buckets = 0 if data.times_E is None else model.time_buckets
    values = data.values() if config.data.features else None
    rows = values.rows if values else 0
    return replace(config, model=replace(model, items=data.items, feature_rows=rows, time_buckets=buckets))


def estimate(config: NextItemRunConfig) -> Estimate:
    """Counts a step whose sequences all have the maximum length."""
    model, batch = config.model, config.train.batch_size
    tokens, gpu = batch * model.max_length, has_gpu(config.train.device)
    low, averaged = config.low, config.averaged_steps > 0
    pairs, unique = tokens * (model.max_length + 1) // 2, min(tokens, model.items)
    return Estimate(
        parameters={"items": model.table_parameters, **model.part_parameters},
        table_bytes=FLOAT * model.table_parameters,
        step=step(model, tokens, pairs, unique, rule=config.rule, gpu=gpu, low=low, averaged=averaged),
        memory=memory(model, batch, rule=config.rule, averaged=averaged),
        state_bytes=FLOAT * (model.items + 1) * RULES.get(config.optimizer, RULES["adam"]).state_width(model.dim),
        table_rows=model.items + 1,
    )


def require_room(config: NextItemRunConfig) -> None:
    for name in ("items", "dim", "blocks", "heads", "head_dim"):
        value = getattr(config.model, name)
        require(value > 0, f"model.{name}", value, "above 0")
    tables = config.tables if config.some_rows else TablesConfig(placement="device")
    require_table_memory(tables, estimate(config), fix=SMALLER)


def bounds(config: NextItemRunConfig) -> dict[str, Any]:
    return config.target.bounds("best", *NEXT_ITEM.baselines)


def workload(
    name: str,
    summary: str,
    presets: Mapping[str, Callable[[], NextItemRunConfig]],
    on_events: Callable[[NextItemRunConfig, Dataset], NextItemRunConfig],
    resolve: Callable[[NextItemRunConfig], NextItemRunConfig] = resolve,
) -> Workload:
    """A workload of this task."""
    return Workload(
        name=name,
        summary=summary,
        task=NEXT_ITEM,
        config=NextItemRunConfig,
        presets=presets,
        estimate=estimate,
        claims=quality_claims(bounds),
        checks="recperf.workloads.next_item.build:check",
        build="recperf.workloads.next_item.build:PreparedSequences",
        serve="recperf.workloads.next_item.serve:ServedSequences",
        datasets={"events": on_events},
        resolve=resolve,
        id_tables={"items_ID": "items", "items.table_RD": "items", "features_VD": "features"},
        counted=("counting.",),
    )


NEXT_ITEMS = workload(
    "next-item",
    "the next item of a user's sequence, ranked among all items; a minute on a laptop",
    {"default": default},
    on_events,
)
