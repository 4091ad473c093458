"""FLOPs and bytes of a training step of DLRMv4, part by part, from its config and the lengths of a batch. Torch-free.

FLOPs are those of matrix products, a multiply-add counted as two; all other arithmetic is hidden behind its memory
traffic. Bytes are the unavoidable ones of a part: inputs read and outputs written once, no intermediates. Attention
is counted as in published figures: half of each row's square, two products forward and five backward. Parts have the
names of the spans that time them; those of the backward pass end in `_backward`.

A row is one sample's tokens (context, history, candidate), a position one token of history or candidate, a triple a
distinct (item, artist, album).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...config import require
from ...data.streaming.features import RATES
from ...measure.cost import FLOAT, INDEX, Cost
from .config import ACTIONS, FORWARD, DLRMv4Config, HSTUConfig

UNIQUE = {"item_id": 0.024, "album_id": 0.015, "artist_id": 0.006}
"""Distinct rows per position in batches of 1024 of the benchmark's data."""

BACKWARD = tuple(f"{name}_backward" for name in reversed(FORWARD))
RECOMPUTE = "recompute"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The properties of a batch, or of a micro-batch, that determine its cost."""

    lengths: tuple[int, ...]
    """Tokens of every row."""
    triples: int
    """Distinct (item, artist, album) among its positions."""

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def positions(self, config: DLRMv4Config) -> int:
        return self.tokens - config.context_tokens * self.batch


def load_of(config: DLRMv4Config, lengths: Sequence[int], *, triples: int | None = None) -> Load:
    """Describe a batch by its lengths; without `triples`, by the benchmark's share of distinct items."""
    least = config.context_tokens + 1
    require(all(length >= least for length in lengths), "lengths", min(lengths, default=0), f"at least {least} each")
    if triples is None:
        triples = usual_rows(config, lengths)["item_id"]
    return Load(lengths=tuple(lengths), triples=triples)


def full_load(config: DLRMv4Config, batch: int) -> Load:
    """A batch in which every row has the maximum length."""
    return load_of(config, (config.hstu.max_length,) * batch)


def usual_rows(config: DLRMv4Config, lengths: Sequence[int]) -> dict[str, int]:
    """Distinct rows that a batch looks up in each table: the benchmark's share of its positions, in context tables one
    per sample, and at most the rows of the table."""
    batch = len(lengths)
    positions = sum(lengths) - config.context_tokens * batch
    shares = {name: max(min(batch, positions), round(share * positions)) for name, share in UNIQUE.items()}
    return {name: min(shares.get(name, batch), most) for name, most in config.table_rows.items()}


def published_flops(hstu: HSTUConfig, length: int) -> float:
    """FLOPs of one sample's STU layers, forward and backward, all of them in full, by the benchmark's formula."""
    widths = hstu.heads * (hstu.qk_dim + hstu.v_dim)
    products = 6 * length * hstu.dim * 2 * widths + 6 * length * 3 * hstu.attention_width * hstu.dim
    return hstu.layers * (products + 7 * (length * length / 2) * widths)


def attention_flops(hstu: HSTUConfig, lengths: Sequence[int], *, backward: bool = False) -> int:
    """FLOPs of the attention of one layer that computes every token."""
    pairs_twice = sum(length * length for length in lengths)
    forward = pairs_twice * hstu.heads * (hstu.qk_dim + hstu.v_dim)
    return forward * 5 // 2 if backward else forward


def forward(config: DLRMv4Config, load: Load) -> dict[str, Cost]:
    """The cost by part, in the order of `FORWARD`; rows are picked from those that `lookup` fetched."""
    width, dim, table = activation_bytes(config), config.dim, config.table_dim
    batch, tokens, positions = load.batch, load.tokens, load.positions(config)
    encoded, actions = encoded_rows(config, load)
    per_sample = (3 + config.context_tokens) * batch
    summed = load.triples if config.shared_encoders else 3 * positions
    times = INDEX * (tokens + positions)
    picks = 3 * encoded + per_sample
    return {
        "embedding": Cost(0, picks * (2 * FLOAT * table + INDEX)),
        "encoders": (
            _encoder(encoded, table, config.encoder_hidden, dim, width)
            + _encoder(encoded, 2 * table, config.encoder_hidden, dim, width)
            + _encoder(actions, config.action_width, config.encoder_hidden, dim, width)
        ),
        "context": _linear(batch, table, dim, width, copies=config.context_tokens),
        "position_time": Cost(
            0, width * dim * (summed + config.context_tokens * batch + tokens) + times + _position_bytes(config, load)
        ),
        **_stu_forward(config.hstu, load, width),
        "postprocessor": _linear(batch, dim + 4, dim, width) + Cost(0, 2 * FLOAT * batch * dim),
        "item_tower": _encoder(batch, 3 * table, config.item_hidden, dim, FLOAT),
        "head": _recent(config, batch, width)
        + _linear(batch, config.head_features, config.head_hidden, FLOAT)
        + _linear(batch, config.head_hidden, 1, FLOAT)
        + Cost(0, FLOAT * batch * (2 * dim + 2 * config.head_hidden))
        + _rates(config, batch),
        "loss": Cost(0, 3 * FLOAT * batch),
    }


