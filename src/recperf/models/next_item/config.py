"""Configuration of the next-item model and the counted work of its steps. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import require, within
from ...measure.cost import FLOAT, INDEX, Cost, adamw_update, sparse_update
from ...measure.spans import declare
from ...ops.table_rules import TableRule

declare("forward", "tokens", kind="tables")
declare("forward", "stu_input", "stu_output", kind="products")
declare("forward", "attention_input", "attention_output", "feed_forward", kind="products")
declare("forward", "attention")
declare("forward", "softmax", part="loss", kind="products")

FULL_SOFTMAX_ITEMS, FULL_ON_GPU = 40_000, 1_048_576
"""Catalogues of at most this many items are scored whole at every position; on a GPU in bfloat16."""
FEED_FORWARD = 4
"""Width of a transformer's feed-forward layer over that of a token."""
CHUNK = 1 << 20
"""Scores of a step that the full loss holds at once on a CPU, with the gradients of all. Of more it holds none, and
computes the gradients of the items in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class NextItemConfig:
    """The blocks of an encoder over a user's items in time order, whose last output is compared with every item."""

    encoder: Literal["auto", "hstu", "transformer"] = "hstu"
    """hstu: gated SiLU attention with a bias by distance. transformer: softmax attention with rotary positions and a
    gated feed-forward layer, 4 times as wide as a token, both behind layer norms. auto: what is better for the data."""
    items: int = 0
    """Items of the catalogue; 0: as many as the data has."""
    feature_rows: int = 0
    """Values of all features of the items, and one for none: rows of a table whose sum is added to the embeddings of
    the items that have them. As many as the data has; 0: the items have no features."""
    dim: int = 50
    """Width of an item's embedding; 0, here and in the next three fields: by the data."""
    blocks: int = 8
    """Number of blocks."""
    heads: int = 2
    """Attention heads of a block."""
    head_dim: int = 25
    """Width of a head's queries, keys, values and, of hstu, gates."""
    max_length: int = 200
    """Items of a sequence that the model reads, the latest; hstu divides attention scores by it."""
    dropout: float = 0.2
    """Share of the numbers that training drops of the tokens and of each block's output."""
    temperature: float = 0.05
    """Divisor of the cosine of user vector and item."""
    time_buckets: int = 128
    """Buckets of the time between two events, each with a bias of the attention; 0: none, as where events have no
    times."""
    counts: Literal["on", "off"] = "off"
    """Whether counts of what follows the last items, of items of the same users and of events add to the model's
    scores, with weights that are fitted on the validation items."""
    loss: Literal["auto", "full", "sampled"] = "auto"
    """Softmax at every position over the whole catalogue, or over the next item and drawn ones. auto: the whole
    catalogue, up to 40,000 items; up to 1,048,576 on a GPU in bfloat16."""
    negatives: int = 1024
    """Items drawn evenly for the sampled loss: once for all positions of a step."""

    def __post_init__(self) -> None:
        within(0, self.items, 1 << 31, "model.items")
        within(0, self.feature_rows, 1 << 31, "model.feature_rows")
        within(0, self.dim, 4096, "model.dim")
        within(0, self.blocks, 256, "model.blocks")
        within(0, self.heads, 256, "model.heads")
        within(0, self.head_dim, 512, "model.head_dim")
        within(1, self.max_length, 1 << 16, "model.max_length")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "at least 0 and below 1")
        require(1 / 60 <= self.temperature <= 100, "model.temperature", self.temperature, "1/60 to 100")
        within(0, self.time_buckets, 1 << 16, "model.time_buckets")
        within(1, self.negatives, 1 << 20, "model.negatives")

    @property
    def width(self) -> int:
        """Numbers of all heads' queries, or keys, or values, of a token."""
        return self.heads * self.head_dim

    @property
    def full_softmax(self) -> bool:
        return self.loss == "full" or (self.loss == "auto" and self.items <= FULL_SOFTMAX_ITEMS)

    @property
    def candidates(self) -> int:
        """Items that each position is scored against."""
        return self.items if self.full_softmax else self.negatives + 1

    @property
    def part_parameters(self) -> dict[str, int]:
        dim, width, last = self.dim, self.width, 0
        block, positions = 4 * dim * width + width * dim + dim + self.max_length, {"positions": self.max_length * dim}
        if self.encoder == "transformer":
            positions = {}
            block, last = 4 * dim * width + 3 * FEED_FORWARD * dim * dim + 4 * dim, 2 * dim
        features = {"features": self.feature_rows * dim} if self.feature_rows else {}
        blocks = self.blocks * (block + self.time_buckets) + last
        return {**positions, "blocks": blocks, **features}

    @property
    def table_parameters(self) -> int:
        return (self.items + 1) * self.dim


