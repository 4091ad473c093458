"""The configuration of DLRM models, the sizes that follow from it, and the FLOPs and bytes of a training step, counted
part by part from the config and the ids of a batch; parts have the names of the spans that time them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..config import require, within
from ..measure.cost import (
    FLOAT,
    INDEX,
    Cost,
    adamw_update,
    bag_backward_dense,
    bag_forward,
    dense_update,
    mlp_backward,
    mlp_forward,
    sparse_update,
)
from ..measure.spans import declare
from ..ops.table_rules import RULES

# The spans of the model; counted work has the same names.
declare("forward", "bottom", "top", kind="products")
declare("forward", "interaction", kind="interaction")


@dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    features: tuple[str, ...]
    """Names of the sparse features, one table per feature."""
    rows: tuple[int, ...]
    """Rows of each table, in the order of the features; one number if all share a table."""
    dim: int
    """Width of a table row."""
    bottom: tuple[int, ...]
    """Widths of the bottom MLP, the number of dense features first."""
    top: tuple[int, ...]
    """Widths of the top MLP after the interaction; the last is 1."""
    interaction: Literal["concat", "dot", "dcn"] = "concat"
    """Interaction of dense and sparse vectors: concatenation, pairwise dot products, or the cross layers of DCNv2."""
    diagonal: bool = False
    """With dot: also the product of each vector with itself."""
    cross_layers: int = 3
    """With dcn: number of cross layers."""
    cross_rank: int = 512
    """With dcn: width between the two matrices of a cross layer."""
    table_init_std: float = 0.01
    """Standard deviation of the initial table rows."""

    def __post_init__(self) -> None:
        require(len(self.features) >= 1, "model.features", self.features, "at least one name")
        require(len(set(self.features)) == len(self.features), "model.features", self.features, "distinct names")
        tables = len(self.features)
        require(len(self.rows) in (1, tables), "model.rows", self.rows, f"{tables} numbers, or 1 for a shared table")
        require(min(self.rows) >= 1, "model.rows", self.rows, "at least 1 each")
        require(max(self.rows) <= 1 << 40, "model.rows", self.rows, f"at most {1 << 40} each")
        within(1, self.dim, 1 << 16, "model.dim")
        require(len(self.bottom) >= 2, "model.bottom", self.bottom, "at least an input and an output width")
        require(min(self.bottom) >= 1 and max(self.bottom) <= 1 << 16, "model.bottom", self.bottom, "widths 1 to 65536")
        require(
            self.interaction == "concat" or self.bottom[-1] == self.dim,
            "model.bottom",
            self.bottom,
            f"with {self.interaction} a last width equal to model.dim ({self.dim}): all vectors need the same width",
        )
        require(len(self.top) >= 1, "model.top", self.top, "at least one width")
        require(min(self.top) >= 1 and max(self.top) <= 1 << 16, "model.top", self.top, "widths 1 to 65536")
        require(self.top[-1] == 1, "model.top", self.top, "a last width of 1")
        within(0, self.table_init_std, 1e6, "model.table_init_std")
        require(not self.diagonal or self.interaction == "dot", "model.diagonal", True, "only with interaction dot")
        within(1, self.cross_layers, 1024, "model.cross_layers")
        within(1, self.cross_rank, 1 << 16, "model.cross_rank")

    @property
    def dense(self) -> int:
        """Number of dense features."""
        return self.bottom[0]

    @property
    def vectors(self) -> int:
        """Vectors in the interaction: the dense one and one per feature."""
        return 1 + len(self.features)

    @property
    def pairs(self) -> int:
        """Dot products per sample."""
        if self.interaction != "dot":
            return 0
        return self.vectors * (self.vectors + (1 if self.diagonal else -1)) // 2

    @property
    def interaction_width(self) -> int:
        sparse = self.pairs if self.interaction == "dot" else len(self.features) * self.dim
        return self.bottom[-1] + sparse

    @property
    def top_widths(self) -> tuple[int, ...]:
        """The widths of the top MLP, its input first."""
        return (self.interaction_width, *self.top)

    @property
    def table_parameters(self) -> int:
        return sum(self.rows) * self.dim

    @property
    def cross_parameters(self) -> int:
        """Parameters of the cross layers: two matrices and a bias each; 0 without them."""
        if self.interaction != "dcn":
            return 0
        return self.cross_layers * self.interaction_width * (2 * self.cross_rank + 1)

    @property
    def mlp_parameters(self) -> int:
        """Parameters outside the tables: both MLPs and the cross layers."""
        return self.cross_parameters + sum(
            (before + 1) * after
            for widths in (self.bottom, self.top_widths)
            for before, after in zip(widths, widths[1:])
        )


@dataclass(frozen=True, kw_only=True)
class HashedDLRMConfig:
    """A DLRM whose features share one physical table through a hash."""

    rows: int | Literal["auto"] = 2_000_000
    """Rows of the table; auto: 20 times the last-level cache, as far as memory allows."""
    dim: int = 256
    """Width of a table row."""
    bottom: tuple[int, ...] = (16, 8, 8)
    """Widths of the bottom MLP, the number of dense features first."""
    top: tuple[int, ...] = (32, 16, 1)
    """Widths of the top MLP after the interaction; the last is 1."""
    bag: Literal["auto", "native", "reference"] = "auto"
    """Implementation of lookups and sparse updates: native (C with prefetching), reference (plain torch), or auto."""

    features: ClassVar[tuple[str, ...]] = ("user", "item", "occupation")

    def __post_init__(self) -> None:
        rows = self.rows
        require(rows == "auto" or 1 <= rows <= 1 << 31, "model.rows", rows, f"auto, or 1 to {1 << 31}")
        self.dlrm(1)

    def dlrm(self, rows: int) -> DLRMConfig:
        """The same model as a DLRMConfig with one table."""
        return DLRMConfig(features=self.features, rows=(rows,), dim=self.dim, bottom=self.bottom, top=self.top)


DENSE = {"sgd": (0, 2), "adagrad": (1, 6), "adamw": (2, 14)}
"""State numbers and FLOPs per parameter of each dense optimizer."""


def dense_optimizer(name: str) -> tuple[int, int]:
    """State numbers and FLOPs per dense parameter of an optimizer, or of the counterpart of a rule of tables."""
    return DENSE[RULES[name].dense if name in RULES else name]


def dlrm_step(config: DLRMConfig, batch: int, *, unique: int | None = None, ids: int | None = None) -> dict[str, Cost]:
    """A training step with dense table gradients and AdamW for everything.

    `ids` in a batch, by default one per bag; `unique` rows among them, by default as many as possible.
    """
    bags = batch * len(config.features)
    ids = bags if ids is None else ids
    most = sum(min(batch, rows) for rows in config.rows)
    return {
        **_forward(config, batch, ids, most if unique is None else unique),
        **_backward(config, batch),
        "embedding_backward": bag_backward_dense(ids, bags, config.dim, sum(config.rows)),
        "update": adamw_update(config.table_parameters + config.mlp_parameters),
    }


def hashed_dlrm_step(
    config: DLRMConfig, batch: int, *, ids: float, unique: float, optimizer: str = "rowwise-adagrad"
) -> dict[str, Cost]:
    """A training step with one hashed table and sparse updates; `unique` rows among the `ids` of a batch."""
    return {
        "hash": Cost(0, round(2 * INDEX * ids)),
        **_forward(config, batch, round(ids), round(unique)),
        **_backward(config, batch),
        "embedding_backward": Cost(0, round(ids * (INDEX + 2 * 4))),
        "dense_update": adamw_update(config.mlp_parameters),
        "sparse_update": _sparse_update(round(ids), round(unique), config.dim, optimizer),
    }


def sparse_dlrm_step(
    config: DLRMConfig, batch: int, *, ids: int, unique: int, optimizer: str, dense: str = ""
) -> dict[str, Cost]:
    """A training step with a table per feature, sparse updates, and drawn data; `dense` is the optimizer of the rest,
    by default the counterpart of that of the tables."""
    bags = batch * len(config.features)
    states, flops = dense_optimizer(dense or optimizer)
    return {
        "data": Cost(0, batch_bytes(config, batch, ids)),
        **_forward(config, batch, ids, unique),
        **_backward(config, batch),
        "embedding_backward": Cost(0, ids * (2 * INDEX + 2 * 4)),
        "sparse_update": _sparse_update(ids, unique, config.dim, optimizer, bags),
        "dense_update": dense_update(config.mlp_parameters, states=states, flops=flops),
    }


def _sparse_update(ids: int, unique: int, dim: int, optimizer: str, bags: int | None = None) -> Cost:
    # A planned AdamW counts its tables itself.
    rule = RULES.get(optimizer, RULES["adam"])
    return sparse_update(ids, unique, dim, state=rule.state_width(dim), flops=rule.flops, bags=bags)


def batch_bytes(config: DLRMConfig, batch: int, ids: int) -> int:
    """Bytes of a batch: dense features, labels, ids and offsets."""
    return FLOAT * batch * (config.dense + 1) + INDEX * (ids + batch * len(config.features) + 1)


def _forward(config: DLRMConfig, batch: int, ids: int, unique: int) -> dict[str, Cost]:
    bags = batch * len(config.features)
    output = FLOAT * batch * config.interaction_width
    return {
        "bottom": mlp_forward(config.bottom, batch),
        "embedding": bag_forward(ids, bags, config.dim, unique),
        "interaction": Cost(_pair_flops(config, batch), _vector_bytes(config, batch) + output) + _cross(config, batch),
        "top": mlp_forward(config.top_widths, batch),
        "loss": Cost(10 * batch, 3 * FLOAT * batch),
    }


def _backward(config: DLRMConfig, batch: int) -> dict[str, Cost]:
    output = FLOAT * batch * config.interaction_width
    return {
        "loss_backward": Cost(3 * batch, 3 * FLOAT * batch),
        "top_backward": mlp_backward(config.top_widths, batch, input_gradient=True),
        "interaction_backward": (
            Cost(2 * _pair_flops(config, batch), output + 2 * _vector_bytes(config, batch))
            + _cross_backward(config, batch)
        ),
        "bottom_backward": mlp_backward(config.bottom, batch, input_gradient=False),
    }


def _pair_flops(config: DLRMConfig, batch: int) -> int:
    return 2 * batch * config.pairs * config.dim


def _cross(config: DLRMConfig, batch: int) -> Cost:
    """Two products per layer; a layer reads its input and the first layer's, and writes its two results."""
    if config.interaction != "dcn":
        return Cost()
    wide, low = batch * config.interaction_width, batch * config.cross_rank
    return Cost(
        2 * 2 * wide * config.cross_rank * config.cross_layers,
        FLOAT * (config.cross_parameters + config.cross_layers * (5 * wide + 2 * low)),
    )


