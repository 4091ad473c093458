"""The configuration of DLRMv4 and its HSTU layers, and the sizes that follow from it. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from ...config import require, within
from ...data.streaming.features import CANDIDATE, CONTEXT, CROSSES, HISTORY, RATES
from ...measure.spans import declare

PUBLISHED_ROWS = {
    "item_id": 9_390_624,
    "artist_id": 1_293_395,
    "album_id": 3_367_692,
    "uid": 1_000_001,
    **{name: rows for name, (_, rows) in CROSSES.items()},
}
"""Rows of every table of the published model."""

FEATURE_TABLES = {**{name: name for name in (*CONTEXT, *HISTORY)}, **dict(zip(CANDIDATE, HISTORY))}
"""The table of each feature of a batch; the candidate uses the tables of the history."""

FORWARD = (
    "embedding",
    "encoders",
    "context",
    "position_time",
    "stu_input",
    "attention",
    "stu_output",
    "postprocessor",
    "item_tower",
    "head",
    "loss",
)
"""The spans of a forward pass in order; counted work has the same names."""
declare("forward", *(name for name in FORWARD if name not in ("embedding", "loss")))

ACTIONS = 8
"""Number of actions: three bits."""
CANDIDATE_CODE = ACTIONS
"""The action code of a candidate, whose action is to be predicted."""

EPS = 1e-6
"""Added to the variance in layer norms of STU layers; elsewhere it is torch's default."""
Precision = Literal["float32", "bfloat16"]
AttentionScale = Literal["fixed", "batch-max"]


