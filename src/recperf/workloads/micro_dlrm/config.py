"""micro-dlrm: MovieLens-100K clicks, tables that fit any cache, trained in seconds on a laptop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ...data.config import SPLIT_FIELDS, MovieLensConfig
from ...distributed.config import DistributedConfig
from ...distributed.ranks import current
from ...errors import ConfigError
from ...execution.workload import Estimate, TrialsConfig, Workload, claiming, require_memory
from ...measure.cost import FLOAT, Cost
from ...models.config import DLRMConfig, dlrm_memory, dlrm_step, sparse_dlrm_step
from ...ops.table_rules import RULES, TableRule
from ...tasks import BIASES, CLICK_LABELS
from ...train.config import TableTrainConfig, settings_for_rows

if TYPE_CHECKING:
    from ...data.datasets import Dataset
    from ...data.rows.clicks import Clicks
    from ...data.rows.imported import ImportedClicks
    from ...planning.work import PlannedWorkload
    from ...runs.contract import Claim

T = TypeVar("T", bound=Any)
OF_PROCESSOR = ("dispatch", "python", "compute", "cache", "operator")
PUBLISHED_TARGET = {"accuracy": 0.71, "auc": 0.78}
"""Bounds on the real data with the random split; two bias terms alone reach 0.705 and 0.772 there."""


def _model() -> DLRMConfig:
    return DLRMConfig(
        features=("user", "item", "occupation"), rows=(944, 1683, 22), dim=8, bottom=(16, 8, 8), top=(32, 16, 1)
    )


@dataclass(frozen=True, kw_only=True)
class MicroDLRMConfig(TrialsConfig):
    data: MovieLensConfig = field(default_factory=MovieLensConfig)
    model: DLRMConfig = field(default_factory=_model)
    train: TableTrainConfig = field(default_factory=TableTrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data.has_clicks:
            self.distributed.require_tables(self.model.features)

    @property
    def rule(self) -> TableRule | None:
        """How the rows that a step used are updated; None: AdamW changes all."""
        return RULES.get(self.train.table_optimizer)


def default() -> MicroDLRMConfig:
    return MicroDLRMConfig()


def dot() -> MicroDLRMConfig:
    """Pairwise dot products in place of concatenation."""
    return replace(default(), model=replace(_model(), interaction="dot"))


def on_movielens(config: T, dataset: Dataset) -> T:
    """The config for MovieLens in a folder, or for the embedded ratings."""
    source: Literal["files", "embedded"] = "embedded" if dataset.folder is None else "files"
    changed: T = replace(config, data=replace(config.data, source=source, path=dataset.folder))
    return changed


def on_clicks(config: MicroDLRMConfig, dataset: Dataset) -> MicroDLRMConfig:
    """The config for imported clicks; `resolve` sets the tables. The default preset gets a recipe for its number of
    rows, and a config for other clicks keeps all but the data."""
    if config.data.has_clicks:
        return replace(config, data=replace(config.data, path=dataset.folder, boundary=None))
    from ...data.rows.encode import read_manifest

    assert dataset.folder is not None
    # The default is the dataset's own split, not that of MovieLens.
    none: dict[str, Any] = dict.fromkeys(SPLIT_FIELDS)
    data = replace(config.data, source="clicks", path=dataset.folder, validate=True, **none)
    if config == default():
        recipe = settings_for_rows(read_manifest(dataset.folder).rows)
        config = replace(dot(), train=replace(config.train, **recipe))
    return replace(config, data=data)


def on_events(config: MicroDLRMConfig, dataset: Dataset) -> MicroDLRMConfig:
    """The config for the events of a store with a label as clicks."""
    from ...data.rows.from_events import clicks_of

    clicks, events = clicks_of(dataset, lists=False)
    config = on_clicks(config, clicks)
    return replace(config, data=replace(config.data, events=events))


def resolve(config: MicroDLRMConfig) -> MicroDLRMConfig:
    """With imported clicks: the tables and the number of dense features that the data has."""
    if not config.data.has_clicks:
        return config
    from ...data.rows.imported import divided

    data = divided(config.data)
    clicks = imported(data)
    bottom = (len(clicks.dense_names), *config.model.bottom[1:])
    model = replace(config.model, features=clicks.keys, rows=clicks.table_rows, bottom=bottom)
    return replace(config, data=data, model=model)


def estimate(config: MicroDLRMConfig) -> Estimate:
    model, batch = config.model, config.train.batch_size
    rule, ids = config.rule, batch * len(model.features)
    return Estimate(
        parameters={"tables": model.table_parameters, "mlps": model.mlp_parameters},
        table_bytes=FLOAT * model.table_parameters,
        step=step_cost(config, batch),
        memory=dlrm_memory(model, batch) if rule is None else dlrm_memory(model, batch, rule=rule.name, ids=ids),
        state_bytes=FLOAT * (table_state(config) or 0) * sum(model.rows),
    )


def step_cost(config: MicroDLRMConfig, batch: int, *, unique: int | None = None) -> dict[str, Cost]:
    """The counted work of a step, by default with as many different rows as possible."""
    model, rule = config.model, config.rule
    if rule is None:
        return dlrm_step(model, batch, unique=unique)
    ids, most = batch * len(model.features), sum(min(batch, rows) for rows in model.rows)
    unique = most if unique is None else unique
    return sparse_dlrm_step(model, batch, ids=ids, unique=unique, optimizer=rule.name, dense="adamw")


def table_state(config: MicroDLRMConfig) -> int | None:
    """Numbers of optimizer state that a row has; None with AdamW, which has those of all rows at once."""
    rule = config.rule
    return None if rule is None else rule.state_width(config.model.dim)


def require_room(config: MicroDLRMConfig) -> None:
    """Refuse tables that memory cannot hold. With AdamW each of several ranks has all tables and all-reduces their
    gradient."""
    needed, model = estimate(config), config.model
    reduced = model.mlp_parameters + (model.table_parameters if config.rule is None else 0)
    require_memory(needed, more=current().reduction_bytes(reduced))


def check(config: MicroDLRMConfig) -> str:
    """Check memory, data and table sizes without training; the line names the data."""
    require_room(config)
    return describe(rows_of(config))


def describe(clicks: ImportedClicks | Clicks) -> str:
    facts = clicks.describe()
    synthetic = " (synthetic)" if facts["synthetic"] else ""
    return f"{facts['name']}{synthetic}, {facts['rows']:,} rows, split {facts['split']}"


def rows_of(config: MicroDLRMConfig) -> ImportedClicks | Clicks:
    """The rows of a config, whose tables must fit them."""
    clicks = imported(config.data) if config.data.has_clicks else ratings(config.data)
    require_tables(config.model, clicks)
    return clicks


def imported(config: MovieLensConfig) -> ImportedClicks:
    """Imported clicks whose columns have one category in a row."""
    from ...data.rows.imported import open_clicks

    assert config.path is not None
    clicks = open_clicks(config.path, config.rows_split())
    several = [key for key, slots in zip(clicks.keys, clicks.slots) if slots > 1]
    if several:
        what = f"column {several[0]!r} has several categories in a row, which micro-dlrm does not read"
        raise ConfigError(what, fix=f"recperf run dlrm --data {clicks.manifest.name}")
    return clicks


def ratings(config: MovieLensConfig) -> Clicks:
    from ...data.known.movielens_files import load
    from ...data.rows.clicks import Clicks

    return Clicks(load(config), config)


def require_tables(model: DLRMConfig, clicks: ImportedClicks | Clicks) -> None:
    """Refuse a model whose tables are too small for the data, whose tables or dense features are others, as in a config
    of other rows: a lookup in stacked tables would read another table."""
    needed, rows = dict(zip(clicks.keys, clicks.table_rows)), dict(zip(model.features, model.rows))
    differing = next((key for key in (*needed, *rows) if not rows.get(key, 0) >= needed.get(key, 1 << 63)), None)
    if differing is not None:
        sizes = (f"{table[differing]:,} rows" if differing in table else "no table" for table in (rows, needed))
        what = f"for column {differing!r} the model has {next(sizes)}, the data needs {next(sizes)}"
    elif model.dense != len(clicks.dense_names):
        what = f"the model has {model.dense:,} dense features, the data {len(clicks.dense_names):,}"
    elif model.features != clicks.keys:
        what = "the model has the tables of the data in another order"
    else:
        return
    name = clicks.describe()["name"]
    raise ConfigError(what, where={"field": "model", "data": name}, fix=f"recperf run --data {name}")


def planned(config: MicroDLRMConfig) -> PlannedWorkload:
    from ..click_plan import planned_clicks

    ids, graph = (1.0,) * len(config.model.rows), config.train.graph != "off"
    return planned_clicks(
        config.model, config.train.batch_size, ids, optimizer="adamw", state=table_state(config), graph=graph
    )


def bounds(config: MicroDLRMConfig, data: dict[str, Any]) -> dict[str, Any]:
    """The requested bounds; with auto also the published ones on the published data and split."""
    if config.data.has_clicks:
        return config.target.bounds("best", *CLICK_LABELS.baselines)
    bounds = config.target.bounds(*BIASES)
    if config.target.beat == "auto" and data["name"] == "movielens-100k" and data["split"] == "random":
        requested = {name: bound for name, bound in bounds.items() if bound is not None}
        return {**bounds, **PUBLISHED_TARGET, **requested}
    return bounds


def claims(config: MicroDLRMConfig) -> tuple[Claim, ...]:
    """It reaches its target, and a step is limited by the processor, not by memory and waits.

    How its limits divide a step depends on the machine: on one with fast calls, small operators on data in the caches
    take more of it than the calls.
    """
    from ...runs.contract import limits_lead, quality_target

    return (
        quality_target(lambda _, data: bounds(claiming(config), data)),
        limits_lead(*OF_PROCESSOR, called="the processor (calls, Python, cached data)"),
    )


MICRO_DLRM = Workload(
    name="micro-dlrm",
    summary="DLRM on MovieLens-100K; tables fit any cache; seconds on a laptop",
    task=CLICK_LABELS,
    config=MicroDLRMConfig,
    presets={"default": default, "dot": dot},
    estimate=estimate,
    claims=claims,
    checks="recperf.workloads.micro_dlrm.config:check",
    build="recperf.workloads.micro_dlrm.build:PreparedClicks",
    plan="recperf.workloads.micro_dlrm.config:planned",
    datasets={"movielens": on_movielens, "events": on_events, "clicks": on_clicks},
    resolve=resolve,
    serve="recperf.workloads.click_serve:serve_micro_dlrm",
    id_tables=dict.fromkeys(("embeddings.weight_RD", "embeddings.table_RD"), "rows"),
)