def _recent(config: DLRMv4Config, batch: int, width: int) -> Cost:
    """The encoder of the last events, where the model has one."""
    if not config.recent:
        return Cost()
    gathered = Cost(0, 2 * width * batch * config.recent_features)
    return gathered + _encoder(batch, config.recent_features, config.head_hidden, config.dim, width)


def _rates(config: DLRMv4Config, batch: int) -> Cost:
    """The encoder of running rates, where the model has one."""
    hidden = config.rates_hidden
    if not hidden:
        return Cost()
    products = _linear(batch, len(RATES), hidden + 1, FLOAT) + _linear(batch, hidden, 1, FLOAT)
    return products + Cost(0, 2 * FLOAT * batch * hidden)


def backward(config: DLRMv4Config, load: Load) -> dict[str, Cost]:
    """The cost by part, in the order of `BACKWARD`. Products count twice; everything read in the forward pass is read
    again, and every input and output has a gradient."""
    ahead = forward(config, load)
    table, encoded = config.table_dim, encoded_rows(config, load)[0]
    per_sample = (3 + config.context_tokens) * load.batch
    costs = {name: Cost(2 * cost.flops, 2 * cost.bytes) for name, cost in ahead.items()}
    costs |= _stu_backward(config.hstu, load, activation_bytes(config))
    costs["position_time"] = Cost(0, ahead["position_time"].bytes)
    # Gradients of the picks are read by row, and one sum is written per row: at most one per pick.
    picks = 3 * encoded + per_sample
    costs["embedding"] = Cost(0, picks * (2 * FLOAT * table + INDEX))
    return {name: costs[name.removesuffix("_backward")] for name in BACKWARD}


def passes(config: DLRMv4Config, load: Load) -> dict[str, int]:
    """Bytes of the kernels besides matrix products, by part: norms, gates, dropout, casts, gathers and sums run as
    passes of their own. A product hides its own reading and writing. Parts of single samples are left out."""
    hstu, width, tokens = config.hstu, activation_bytes(config), load.tokens
    full, last = _layers(hstu, load)
    dim, wide = hstu.dim, hstu.attention_width
    encoded, actions = encoded_rows(config, load)
    norms = width * (2 * encoded + actions) * (config.encoder_hidden + config.dim)
    looked_up, rows = encoded * 3 * config.table_dim, load.triples if config.shared_encoders else load.positions(config)
    # Rows of the tables are cast; those of artist and album are copied side by side, and their gradients apart.
    casts = looked_up * (FLOAT + width) + looked_up * 2 // 3 * 2 * FLOAT
    # Of the gradients of tokens dropout writes one, and sums by row, and by age and action, read two more. Sums by row
    # are written, scaled and cast.
    summed = width * tokens * dim * (4 if config.input_dropout else 3) + rows * dim * (4 * FLOAT + width)
    if not config.shared_encoders:
        # Copies of the gradient for entities and actions.
        summed += 2 * width * rows * dim
    ahead = forward(config, load)
    return {
        "embedding": ahead["embedding"].bytes,
        "position_time": ahead["position_time"].bytes,
        # With the sum of both encoders.
        "encoders": 2 * norms + casts + 3 * width * encoded * dim,
        # The norm of the input, read and written.
        "stu_input": width * tokens * 2 * dim * (full + last),
        # One query per row uses keys and values once, so reading them takes longer than the products.
        "attention": width * tokens * (hstu.key_width + wide) * last,
        # Gate and attention read; gate, attention and their gated norm written with dropout.
        "stu_output": width * tokens * 5 * wide * full,
        # Gradients of the three, gate and attention read; the three and gradients of gate and attention written.
        "stu_output_backward": width * tokens * 10 * wide * full,
        "attention_backward": width * tokens * 2 * (hstu.key_width + wide) * last,
        # The norm: its input, gradient and residual read, the gradient of the input and the normed rows written. The
        # last layer has no residual, and a pass for the gradient of its bias.
        "stu_input_backward": width * tokens * (5 * dim * full + (4 * dim + hstu.key_width + wide) * last),
        # With the sums of gradients for the biases.
        "encoders_backward": 4 * norms + casts,
        "position_time_backward": summed,
        # Read by row. Candidates are picked from the same rows: their gradient fills as many, and is added.
        "embedding_backward": FLOAT * (5 * looked_up + 3 * load.triples * config.table_dim),
    }


