"""The configuration of DLRM models, and the sizes that follow from it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import require, within
from ..measure.spans import declare

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
    interaction: Literal["concat", "dot"] = "concat"
    """Interaction of dense and sparse vectors: concatenation or pairwise dot products."""
    table_init_std: float = 0.01
    """Standard deviation of the initial table rows."""
    hash_seed: int = 0
    """Seed of the hash of the first feature; the others use the following numbers."""
    bag: Literal["auto", "native", "reference"] = "auto"
    """Implementation of lookups and sparse updates: native (C with prefetching), reference (plain torch), or auto."""
    huge_pages: bool = True
    """Ask the kernel for 2 MiB pages for the table."""

    features: tuple[str, ...] = ("user", "item", "occupation")
    """Names of the sparse features, in the order in which batches hold them."""

    def __post_init__(self) -> None:
        rows = self.rows
        require(rows == "auto" or 1 <= rows <= 1 << 31, "model.rows", rows, f"auto, or 1 to {1 << 31}")
        self.dlrm(1)

    def dlrm(self, rows: int) -> DLRMConfig:
        """The same model as a DLRMConfig with one table."""
        return DLRMConfig(
            features=self.features,
            rows=(rows,),
            dim=self.dim,
            bottom=self.bottom,
            top=self.top,
            interaction=self.interaction,
            table_init_std=self.table_init_std,
        )
