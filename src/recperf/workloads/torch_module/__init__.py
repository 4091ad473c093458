"""A model of one's own as a workload: a torch module, an optimizer of torch, and a task. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...data.config import MovieLensConfig
from ...errors import ConfigError
from ...execution.workload import Estimate, TrialsConfig, Workload, quality_claims
from ...tasks import BIASES, CLICK_LABELS, Task
from ...train.config import TrainConfig
from ..micro_dlrm.config import describe, on_clicks, on_events, on_movielens, ratings

if TYPE_CHECKING:
    from ...data.click_store.imported import ImportedClicks
    from ...data.clicks import Clicks


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


@dataclass(frozen=True)
class Columns:
    """What a module learns of its data when it is made."""

    keys: tuple[str, ...]
    """Names of the columns of ids, in the order of `batch.features`."""
    rows: tuple[int, ...]
    """Rows that a table for each of them needs."""
    dense: int
    """Numbers of a row: the width of `batch.dense_BD`."""


def torch_workload(
    name: str,
    summary: str,
    *,
    model: str,
    optimizer: str,
    task: Task = CLICK_LABELS,
    config: type[ModuleConfig] = ModuleConfig,
    presets: Mapping[str, Callable[[], Any]] | None = None,
) -> Workload:
    """A workload that trains a torch module.

    `model` is the "module:Class" of an `nn.Module`. It is made from `Columns` and the config, takes a `ClickBatch` and
    returns one logit for each row. `optimizer` is the "module:function" that makes an optimizer of torch from the
    module and `config.train`. `config` is a subclass of `ModuleConfig` where the model has fields.
    """
    if task is not CLICK_LABELS:
        raise ConfigError(f"a torch module cannot be trained for {task.name} yet", fix=f"task {CLICK_LABELS.name}")

    def prepared(config: ModuleConfig) -> Any:
        from .build import PreparedModule

        return PreparedModule(config, model, optimizer)

    def served(config: ModuleConfig) -> Any:
        from .serve import served_module

        return served_module(config, model)

    def estimate(config: ModuleConfig) -> Estimate:
        from .build import estimate_of

        return estimate_of(prepared(config))

    return Workload(
        name=name,
        summary=summary,
        task=task,
        config=config,
        presets=presets or {"default": config},
        estimate=estimate,
        claims=quality_claims(bounds),
        checks=lambda config: describe(clicks_of(config)),
        build=prepared,
        serve=served,
        datasets={"clicks": on_clicks, "movielens": on_movielens, "events": on_events},
    )


def bounds(config: ModuleConfig) -> dict[str, Any]:
    if config.data.has_clicks:
        return config.target.bounds("best", *CLICK_LABELS.baselines)
    return config.target.bounds(*BIASES)


def clicks_of(config: ModuleConfig) -> ImportedClicks | Clicks:
    """Imported clicks, or ratings as clicks."""
    if not config.data.has_clicks:
        return ratings(config.data)
    from ...data.click_store.imported import open_clicks

    assert config.data.path is not None
    return open_clicks(config.data.path, config.data.rows_split())