def step(
    model: NextItemConfig, tokens: int, pairs: int, unique: int, *, rule: TableRule | None = None, gpu: bool = False,
    low: bool = False, averaged: bool = False,
) -> dict[str, Cost]:  # fmt: skip
    """Work of a training step on `tokens` positions that see `pairs` items, by span; `unique` items are distinct.
    `rule`: how the rows of items that a step uses are updated; None: all are, with the rest. `gpu`: the full loss holds
    its scores in parts, or in bfloat16 (`low`) none. `averaged`: the weights are averaged."""
    dim, width, blocks = model.dim, model.width, model.blocks
    values = FLOAT * tokens
    forward = {
        "tokens": Cost(
            (2 - (model.encoder == "transformer")) * tokens * dim, INDEX * tokens + FLOAT * unique * dim + values * dim
        ),
        "attention": Cost(blocks * 4 * pairs * width, blocks * values * 4 * width),
    }
    if model.encoder == "transformer":
        hidden = FEED_FORWARD * dim
        forward |= {
            "attention_input": Cost(blocks * 6 * tokens * dim * width, blocks * values * (dim + 3 * width)),
            "attention_output": Cost(blocks * 2 * tokens * width * dim, blocks * values * (width + 2 * dim)),
            "feed_forward": Cost(blocks * 6 * tokens * dim * hidden, blocks * values * (2 * dim + 5 * hidden)),
        }
    else:
        forward |= {
            "stu_input": Cost(blocks * 8 * tokens * dim * width, blocks * values * (dim + 4 * width)),
            "stu_output": Cost(blocks * 2 * tokens * width * dim, blocks * values * (2 * width + 2 * dim)),
        }
    # The loss computes gradients with its value: three products with the candidates, or two and the third later.
    candidates = min(model.candidates, model.items)
    scored, later = Cost(6 * tokens * candidates * dim, 2 * values * dim + 3 * FLOAT * candidates * dim), Cost()
    if model.full_softmax and gpu and low:
        # The scores are computed twice, and vectors are rounded to half the bytes first.
        scored = later = Cost(4 * tokens * candidates * dim, values * dim + FLOAT * candidates * dim)
    elif model.full_softmax and not gpu and tokens * candidates > CHUNK:
        scored = Cost(4 * tokens * candidates * dim, 2 * values * dim + FLOAT * candidates * dim)
        later = Cost(2 * tokens * candidates * dim, values * dim + 2 * FLOAT * candidates * dim)
    dense = sum(model.part_parameters.values())
    parameters = model.table_parameters + dense
    update = {"update": Cost((12 + 3 * averaged) * parameters, (7 + 3 * averaged) * FLOAT * parameters)}
    if rule is not None:
        ids = model.items + 1 if model.full_softmax else 2 * tokens + model.negatives
        unique = ids if model.full_softmax else unique
        rows = sparse_update(ids, unique, dim, state=rule.state_width(dim), flops=rule.flops)
        update = {"dense_update": adamw_update(dense), "sparse_update": rows}
    return {
        **forward,
        "softmax": scored,
        "backward": sum((Cost(2 * cost.flops, 2 * cost.bytes) for cost in forward.values()), later),
        **update,
    }


def memory(
    model: NextItemConfig, batch: int, *, rule: TableRule | None = None, averaged: bool = False
) -> dict[str, int]:
    """Bytes of a training step whose sequences all have the maximum length, by kind, and of the items' vectors in an
    evaluation, where the table may lie elsewhere."""
    tables, dense = model.table_parameters, sum(model.part_parameters.values())
    some_rows = rule is not None and not model.full_softmax
    states = 2 * tables if rule is None else (model.items + 1) * rule.state_width(model.dim)
    vectors = {"vectors": 2 * FLOAT * tables} if some_rows else {}
    saved = model.blocks * (5 * model.dim + 9 * model.width)
    if model.encoder == "transformer":
        # The attention pads its inputs and its output.
        saved = model.blocks * ((8 + 5 * FEED_FORWARD) * model.dim + 9 * model.width)
    return {
        "parameters": FLOAT * (tables + dense),
        "optimizer": FLOAT * (states + 2 * dense + averaged * (tables + dense)),
        "gradients": FLOAT * (dense + (not some_rows) * tables),
        "activations": FLOAT * batch * model.max_length * saved,
        **vectors,
    }
