"""dlrm: the classic DLRM and DLRM-DCNv2 on synthetic batches or imported clicks; the profiling experiment."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...config import require, within
from ...data.config import RandomBagsConfig, SplitConfig
from ...distributed.config import DistributedConfig
from ...distributed.ranks import current
from ...errors import ConfigError
from ...execution.tables import require_table_memory, table_share
from ...execution.workload import Estimate, TrialsConfig, Workload, claiming
from ...measure.cost import FLOAT
from ...models.config import DLRMConfig, dlrm_memory, dlrm_step, sparse_dlrm_step
from ...models.tiers.config import TablesConfig
from ...ops.table_rules import RULES
from ...tasks import CLICK_LABELS
from ...train.config import PLAIN, DLRMTrainConfig, FastConfig, settings_for_rows

if TYPE_CHECKING:
    from ...data.datasets import Dataset
    from ...planning.work import PlannedWorkload
    from ...runs.contract import Claim

KAGGLE_ROWS = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992, 5_461_306,
    10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""Number of categories in each column of the Kaggle data."""
DCNV2_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
DENSE = 13
"""Numbers in a row of Criteo's click logs."""
DCNV2_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per sample in each table of MLPerf's DLRM-DCNv2, 214 in total."""
LESS = "a smaller --model.row-scale, --model.dim or --train.batch-size, or --train.optimizer rowwise-adagrad"
"""How to need less memory."""
SMALL_DATA = 1_000_000
"""Imported clicks with at most this many rows and categories are read several times."""
SMALL_TABLE = 1000
"""Tables are not scaled below this many rows: that would limit how many distinct ids a bag can hold."""


@dataclass(frozen=True, kw_only=True)
class DLRMModelConfig:
    features: tuple[str, ...] = ()
    """Names of the tables; default: t1, t2 and so on, and the columns of the data with source clicks."""
    rows: tuple[int, ...] = (4, 3, 2)
    """Rows of each table. With source clicks they follow the data, and so does the number of dense features."""
    row_scale: float = 1.0
    """Factor for the rows of every table with more than 1,000 rows, to fit a large model on a smaller machine."""
    dim: int = 64
    """Width of an embedding row."""
    bottom: tuple[int, ...] = (512, 512, 64)
    """Layer widths of the bottom MLP; the first is the number of dense features."""
    top: tuple[int, ...] = (1024, 1024, 1024, 1)
    """Layer widths of the top MLP after the interaction; the last is 1."""
    interaction: Literal["dot", "concat", "dcn"] = "dot"
    """Interaction of dense and sparse vectors: pairwise dot products, concatenation, or DCNv2's cross layers."""
    diagonal: bool = False
    """With dot: include the product of each vector with itself."""
    cross_layers: int = 3
    """With dcn: number of cross layers."""
    cross_rank: int = 512
    """With dcn: rank of the two matrices of a cross layer."""
    table_init_std: float = 0.0
    """Standard deviation of the initial table rows; 0 means uniform in +-1/sqrt(rows of the table)."""

    def __post_init__(self) -> None:
        require(len(self.rows) >= 1, "model.rows", self.rows, "at least one number")
        within(1e-9, self.row_scale, 1e6, "model.row_scale")
        self.dlrm()

    def dlrm(self) -> DLRMConfig:
        """The model config with scaled rows."""
        scaled = self.rows
        if self.row_scale != 1:
            scaled = tuple(max(min(rows, SMALL_TABLE), round(rows * self.row_scale)) for rows in self.rows)
        fields = {name: getattr(self, name) for name in DLRMConfig.__dataclass_fields__}
        features = self.features or tuple(f"t{index}" for index in range(1, len(scaled) + 1))
        return DLRMConfig(**{**fields, "features": features, "rows": scaled})