@dataclass(frozen=True, kw_only=True)
class HSTUConfig:
    layers: int = 3
    """Number of STU layers."""
    dim: int = 512
    """Width of a token."""
    heads: int = 4
    """Attention heads."""
    qk_dim: int = 128
    """Width of a query and a key per head."""
    v_dim: int = 128
    """Width of a value per head."""
    max_length: int = 4096
    """Maximum number of tokens in a row: context, history and candidate."""
    attention_scale: AttentionScale = "fixed"
    """Divisor of the attention scores: max_length, or the length of the longest row of the batch. The latter is the
    published model's; it makes a score depend on the other rows of the batch."""
    dropout: float = 0.1
    """Dropout rate of a layer's output features."""
    candidate_only: bool = True
    """Compute the last layer's output for the candidate only; the others are not used."""
    recompute: bool = False
    """Save only a layer's input for the backward pass and recompute the rest: less memory, more work."""

    def __post_init__(self) -> None:
        within(1, self.layers, 1024, "hstu.layers")
        within(1, self.dim, 1 << 16, "hstu.dim")
        within(1, self.heads, 1024, "hstu.heads")
        within(1, self.qk_dim, 1 << 12, "hstu.qk_dim")
        within(1, self.v_dim, 1 << 12, "hstu.v_dim")
        within(1, self.max_length, 1 << 20, "hstu.max_length")
        require(0 <= self.dropout < 1, "hstu.dropout", self.dropout, "0 to below 1")

    @property
    def attention_width(self) -> int:
        """Width of the values, and of the attention's output, of all heads."""
        return self.heads * self.v_dim

    @property
    def key_width(self) -> int:
        """Width of the queries, and of the keys, of all heads."""
        return self.heads * self.qk_dim

    @property
    def uvqk_width(self) -> int:
        """Width of gates, values, queries and keys together."""
        return 2 * (self.attention_width + self.key_width)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: two norms, the projection with bias, the output matrix without."""
        projection = (self.dim + 1) * self.uvqk_width
        return 2 * self.dim + projection + 2 * self.attention_width + 3 * self.attention_width * self.dim


@dataclass(frozen=True, kw_only=True)
class DLRMv4Config:
    hstu: HSTUConfig = field(default_factory=HSTUConfig)
    """The HSTU layers."""
    table_dim: int = 512
    """Width of a table row."""
    row_scale: float = 1.0
    """Scales the published number of rows of each table; ids are taken modulo the rows."""
    rows: tuple[int, ...] = ()
    """Rows of the tables before scaling, in the order of `tables`; empty: the published numbers."""
    encoder_hidden: int = 256
    """Hidden width of the encoders of content, extra features and actions."""
    action_dim: int = 8
    """Width of the embedding of one action bit."""
    item_hidden: int = 512
    """Hidden width of the candidate's encoder."""
    head_hidden: int = 512
    """Hidden width of the head."""
    positions: int = 8192
    """Rows of the position table."""
    time_buckets: int = 2048
    """Buckets of the time before the candidate; one more holds everything older."""
    rates_hidden: int = 0
    """Hidden width of the encoder of running rates of user and item, whose logit is added to the head's; 0: the model
    reads no such rates."""
    token_scale: float = 0.0
    """Factor of the tokens before positions are added; 0: sqrt(hstu.dim), as published, beside which the order of a
    short history is invisible at the start."""
    position_std: float = 0.0
    """Standard deviation of the position table at the start; 0: uniform in +-1/sqrt(positions), as published."""
    recent: int = 0
    """Number of last events whose tokens, beside the candidate's, also reach the head directly, through an encoder, not
    only through attention, which learns slowly where to look; 0: none, as published."""
    input_dropout: float = 0.2
    """Dropout rate of the token features."""
    shared_encoders: bool = True
    """Encode each distinct item of a batch, and each kind of action, once instead of once per position."""
    precision: Precision = "float32"
    """Data type of the encoders and HSTU layers; the candidate's encoder, head and loss are float32."""
    loss_scale: float = 0.2
    """Factor of the loss, the mean binary cross entropy."""

    tables: ClassVar[tuple[str, ...]] = tuple(PUBLISHED_ROWS)
    context: ClassVar[tuple[str, ...]] = CONTEXT

    def __post_init__(self) -> None:
        within(1, self.table_dim, 1 << 16, "model.table_dim")
        require(0 < self.row_scale <= 8, "model.row_scale", self.row_scale, "above 0, at most 8")
        count = len(self.tables)
        require(len(self.rows) in (0, count), "model.rows", self.rows, f"{count} numbers, or none")
        require(all(1 <= rows <= 1 << 40 for rows in self.rows), "model.rows", self.rows, f"1 to {1 << 40} each")
        for name in ("encoder_hidden", "action_dim", "item_hidden", "head_hidden"):
            within(1, getattr(self, name), 1 << 16, f"model.{name}")
        within(0, self.rates_hidden, 1 << 16, "model.rates_hidden")
        within(self.context_tokens + 1, self.positions, 1 << 24, "model.positions")
        within(1, self.time_buckets, 1 << 24, "model.time_buckets")
        within(0.0, self.token_scale, 1e6, "model.token_scale")
        within(0.0, self.position_std, 1e6, "model.position_std")
        within(0, self.recent, max(0, self.max_history), "model.recent")
        require(0 <= self.input_dropout < 1, "model.input_dropout", self.input_dropout, "0 to below 1")
        within(1e-6, self.loss_scale, 1e6, "model.loss_scale")
        least = self.context_tokens + 1
        require(
            self.hstu.max_length >= least,
            "hstu.max_length",
            self.hstu.max_length,
            f"at least {least}: the context tokens and the candidate",
        )

    @property
    def dim(self) -> int:
        return self.hstu.dim

    @property
    def context_tokens(self) -> int:
        return len(self.context)

    @property
    def max_history(self) -> int:
        """Maximum number of events in a history: what context and candidate leave free."""
        return self.hstu.max_length - self.context_tokens - 1

    @property
    def action_width(self) -> int:
        """Width of the embeddings of the three action bits together."""
        return 3 * self.action_dim

    @property
    def scale(self) -> float:
        """Factor of the tokens before positions are added."""
        return self.token_scale or math.sqrt(self.dim)

    @property
    def recent_features(self) -> int:
        """Numbers of the candidate and the last events, from which their encoder computes one vector."""
        return (1 + self.recent) * self.dim

    @property
    def head_features(self) -> int:
        """Numbers that the head reads: the product of user and candidate, and the vector of the last events."""
        return self.dim * (2 if self.recent else 1)

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each table, scaled."""
        full = self.rows or tuple(PUBLISHED_ROWS.values())
        return {name: max(1, round(rows * self.row_scale)) for name, rows in zip(self.tables, full)}

    @property
    def table_parameters(self) -> int:
        return sum(self.table_rows.values()) * self.table_dim

    @property
    def part_parameters(self) -> dict[str, int]:
        """Parameters outside the tables, by part."""
        dim, table = self.dim, self.table_dim
        return {
            "context": self.context_tokens * (table + 1) * dim,
            "content": _encoder(table, self.encoder_hidden, dim),
            "extra": _encoder(2 * table, self.encoder_hidden, dim),
            "action": 2 * self.action_width + _encoder(self.action_width, self.encoder_hidden, dim),
            "position": self.positions * dim,
            "time": (self.time_buckets + 1) * dim,
            "stu": self.hstu.layers * self.hstu.layer_parameters,
            "postprocessor": (dim + 4 + 1) * dim + 2 * dim,
            **({"recent": _encoder(self.recent_features, self.head_hidden, dim)} if self.recent else {}),
            "item_tower": _encoder(3 * table, self.item_hidden, dim),
            "head": (self.head_features + 3) * self.head_hidden + self.head_hidden + 1,
            **({"rates": (len(RATES) + 4) * self.rates_hidden + 1 + len(RATES) + 1} if self.rates_hidden else {}),
        }

    @property
    def dense_parameters(self) -> int:
        return sum(self.part_parameters.values())


def _encoder(before: int, hidden: int, after: int) -> int:
    """Parameters of two linear layers, each followed by a norm."""
    return (before + 3) * hidden + (hidden + 3) * after


def mlperf() -> DLRMv4Config:
    """The published benchmark: 150 billion parameters in tables, for many devices."""
    return DLRMv4Config(hstu=HSTUConfig(attention_scale="batch-max"), precision="bfloat16")


def gpu() -> DLRMv4Config:
    """The published model with a fifteenth of the table rows: 40 GB, for one large GPU."""
    return DLRMv4Config(row_scale=1 / 15, precision="bfloat16")


LAPTOP_ROWS = (3201, 406, 1136, 668, 26_680, 53_360, 16_008, 25_600, 9_720, 1336, 66_700)
"""Rows of the laptop's tables: one for every item, artist, album and user of its 160,000 embedded events."""


def laptop() -> DLRMv4Config:
    """The same model with small sizes, and no dropout: it sees too few samples to need it."""
    hstu = HSTUConfig(layers=2, dim=32, heads=2, qk_dim=16, v_dim=16, max_length=48, dropout=0.0)
    return replace(
        DLRMv4Config(hstu=hstu),
        table_dim=32,
        rows=LAPTOP_ROWS,
        encoder_hidden=32,
        item_hidden=64,
        head_hidden=64,
        positions=256,
        input_dropout=0.0,
    )
