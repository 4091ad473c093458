"""The options of training on several ranks, and what a rank needs of the tables. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ..config import require, within
from ..errors import ConfigError, did_you_mean
from ..measure.cost import FLOAT

Kind = Literal["row", "column", "table", "data-parallel"]
KindOrAuto = Literal["row", "column", "table", "data-parallel", "auto"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KINDS_OR_AUTO: tuple[KindOrAuto, ...] = get_args(KindOrAuto)
PRECISIONS = ("fp32", "fp16", "bf16")
BUCKET_BYTES = 4 << 20
"""Size from which dense gradients are sent during the backward pass. An all-reduce between hosts takes about 50 us
whatever it sends; a 400 Gb/s link carries 2.5 MB in that time, slower ones less. A bucket is somewhat larger, so that
most of its time is transfer, and no larger than that, since the last bucket overlaps with nothing."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Options of a run with several ranks (`recperf run --ranks N`, or torchrun); a single process ignores them."""

    sharding: str = ""
    """Sharding of tables: a kind for all, for single ones, or both, as in table,item_id=column. Kinds are row, column,
    table, data-parallel (copies on all ranks) and auto, which is row or table and the default. Next-item models have
    copies by default; row divides the items among the ranks."""
    all_to_all: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Precision in which rows and their gradients are sent."""
    pipeline: bool = True
    """Send the ids of the next batch while this one is computed; the results stay the same to the bit."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Sum dense gradients in buckets during the backward pass. auto: on GPUs, and on CPUs where the ranks leave a core
    free: sums are computed by a thread of their own."""
    balance: bool = True
    """Deal the samples of a batch to ranks by counted work, so that none waits for long histories."""
    timeout_s: float = 300.0
    """Seconds that a rank waits for the others before it fails. Ranks also wait for each part of a checkpoint: for the
    slowest rank to write and verify its shards, and for rank 0 to commit."""

    def __post_init__(self) -> None:
        require(self.all_to_all in PRECISIONS, "distributed.all_to_all", self.all_to_all, ", ".join(PRECISIONS))
        require(self.overlap in ("auto", "on", "off"), "distributed.overlap", self.overlap, "auto, on, off")
        within(1.0, self.timeout_s, 86_400.0, "distributed.timeout_s")
        self.shardings  # noqa: B018

    @property
    def kind(self) -> KindOrAuto:
        """The kind of the tables that are not named."""
        first = self.sharding.partition(",")[0].strip()
        return first if first in KINDS_OR_AUTO else "auto"

    @property
    def shardings(self) -> dict[str, KindOrAuto]:
        """The kinds of the tables that are named."""
        pairs: dict[str, str] = {}
        parts = [part.strip() for part in self.sharding.split(",")]
        if parts[0] in KINDS_OR_AUTO:
            del parts[0]
        for part in filter(None, parts):
            table, equals, kind = (piece.strip() for piece in part.partition("="))
            if not equals or not table or kind not in KINDS_OR_AUTO or table in pairs:
                allowed = ", ".join(KINDS_OR_AUTO)
                problem = "is listed twice" if table in pairs else f"must be table=value with one of {allowed}"
                if part in KINDS_OR_AUTO:
                    problem = "applies to all tables: list it first and once"
                raise ConfigError(
                    f"distributed.sharding: {part!r} {problem}",
                    where={"field": "distributed.sharding", "known": allowed},
                )
            pairs[table] = kind
        return cast(dict[str, KindOrAuto], pairs)

    def require_copies(self, of: str, *, rows: bool = False) -> None:
        """Fail on options of tables that are divided, where every rank has a copy of all weights, but for `rows`."""
        allowed = f"row, or none: every rank of {of} has all weights" if rows else f"none: every rank of {of} has all "
        allowed += "" if rows else "weights"
        require(not self.sharding or (rows and self.sharding == "row"), "distributed.sharding", self.sharding, allowed)
        sent = self.all_to_all
        require(sent == "fp32", "distributed.all_to_all", sent, f"fp32: ranks of {of} send no rows to each other")

    def require_tables(self, tables: Iterable[str]) -> None:
        """Fail on a table that the model does not have."""
        known = tuple(tables)
        for table in self.shardings:
            if table not in known:
                raise ConfigError(
                    f"distributed.sharding names table {table!r}, which the model does not have"
                    + did_you_mean(table, known),
                    where={"field": "distributed.sharding", "known": ", ".join(known)},
                )


@dataclass(frozen=True, kw_only=True)
class Table:
    name: str
    rows: int
    dim: int
    ids: float
    """Ids that a sample looks up in it."""
    vectors: float
    """Vectors that a sample needs from it: one for each id, or one for each bag of ids."""
    distinct: Callable[[int], float]
    """Expected number of different rows among the ids of that many samples."""
    pooled: bool = False
    """Rows of a bag are summed where they are, and the sum is sent; else each distinct row is sent once."""
    skewed: bool = True
    """Its ids follow the popularity of the data; ids of a hashed feature cross are spread by the hash."""
    state: int = 1
    """Numbers that the optimizer stores for a row."""
    copied: str = ""
    """Why every rank must have a copy; empty: it can be sharded."""

    @property
    def bytes(self) -> int:
        return FLOAT * self.rows * self.dim

    def sent_vectors(self, batch: int) -> float:
        """Vectors that a rank with `batch` samples receives."""
        return self.vectors * batch if self.pooled else min(self.ids * batch, self.distinct(batch))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a rank's batch needs of the tables, and of its device beside them."""

    tables: tuple[Table, ...]
    batch: int
    """Samples of one rank."""
    other_bytes: int = 0
    """Memory for everything but tables and what is sent of them: dense parameters, activations, inputs."""