@dataclass(frozen=True, kw_only=True)
class DLRMDataConfig(SplitConfig, RandomBagsConfig):
    source: Literal["random", "clicks"] = "random"
    """Synthetic batches, or clicks that `recperf data import --clicks` imported; only these are split."""
    path: Path | None = None
    """With source clicks: the folder of the imported rows."""

    def __post_init__(self) -> None:
        RandomBagsConfig.__post_init__(self)
        SplitConfig.__post_init__(self)
        has_path = self.path is not None
        allowed = "the folder of imported rows with data.source clicks, else none"
        require(has_path == (self.source != "random"), "data.path", str(self.path), allowed)
        require(has_path or not self.validate, "data.validate", self.validate, "off, or on with data.source clicks")
        require(has_path or self.whole, "data.source", self.source, "clicks, to train on a part of them")


@dataclass(frozen=True, kw_only=True)
class DLRMWorkloadConfig(TrialsConfig):
    data: DLRMDataConfig = field(default_factory=DLRMDataConfig)
    model: DLRMModelConfig = field(default_factory=DLRMModelConfig)
    train: DLRMTrainConfig = field(default_factory=DLRMTrainConfig)
    fast: FastConfig = field(default_factory=FastConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.optimizer == "adamw" and self.tables.placement in ("host", "file"):
            raise ConfigError(
                f"tables.placement is {self.tables.placement}, but adamw changes every row in every step",
                where={"field": "tables.placement, train.optimizer"},
                fix="--train.optimizer rowwise-adagrad",
            )
        if self.data.source != "clicks" or self.model.features:
            self.distributed.require_tables(self.dlrm.features)
        if self.data.source == "random":
            self.data.max_ids(self.dlrm.rows)

    @property
    def dlrm(self) -> DLRMConfig:
        return self.model.dlrm()


def experiment() -> DLRMWorkloadConfig:
    """What the published profiling command runs: its tables have 4, 3 and 2 rows."""
    return DLRMWorkloadConfig(
        data=DLRMDataConfig(ids_per_bag=10, distinct=True),
        train=DLRMTrainConfig(epochs=1, batch_size=2048, loss="mse", learning_rate=0.1, checkpoint_epochs=False),
    )


def intended() -> DLRMWorkloadConfig:
    """What the experiment intended: 8 tables of a million rows, up to 100 ids per lookup."""
    base = experiment()
    return replace(
        base,
        data=DLRMDataConfig(ids_per_bag=100),
        model=replace(base.model, rows=(1_000_000,) * 8),
    )


def experiment_plain() -> DLRMWorkloadConfig:
    """The experiment with every optimization switched off."""
    return replace(experiment(), fast=PLAIN)


def criteo_kaggle() -> DLRMWorkloadConfig:
    """The usual model for the Criteo Kaggle data: 13 dense features, 26 tables, one id each."""
    return DLRMWorkloadConfig(
        data=DLRMDataConfig(ids="zipf"),
        model=DLRMModelConfig(rows=KAGGLE_ROWS, dim=16, bottom=(DENSE, 512, 256, 64, 16), top=(512, 256, 1)),
        train=DLRMTrainConfig(epochs=1, batch_size=2048, learning_rate=0.1, checkpoint_epochs=False),
    )


def dcnv2() -> DLRMWorkloadConfig:
    """MLPerf's DLRM-DCNv2, rows scaled to a hundredth: 1 GB of tables instead of 105."""
    return DLRMWorkloadConfig(
        data=DLRMDataConfig(ids_per_feature=DCNV2_IDS, fixed=True, batches=50, held_out_batches=4),
        model=DLRMModelConfig(
            rows=DCNV2_ROWS, row_scale=0.01, dim=128, bottom=(DENSE, 512, 256, 128), top=(1024, 1024, 512, 256, 1),
            interaction="dcn",
        ),
        train=DLRMTrainConfig(
            epochs=1, batch_size=2048, learning_rate=0.005, optimizer="adagrad", checkpoint_epochs=False
        ),
    )  # fmt: skip


def clicks(rows: int, categories: int) -> DLRMWorkloadConfig:
    """The model for imported clicks with this many rows and categories.

    Few rows are read several times by AdamW into narrow tables, and the decay of unused table rows keeps it from
    memorising them. Many rows are read once, and only the table rows that a step uses are updated.
    """
    model = DLRMModelConfig(
        rows=(1,), dim=32, bottom=(1, 64, 32), top=(64, 32, 1), interaction="concat", cross_rank=32, table_init_std=0.01
    )
    if rows <= SMALL_DATA and categories <= SMALL_DATA:
        model = replace(model, dim=8, bottom=(1, 16, 8), interaction="dot")
        train = DLRMTrainConfig(optimizer="adamw", schedule="one-cycle", **settings_for_rows(rows))
    else:
        train = DLRMTrainConfig(epochs=1, batch_size=2048, learning_rate=0.02, optimizer="rowwise-adagrad")
    return DLRMWorkloadConfig(model=model, train=train)


def on_clicks(config: DLRMWorkloadConfig, dataset: Dataset) -> DLRMWorkloadConfig:
    """The config for imported clicks; another preset than the first keeps its layers and its training, and a config for
    other clicks all but the data."""
    if config.data.source == "clicks":
        return replace(config, data=replace(config.data, path=dataset.folder, boundary=None))
    from ...data.rows.encode import read_manifest

    assert dataset.folder is not None
    manifest, validate = read_manifest(dataset.folder), False
    if config == experiment():
        config = clicks(manifest.rows, sum(column.categories for column in manifest.columns))
        validate = config.train.epochs > 1
    data = DLRMDataConfig(source="clicks", path=dataset.folder, validate=validate)
    return replace(config, data=data)


def on_events(config: DLRMWorkloadConfig, dataset: Dataset) -> DLRMWorkloadConfig:
    """The config for the events of a store with a label as clicks."""
    from ...data.rows.from_events import clicks_of

    rows, events = clicks_of(dataset)
    config = on_clicks(config, rows)
    return replace(config, data=replace(config.data, events=events))


def resolve(config: DLRMWorkloadConfig) -> DLRMWorkloadConfig:
    """With imported clicks: the tables and the number of dense features that the data has, and what decides their
    split."""
    if config.data.source != "clicks":
        return config
    from ...data.rows.imported import divided, open_clicks

    data = divided(config.data)
    assert data.path is not None
    clicks = open_clicks(data.path, data.rows_split())
    bottom = (len(clicks.dense_names), *config.model.bottom[1:])
    model = replace(config.model, features=clicks.keys, rows=clicks.table_rows, row_scale=1.0, bottom=bottom)
    several = clicks.slots if max(clicks.slots) > 1 else ()
    return replace(config, model=model, data=replace(data, ids_per_feature=several))


def max_ids(config: DLRMWorkloadConfig) -> tuple[int, ...]:
    """Maximum number of ids in a bag of each feature."""
    rows = config.dlrm.rows
    if config.data.source == "random":
        return config.data.max_ids(rows)
    return (config.data.source == "clicks" and config.data.ids_per_feature) or (1,) * len(rows)


def mean_ids(config: DLRMWorkloadConfig) -> tuple[float, ...]:
    """Mean ids in a bag of each feature: of drawn bags that of round(max(1, u * most)) with u uniform in [0, 1)."""
    exact = config.data.source != "random" or config.data.fixed
    return tuple(
        float(most) if exact or most == 1 else (1.5 + sum(range(2, most)) + 0.5 * most) / most
        for most in max_ids(config)
    )


def expected_ids(config: DLRMWorkloadConfig) -> int:
    """Ids of an average batch, counting repeats within a bag."""
    return round(config.train.batch_size * sum(mean_ids(config)))


def expected_unique(config: DLRMWorkloadConfig, ids: int) -> int:
    """Expected number of distinct rows among them if all rows of a table are equally likely."""
    rows, most = config.dlrm.rows, max_ids(config)
    shares = [m / sum(most) * ids for m in most]
    unique = sum(float(r * (1 - (1 - 1 / r) ** share)) for r, share in zip(rows, shares))
    return max(1, round(unique))


def estimate(config: DLRMWorkloadConfig) -> Estimate:
    model, batch, ids = config.dlrm, config.train.batch_size, expected_ids(config)
    optimizer = config.train.optimizer
    if optimizer == "adamw":
        step = dlrm_step(model, batch, ids=ids, unique=expected_unique(config, ids))
        memory = dlrm_memory(model, batch)
    else:
        step = sparse_dlrm_step(model, batch, ids=ids, unique=expected_unique(config, ids), optimizer=optimizer)
        memory = dlrm_memory(
            model, batch, rule=optimizer, dense=optimizer, ids=batch * sum(max_ids(config)), drawn=True
        )
    return Estimate(
        parameters={"tables": model.table_parameters, "mlps": model.mlp_parameters},
        table_bytes=FLOAT * model.table_parameters,
        step=step,
        memory=memory,
        state_bytes=FLOAT * table_state(config) * sum(model.rows),
        table_rows=sum(model.rows),
    )


def reduction_bytes(config: DLRMWorkloadConfig) -> int:
    """Bytes of the all-reduce buffer; AdamW's table gradients are part of it."""
    model = config.dlrm
    return current().reduction_bytes(
        model.mlp_parameters + (model.table_parameters if config.train.optimizer == "adamw" else 0)
    )


def table_state(config: DLRMWorkloadConfig) -> int:
    """Numbers of optimizer state that a row has: AdamW's two moments and gradient, or those of the rule."""
    dim, optimizer = config.model.dim, config.train.optimizer
    return 3 * dim if optimizer == "adamw" else RULES[optimizer].state_width(dim)


def require_room(config: DLRMWorkloadConfig) -> None:
    """Refuse a config that does not fit into the memory of a CPU."""
    share, more = table_share(planned(config), config.distributed, on_host=True), reduction_bytes(config)
    tables = TablesConfig(placement="device") if config.train.optimizer == "adamw" else config.tables
    require_table_memory(tables, estimate(config), share=share, more=more, fix=LESS)


def planned(config: DLRMWorkloadConfig) -> PlannedWorkload:
    from ..click_plan import planned_clicks

    fast, drawn = config.fast, config.data.source == "random"
    return planned_clicks(
        config.dlrm,
        config.train.batch_size,
        mean_ids(config),
        optimizer=config.train.optimizer,
        precision="bfloat16" if fast.precision == "auto" else fast.precision,
        graph=fast.graph != "off",
        drawn="" if not drawn else "device" if fast.input in ("auto", "device") else "host",
        mlp="plain" if fast.mlp == "plain" else "fused",
    )


def bounds(config: DLRMWorkloadConfig) -> dict[str, Any]:
    """The bounds to reach: of drawn rows the only baseline is the majority class."""
    if config.data.source == "clicks":
        return config.target.bounds("best", *CLICK_LABELS.baselines)
    return config.target.bounds("majority")


def claims(config: DLRMWorkloadConfig) -> tuple[Claim, ...]:
    """Of drawn rows, whose labels are chance, nothing but what the user set."""
    from ...runs.contract import quality_target

    claimed = config if config.data.source == "random" else claiming(config)
    return (quality_target(lambda *_: bounds(claimed)),)


DLRM = Workload(
    name="dlrm",
    summary="the classic DLRM and DCNv2 on synthetic batches or imported clicks; the profiling experiment",
    task=CLICK_LABELS,
    config=DLRMWorkloadConfig,
    presets={
        "experiment": experiment,
        "intended": intended,
        "criteo-kaggle": criteo_kaggle,
        "dcnv2": dcnv2,
        "experiment-plain": experiment_plain,
    },
    estimate=estimate,
    claims=claims,
    checks="recperf.workloads.dlrm.build:check",
    build="recperf.workloads.dlrm.build:PreparedDLRM",
    plan="recperf.workloads.dlrm.config:planned",
    datasets={"clicks": on_clicks, "events": on_events},
    serve="recperf.workloads.click_serve:serve_dlrm",
    id_tables=dict.fromkeys(("embeddings.weight_RD", "embeddings.table_RD"), "rows"),
    resolve=resolve,
)