def _cross_backward(config: DLRMConfig, batch: int) -> Cost:
    """Twice the products; a layer reads the saved tensors and two gradients, and writes those two and its own."""
    if config.interaction != "dcn":
        return Cost()
    wide, low = batch * config.interaction_width, batch * config.cross_rank
    return Cost(
        2 * _cross(config, batch).flops,
        FLOAT * (2 * config.cross_parameters + config.cross_layers * (9 * wide + 3 * low)),
    )


def _vector_bytes(config: DLRMConfig, batch: int) -> int:
    return FLOAT * batch * (config.bottom[-1] + len(config.features) * config.dim)


def dlrm_memory(
    config: DLRMConfig, batch: int, *, rule: str | None = None, dense: str = "adamw", ids: int = 0, drawn: bool = False
) -> dict[str, int]:
    """Bytes that a training step needs: parameters, optimizer state, gradients, saved activations.

    `rule`: that of tables whose used rows alone are updated, without a gradient of the tables' size; by default they
    have the `dense` optimizer. `ids`: of a batch with such tables. `drawn`: the batch is made on the device.
    """
    mlps, tables = FLOAT * config.mlp_parameters, FLOAT * config.table_parameters
    states, _ = dense_optimizer(dense)
    row_states = states * tables if rule is None else FLOAT * sum(config.rows) * RULES[rule].state_width(config.dim)
    sorted_ids = 0 if rule is None else ids * (3 * INDEX + 3 * 4)
    return {
        "parameters": tables + mlps,
        "optimizer": row_states + states * mlps,
        "gradients": mlps + (tables if rule is None else 0),
        "activations": _activations(config, batch) + sorted_ids + drawn * batch_bytes(config, batch, ids),
    }


def _activations(config: DLRMConfig, batch: int) -> int:
    cross = config.cross_layers * (2 * config.interaction_width + config.cross_rank)
    widths = sum(config.bottom) + len(config.features) * config.dim + sum(config.top_widths)
    return FLOAT * batch * (widths + (cross if config.interaction == "dcn" else 0))