def recomputed(config: DLRMv4Config, load: Load) -> Cost:
    """The cost of recomputation in layers that save only their input. It does not count towards the MFU."""
    if not config.hstu.recompute:
        return Cost()
    again = _stu_forward(config.hstu, load, activation_bytes(config))
    return again["stu_input"] + again["attention"]


def stack_flops(hstu: HSTUConfig, lengths: Sequence[int]) -> int:
    """FLOPs of the STU layers, forward and backward, for rows of these lengths."""
    load = Load(lengths=tuple(lengths), triples=0)
    passes = (_stu_forward(hstu, load, FLOAT), _stu_backward(hstu, load, FLOAT))
    return sum(cost.flops for parts in passes for cost in parts.values())


def sample_flops(config: DLRMv4Config) -> tuple[float, float, float]:
    """FLOPs that a step executes for one row of L tokens, recomputation included: coefficients of 1, L and L^2."""
    # Many equal rows, so that the distinct items of a batch, which are whole numbers, divide among them.
    samples, least = 1000, config.context_tokens + 1
    lengths = [least, least + 1000, least + 2000]
    flops = []
    for length in lengths:
        positions = samples * (length - config.context_tokens)
        load = Load(lengths=(length,) * samples, triples=round(UNIQUE["item_id"] * positions))
        parts = [*forward(config, load).values(), *backward(config, load).values(), recomputed(config, load)]
        flops.append(sum(cost.flops for cost in parts) / samples)
    (x, y, z), (at_x, at_y, at_z) = lengths, flops
    first = (at_y - at_x) / (y - x)
    square = ((at_z - at_y) / (z - y) - first) / (z - x)
    linear = first - square * (x + y)
    return at_x - linear * x - square * x * x, linear, square


def lookup(config: DLRMv4Config, rows: int) -> Cost:
    """Distinct rows copied out of their tables, once per batch for any number of micro-batches."""
    return Cost(0, rows * (2 * FLOAT * config.table_dim + INDEX))


def updates(config: DLRMv4Config, rows: int, *, state: int = 1) -> dict[str, Cost]:
    """Adam of the dense parameters, after the norm of their gradients, and that of the distinct rows, each with `state`
    numbers of state: row-wise Adagrad has one."""
    dense = config.dense_parameters
    sparse = rows * (FLOAT * (3 * config.table_dim + 2 * state) + INDEX)
    return {"dense_update": Cost(0, FLOAT * dense * (1 + 7)), "sparse_update": Cost(0, sparse)}


def step(config: DLRMv4Config, loads: Sequence[Load], *, rows: int | None = None, state: int = 1) -> dict[str, Cost]:
    """A training step of one batch in one or several micro-batches.

    `rows`: distinct rows of all tables in the whole batch, looked up and updated once; by default the usual number.
    `state`: numbers of optimizer state of a row.
    """
    if rows is None:
        rows = sum(usual_rows(config, [length for load in loads for length in load.lengths]).values())
    total = dict.fromkeys((*FORWARD, *BACKWARD), Cost()) | {"embedding": lookup(config, rows)}
    again = Cost()
    for load in loads:
        for name, cost in (forward(config, load) | backward(config, load)).items():
            total[name] += cost
        again += recomputed(config, load)
    if config.hstu.recompute:
        total[RECOMPUTE] = again
    return total | updates(config, rows, state=state)


def model_flops(parts: Mapping[str, Cost]) -> int:
    """FLOPs of a step without recomputation: the numerator of the MFU."""
    return sum(cost.flops for name, cost in parts.items() if name != RECOMPUTE)


def activation_bytes(config: DLRMv4Config) -> int:
    """Bytes per number of an activation in the encoders and layers."""
    return 2 if config.precision == "bfloat16" else FLOAT


