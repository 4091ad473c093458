"""micro-dlrm-dram: the micro-dlrm model with one hashed table that fits no cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...data.config import DramDataConfig
from ...errors import MachineError
from ...execution.tables import require_table_memory
from ...execution.workload import Estimate, TrialsConfig, Workload, claiming
from ...machine import available_bytes, caches
from ...measure.cost import FLOAT
from ...measure.peaks import find
from ...models.config import HashedDLRMConfig, dlrm_memory, hashed_dlrm_step
from ...models.tiers.config import TablesConfig
from ...ops.table_rules import RULES
from ...tasks import BIASES, CLICK_LABELS
from ...train.config import SparseTrainConfig
from ..micro_dlrm import config as micro_dlrm

if TYPE_CHECKING:
    from ...data.datasets import Dataset
    from ...planning.work import PlannedWorkload
    from ...runs.contract import Claim

KNEES = 20
"""With --model.rows auto: size of the table in knees of the cache curve. Of random rows, 19 of 20 come from memory."""


@dataclass(frozen=True, kw_only=True)
class MicroDLRMDramConfig(TrialsConfig):
    data: DramDataConfig = field(default_factory=DramDataConfig)
    model: HashedDLRMConfig = field(default_factory=HashedDLRMConfig)
    train: SparseTrainConfig = field(
        default_factory=lambda: SparseTrainConfig(
            epochs=2, batch_size=1024, checkpoint_epochs=False, table_weight_decay=0.0, device="cpu"
        )
    )
    tables: TablesConfig = field(default_factory=TablesConfig)


def default() -> MicroDLRMDramConfig:
    """Uniform ids, 32 per bag, rows of 1 KiB: no cache holds the row of a lookup."""
    return MicroDLRMDramConfig()


def zipf() -> MicroDLRMDramConfig:
    """Ids by Zipf popularity, as in real data: a cached head and a long tail."""
    return replace(default(), data=replace(default().data, ids="zipf"))


def movielens() -> MicroDLRMDramConfig:
    """MovieLens through the same table: it uses 2,648 rows, which fit a cache."""
    train = replace(default().train, epochs=10, batch_size=256, table_learning_rate=0.02, table_weight_decay=0.5)
    return replace(default(), data=DramDataConfig(ids="movielens", ids_per_bag=1), train=train)


def on_movielens(config: MicroDLRMDramConfig, dataset: Dataset) -> MicroDLRMDramConfig:
    """The config for MovieLens through the table; presets of virtual ids get the training of preset movielens."""
    if config.data.ids != "movielens":
        preset = movielens()
        config = replace(config, data=preset.data, train=preset.train)
    return micro_dlrm.on_movielens(config, dataset)


def resolved_rows(config: MicroDLRMDramConfig) -> int:
    """Rows of the table on this machine."""
    if config.model.rows != "auto":
        return config.model.rows
    # A virtual machine may get only part of the cache that the system reports: the measured one decides.
    measured = find()
    if measured is None:
        fix = "recperf peaks, or --model.rows with a number"
        raise MachineError("model.rows auto needs the measured ceilings of this machine", fix=fix)
    target, limit = KNEES * measured.knee.bytes, available_bytes() // 2
    return max(1, int(min(target, limit)) // (FLOAT * config.model.dim))


def resolve(config: MicroDLRMDramConfig) -> MicroDLRMDramConfig:
    """The config with the number of rows that "auto" stands for."""
    return replace(config, model=replace(config.model, rows=resolved_rows(config)))


def hot_ids(config: MicroDLRMDramConfig, hot_bytes: int | None) -> int:
    """Number of ids per feature in the hot half of the matched pair; without a measured size, their rows fill half of
    the second-level cache."""
    size = hot_bytes or caches().get("L2", 1 << 20) // 2
    return max(8, size // (FLOAT * config.model.dim * len(config.model.features)))


def ids_a_batch(config: MicroDLRMDramConfig) -> int:
    return config.train.batch_size * len(config.model.features) * config.data.ids_per_bag


def estimate(config: MicroDLRMDramConfig) -> Estimate:
    """Counts all ids of a batch as distinct, which virtual uniform ids nearly are."""
    rows, ids = resolved_rows(config), ids_a_batch(config)
    model, batch = config.model.dlrm(rows), config.train.batch_size
    optimizer = config.train.table_optimizer
    return Estimate(
        parameters={"table": model.table_parameters, "mlps": model.mlp_parameters},
        table_bytes=FLOAT * model.table_parameters,
        step=hashed_dlrm_step(model, batch, ids=ids, unique=min(ids, rows), optimizer=optimizer),
        memory=dlrm_memory(model, batch, rule=optimizer, ids=ids),
        state_bytes=FLOAT * table_state(config) * rows,
        table_rows=rows,
    )


def table_state(config: MicroDLRMDramConfig) -> int:
    """Numbers of optimizer state that a row has."""
    return RULES[config.train.table_optimizer].state_width(config.model.dim)


def planned(config: MicroDLRMDramConfig) -> PlannedWorkload:
    from ..click_plan import planned_clicks

    model = config.model.dlrm(resolved_rows(config))
    ids = (float(config.data.ids_per_bag * len(model.features)),)
    return planned_clicks(model, config.train.batch_size, ids, optimizer="adamw", state=table_state(config))


def bounds(config: MicroDLRMDramConfig) -> dict[str, Any]:
    """The bounds to reach: virtual ids have no user or item bias, only a majority class."""
    return config.target.bounds(*(BIASES if config.data.ids == "movielens" else ("majority",)))


def claims(config: MicroDLRMDramConfig) -> tuple[Claim, ...]:
    """The loss falls on any device; on a CPU with uniform ids memory limits a step, if that is where the table lies."""
    from ...runs.contract import in_cpu_memory, limits_lead, loss_falls, pair_ratio_as_measured, quality_target

    target = quality_target(lambda *_: bounds(claiming(config)))
    common = (target, loss_falls(0.005))
    if config.data.ids != "uniform":
        return common
    of_memory = (
        pair_ratio_as_measured("embedding"),
        limits_lead("bandwidth", "latency", cached_rows=True),
    )
    return (*common, *(in_cpu_memory(claim) for claim in of_memory))


def check(config: MicroDLRMDramConfig) -> str:
    """Check memory and data without training; the line names the data."""
    require_table_memory(config.tables, estimate(config))
    if config.data.ids == "movielens":
        return micro_dlrm.describe(micro_dlrm.ratings(config.data))
    return f"{config.data.ids} ids from a space of {config.data.id_space:,} (synthetic)"


MICRO_DLRM_DRAM = Workload(
    name="micro-dlrm-dram",
    summary="the same model with a hashed 2 GB table that fits no cache: limited by a CPU's memory",
    task=CLICK_LABELS,
    config=MicroDLRMDramConfig,
    presets={"default": default, "zipf": zipf, "movielens": movielens},
    estimate=estimate,
    resolve=resolve,
    claims=claims,
    checks="recperf.workloads.micro_dlrm_dram.config:check",
    build="recperf.workloads.micro_dlrm_dram.build:PreparedDram",
    plan="recperf.workloads.micro_dlrm_dram.config:planned",
    datasets={"movielens": on_movielens},
)
