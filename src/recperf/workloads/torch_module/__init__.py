"""A model of one's own as a workload: a torch module, an optimizer of torch, and a task. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ...config import within
from ...data.config import MovieLensConfig
from ...distributed.config import DistributedConfig
from ...errors import ConfigError
from ...execution.workload import Estimate, TrialsConfig, Workload, load, quality_claims
from ...tasks import BIASES, CLICK_LABELS, NEXT_ITEM, Task
from ...train.config import TrainConfig
from ..micro_dlrm.config import on_clicks, on_events, on_movielens
from ..next_item.config import SequencesConfig, SequenceTrainConfig
from ..next_item.own_data import training_for

if TYPE_CHECKING:
    from ...data.datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class ModuleTrainConfig(TrainConfig):
    """Training with an optimizer of torch, which the workload makes from these fields."""

    schedule: Literal["one-cycle", "constant"] = "one-cycle"
    """How the learning rates that the optimizer was made with change: one cosine cycle up to them and down, or not."""
    learning_rate: float = 5e-3
    """Peak of the schedule, for an optimizer that is made with it."""
    weight_decay: float = 0.01
    """For an optimizer that is made with it."""
    table_weight_decay: float = 0.5
    """For an optimizer that is made with it."""


@dataclass(frozen=True, kw_only=True)
class ModuleConfig(TrialsConfig):
    """Clicks and their training. Fields of a model go into a subclass and become options."""

    data: MovieLensConfig = field(default_factory=MovieLensConfig)
    train: ModuleTrainConfig = field(default_factory=ModuleTrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distributed.require_copies("a torch module")


@dataclass(frozen=True, kw_only=True)
class ItemModuleTrainConfig(SequenceTrainConfig, ModuleTrainConfig):
    """The same for sequences of items."""

    schedule: Literal["one-cycle", "constant"] = "constant"
    """How the learning rates that the optimizer was made with change: one cosine cycle up to them and down, or not."""
    learning_rate: float = 1e-3
    """Peak of the schedule, for an optimizer that is made with it."""
    weight_decay: float = 0.0
    """For an optimizer that is made with it."""
    table_weight_decay: float = 0.0
    """For an optimizer that is made with it."""


@dataclass(frozen=True, kw_only=True)
class ItemModuleConfig(TrialsConfig):
    """Sequences of items and their training. Fields of a model go into a subclass and become options."""

    data: SequencesConfig = field(default_factory=SequencesConfig)
    train: ItemModuleTrainConfig = field(default_factory=ItemModuleTrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    max_length: int = 50
    """Items of a sequence that the model reads, the latest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distributed.require_copies("a torch module")
        within(1, self.max_length, 1 << 16, "max_length")


@dataclass(frozen=True)
class Columns:
    """What a module learns of its data when it is made. Sequences have one column, the items from 1 on."""

    keys: tuple[str, ...]
    """Names of the columns of ids, of clicks in the order of `batch.features`."""
    rows: tuple[int, ...]
    """Rows that a table for each of them needs."""
    dense: int
    """Numbers of a row of clicks: the width of `batch.dense_BD`."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a torch module is to a task."""

    config: type
    bounds: Callable[[Any], dict[str, Any]]
    check: str
    build: str
    serve: str
    datasets: Mapping[str, Callable[[Any, Dataset], Any]]
    resolve: Callable[[Any], Any]


def click_bounds(config: ModuleConfig) -> dict[str, Any]:
    if config.data.has_clicks:
        return config.target.bounds("best", *CLICK_LABELS.baselines)
    return config.target.bounds(*BIASES)


def item_bounds(config: ItemModuleConfig) -> dict[str, Any]:
    return config.target.bounds("best", *NEXT_ITEM.baselines)


def on_sequences(config: ItemModuleConfig, dataset: Dataset) -> ItemModuleConfig:
    """The config for an event store; the default preset gets a training for its number of events."""
    if dataset.folder is None:
        return config
    changed = replace(config, data=replace(config.data, path=dataset.folder, boundary=None))
    if config != type(config)():
        return changed
    from ...data.known.event_files import open_events
    from ...data.next_item import NextItemData

    training = training_for(NextItemData.from_store(open_events(dataset.folder)))
    return replace(changed, train=replace(config.train, **training))


def divided_clicks(config: ModuleConfig) -> ModuleConfig:
    """With what decides the split of imported clicks."""
    if not config.data.has_clicks:
        return config
    from ...data.rows.imported import divided

    return replace(config, data=divided(config.data))


def divided_sequences(config: ItemModuleConfig) -> ItemModuleConfig:
    """With what decides the split of events."""
    if config.data.path is None:
        return config
    from ...data.next_item import read
    from ...data.split.record import with_split

    return replace(config, data=with_split(config.data, read(config.data.path, config.data).split))


KINDS = {
    CLICK_LABELS.name: Kind(
        config=ModuleConfig,
        bounds=click_bounds,
        check="recperf.workloads.torch_module.clicks:check",
        build="recperf.workloads.torch_module.clicks:ModuleClicks",
        serve="recperf.workloads.torch_module.serve:served_clicks",
        datasets={"clicks": on_clicks, "movielens": on_movielens, "events": on_events},
        resolve=divided_clicks,
    ),
    NEXT_ITEM.name: Kind(
        config=ItemModuleConfig,
        bounds=item_bounds,
        check="recperf.workloads.torch_module.items:check",
        build="recperf.workloads.torch_module.items:ModuleItems",
        serve="recperf.workloads.torch_module.serve:ItemModule",
        datasets={"events": on_sequences},
        resolve=divided_sequences,
    ),
}
"""By the name of a task."""


def torch_workload(
    name: str,
    summary: str,
    *,
    model: str,
    optimizer: str,
    task: Task = CLICK_LABELS,
    config: type[ModuleConfig | ItemModuleConfig] | None = None,
    presets: Mapping[str, Callable[[], Any]] | None = None,
) -> Workload:
    """A workload that trains a torch module.

    `model` is the "module:Class" of an `nn.Module`, which is made from `Columns` and the config. For labels of clicks
    it takes a `ClickBatch` and returns one logit for each row. For next items it takes a `SequenceBatch` and returns
    one vector for each position; its method `item_vectors` returns one for each item, and their product is the score.

    `optimizer` is the "module:function" that makes an optimizer of torch from the module and `config.train`. `config`
    is a subclass of `ModuleConfig`, or for next items of `ItemModuleConfig`, where the model has fields.
    """
    kind = KINDS.get(task.name)
    if kind is None:
        raise ConfigError(f"a torch module cannot be trained for {task.name} yet", fix=f"task {' or '.join(KINDS)}")
    made = config or kind.config
    if not issubclass(made, kind.config):
        raise ConfigError(f"{made.__name__} is no config of {task.name}", fix=f"a subclass of {kind.config.__name__}")

    def prepared(config: Any) -> Any:
        return load(kind.build)(config, model, optimizer)

    def served(config: Any) -> Any:
        return load(kind.serve)(config, model)

    def estimate(config: Any) -> Estimate:
        counted: Estimate = load("recperf.workloads.torch_module.build:estimate_of")(prepared(config))
        return counted

    return Workload(
        name=name,
        summary=summary,
        task=task,
        config=made,
        presets=presets or {"default": made},
        estimate=estimate,
        claims=quality_claims(kind.bounds),
        checks=kind.check,
        build=prepared,
        serve=served,
        datasets=kind.datasets,
        resolve=kind.resolve,
    )