def encoded_rows(config: DLRMv4Config, load: Load) -> tuple[int, int]:
    """Rows that pass through the encoders of content and extra features, and through that of actions."""
    positions = load.positions(config)
    return (load.triples, ACTIONS + 1) if config.shared_encoders else (positions, positions)


def _linear(rows: int, before: int, after: int, width: int, *, copies: int = 1) -> Cost:
    """Products with `copies` matrices for this many rows each; weights are float32 and read once."""
    moved = width * rows * (before + after) + FLOAT * (before + 1) * after
    return Cost(2 * copies * rows * before * after, copies * moved)


def _encoder(rows: int, before: int, hidden: int, after: int, width: int) -> Cost:
    """Linear, swish norm, linear, norm."""
    norms = Cost(0, 2 * width * rows * (hidden + after))
    return _linear(rows, before, hidden, width) + _linear(rows, hidden, after, width) + norms


def _position_bytes(config: DLRMv4Config, load: Load) -> int:
    """Bytes of the rows of both tables that are read, each counted once."""
    return FLOAT * config.dim * (min(load.longest, config.positions) + min(config.time_buckets + 1, load.tokens))


def _layers(hstu: HSTUConfig, load: Load) -> tuple[int, int]:
    """The number of layers that compute every token, and of those that compute the candidate alone."""
    last = int(hstu.candidate_only)
    return hstu.layers - last, last


def _stu_forward(hstu: HSTUConfig, load: Load, width: int) -> dict[str, Cost]:
    full, last = _layers(hstu, load)
    dim, keys, wide = hstu.dim, hstu.key_width, hstu.attention_width
    tokens, batch = load.tokens, load.batch
    weights = FLOAT * (dim + 1) * hstu.uvqk_width
    out = FLOAT * 3 * wide * dim
    full_layer = {
        "stu_input": Cost(2 * tokens * dim * hstu.uvqk_width, width * tokens * (dim + hstu.uvqk_width) + weights),
        "attention": Cost(attention_flops(hstu, load.lengths), width * tokens * 2 * (keys + wide)),
        "stu_output": Cost(2 * tokens * 3 * wide * dim, width * tokens * 2 * (wide + dim) + out),
    }
    # Keys and values of all tokens, gate and query of one token per row, which attends to its whole row.
    last_layer = {
        "stu_input": Cost(
            2 * (tokens + batch) * dim * (keys + wide),
            width * (tokens * (dim + keys + wide) + batch * (keys + wide)) + weights,
        ),
        "attention": Cost(2 * tokens * (keys + wide), width * (tokens + batch) * (keys + wide)),
        "stu_output": Cost(2 * batch * 3 * wide * dim, width * batch * 2 * (wide + dim) + out),
    }
    return {name: _times(full_layer[name], full) + _times(last_layer[name], last) for name in full_layer}


def _stu_backward(hstu: HSTUConfig, load: Load, width: int) -> dict[str, Cost]:
    """Inputs and the gradient of the output are read, gradients of the inputs written."""
    full, last = _layers(hstu, load)
    dim, keys, wide = hstu.dim, hstu.key_width, hstu.attention_width
    tokens, batch = load.tokens, load.batch
    weights = 2 * FLOAT * (dim + 1) * hstu.uvqk_width
    out = 2 * FLOAT * 3 * wide * dim
    full_layer = {
        "stu_input": Cost(4 * tokens * dim * hstu.uvqk_width, width * tokens * (2 * dim + hstu.uvqk_width) + weights),
        "attention": Cost(attention_flops(hstu, load.lengths, backward=True), width * tokens * (4 * keys + 3 * wide)),
        "stu_output": Cost(4 * tokens * 3 * wide * dim, width * tokens * (4 * wide + dim) + out),
    }
    last_layer = {
        "stu_input": Cost(
            4 * (tokens + batch) * dim * (keys + wide),
            width * (tokens * (2 * dim + keys + wide) + batch * (keys + wide)) + weights,
        ),
        "attention": Cost(5 * tokens * (keys + wide), width * (tokens * 2 * (keys + wide) + batch * (2 * keys + wide))),
        "stu_output": Cost(4 * batch * 3 * wide * dim, width * batch * (4 * wide + dim) + out),
    }
    return {name: _times(full_layer[name], full) + _times(last_layer[name], last) for name in full_layer}


def _times(cost: Cost, count: int) -> Cost:
    return Cost(count * cost.flops, count * cost.bytes)
