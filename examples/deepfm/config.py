"""DeepFM on MovieLens: a linear term, a factorization machine and an MLP that share one set of embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field

from recperf.data.config import MovieLensConfig
from recperf.execution.workload import Estimate, TrialsConfig, Workload, quality_claims
from recperf.measure.cost import FLOAT, Cost, adamw_update, bag_backward_dense, bag_forward, mlp_backward, mlp_forward
from recperf.tasks import CLICK_LABELS
from recperf.train.config import TrainConfig
from recperf.workloads.micro_dlrm.config import describe, ratings


@dataclass(frozen=True, kw_only=True)
class DeepFMConfig(TrialsConfig):
    data: MovieLensConfig = field(default_factory=MovieLensConfig)
    dim: int = 8
    """Width of an embedding row."""
    hidden: tuple[int, ...] = (32, 16)
    """Widths of the MLP's hidden layers."""
    train: TrainConfig = field(default_factory=TrainConfig)


def check(config: DeepFMConfig) -> str:
    return describe(ratings(config.data))


def sizes(config: DeepFMConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of each table and widths of the MLP. Both follow the data."""
    clicks = ratings(config.data)
    return clicks.table_rows, (len(clicks.keys) * config.dim + len(clicks.dense_names), *config.hidden, 1)


def estimate(config: DeepFMConfig, unique: int | None = None, samples: int | None = None) -> Estimate:
    """Parameters, work and memory of a step. Costs carry the names of the spans that time them."""
    (rows, widths), batch, width = sizes(config), samples or config.train.batch_size, config.dim + 1
    ids, tables = batch * len(rows), sum(rows) * width
    mlp = sum((before + 1) * after for before, after in zip(widths, widths[1:]))
    pairs = Cost(4 * ids * config.dim, FLOAT * (ids * config.dim + batch))
    backward = mlp_backward(widths, batch, input_gradient=True) + bag_backward_dense(ids, ids, width, sum(rows))
    step = {
        "embedding": bag_forward(ids, ids, width, unique or min(ids, sum(rows))),
        "interaction": pairs,
        "top": mlp_forward(widths, batch),
        "backward": backward + pairs + pairs,
        "update": adamw_update(tables + mlp),
    }
    memory = {"state": 4 * FLOAT * (tables + mlp), "activations": 2 * FLOAT * batch * (sum(widths) + len(rows) * width)}
    parameters = {"tables": tables, "mlp": mlp}
    return Estimate(parameters=parameters, table_bytes=FLOAT * tables, step=step, memory=memory)


DEEPFM = Workload(
    name="deepfm",
    summary="DeepFM on MovieLens-100K",
    task=CLICK_LABELS,
    config=DeepFMConfig,
    presets={"default": DeepFMConfig},
    estimate=estimate,
    claims=quality_claims(lambda config: config.target.bounds("user_item_bias")),
    checks="deepfm.config:check",
    build="deepfm.build:PreparedDeepFM",
)
