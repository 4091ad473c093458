"""Peak memory of a training step of DLRMv4, from its config and the lengths of a batch. Torch-free.

The peak is in the backward pass of one of the layers: all saved activations, and the temporaries of that layer. Tensors
with one number per sample, but not per token, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...measure.cost import FLOAT, INDEX
from .config import ACTIONS, DLRMv4Config, HSTUConfig
from .cost import Load, activation_bytes, encoded_rows, usual_rows

STATISTICS = 2 * FLOAT
"""Mean and deviation of each row of a norm."""
NARROW = 4
"""Bytes of an index that is read once per token."""


def memory(
    config: DLRMv4Config,
    loads: Sequence[Load],
    *,
    rows: Mapping[str, int] | None = None,
    ahead: int = 1,
    state: int = 1,
) -> dict[str, int]:
    """Bytes of a step with one micro-batch per load, one at a time.

    `rows`: distinct rows of each table in the whole batch, by default the usual numbers. `ahead`: batches that are
    prepared while one is trained on. `state`: numbers of optimizer state of a table row.
    """
    rows = usual_rows(config, [length for load in loads for length in load.lengths]) if rows is None else rows
    dense, fetched = FLOAT * config.dense_parameters, FLOAT * config.table_dim * sum(rows.values())
    inputs = sum(input_bytes(config, load, rows) for load in loads)
    return {
        "parameters": FLOAT * config.table_parameters + dense,
        "optimizer": FLOAT * state * sum(config.table_rows.values()) + 2 * dense,
        "gradients": dense + fetched,
        "activations": fetched + max((sum(activations(config, load).values()) for load in loads), default=0),
        "batches": (1 + ahead) * inputs,
    }


def activations(config: DLRMv4Config, load: Load) -> dict[str, int]:
    """Activations at the peak: saved by the encoders, saved by the layers, and temporaries of the backward pass.

    Where the backward pass of the encoders needs more, as with one encoding per position and layers that save almost
    nothing, that is the peak.
    """
    width = activation_bytes(config)
    layers, backward = layer_peak(config.hstu, load, width)
    encoders, encoders_backward = _encoder_bytes(config, load, width), _encoder_gradients(config, load, width)
    if encoders_backward > layers + backward:
        layers, backward = 0, encoders_backward
    return {"encoders": encoders, "layers": layers, "backward": backward}


def layer_bytes(hstu: HSTUConfig, load: Load, width: int, *, last_only: bool) -> int:
    """Bytes that one layer saves for its backward pass, its input included."""
    tokens, batch = load.tokens, load.batch
    keys, wide = hstu.key_width, hstu.attention_width
    saved = width * tokens * hstu.dim + STATISTICS * tokens
    if last_only:
        saved += 2 * STATISTICS * batch
        return saved if hstu.recompute else saved + width * ((tokens + batch) * (keys + wide) + batch * wide)
    saved += STATISTICS * tokens
    return saved if hstu.recompute else saved + width * tokens * (hstu.uvqk_width + wide)


def backward_bytes(hstu: HSTUConfig, load: Load, width: int, *, last_only: bool) -> int:
    """Temporary bytes of the backward pass of one layer."""
    tokens, dim = load.tokens, hstu.dim
    keys, wide = hstu.key_width, hstu.attention_width
    if last_only:
        # The gradients of keys and values, of the normed input and of the input.
        again = keys + wide if hstu.recompute else 0
        return width * tokens * (again + keys + wide + 2 * dim)
    again = hstu.uvqk_width + wide if hstu.recompute else 0
    always = dim + hstu.uvqk_width + wide
    # One at a time: the gradient of the concatenation, of the queries in float32, of the normed input and the input.
    most = max(width * 3 * wide, FLOAT * keys, width * 2 * dim)
    return tokens * (width * (again + always) + most)


def layer_peak(hstu: HSTUConfig, load: Load, width: int) -> tuple[int, int]:
    """Saved and temporary bytes of the layers when their sum is largest."""
    moments, saved = [], 0
    for index in range(hstu.layers):
        last_only = hstu.candidate_only and index == hstu.layers - 1
        saved += layer_bytes(hstu, load, width, last_only=last_only)
        moments.append((saved, backward_bytes(hstu, load, width, last_only=last_only)))
    return max(moments, key=sum)


def input_bytes(config: DLRMv4Config, load: Load, rows: Mapping[str, int]) -> int:
    """Bytes of one prepared micro-batch: ids, picks and the order of their gradients, times."""
    positions, tokens, batch = load.positions(config), load.tokens, load.batch
    entities, _ = encoded_rows(config, load)
    picks = 3 * entities + (config.context_tokens + 1) * batch
    edges = sum(rows.values()) + len(rows) + entities + 1
    size = INDEX * (sum(rows.values()) + edges + 2 * picks + positions + tokens + 3 * batch + 2) + FLOAT * batch
    actions = ACTIONS + 1 if config.shared_encoders else 1
    kinds = (config.time_buckets + 1) * (actions + 1)
    return size + NARROW * (3 * positions + 2 * tokens) + INDEX * (entities + 1 + kinds + 1 + batch + 1)


def _encoder_bytes(config: DLRMv4Config, load: Load, width: int) -> int:
    """Bytes of the picked rows in float32 and, per encoder, its input, two hidden tensors and the input of the norm."""
    entities, actions = encoded_rows(config, load)
    table, hidden, dim = config.table_dim, config.encoder_hidden, config.dim
    norms = 2 * STATISTICS
    inside = width * (2 * hidden + dim) + norms
    # In float32 the content encoder reads the picked rows themselves; the concatenated extra features are a copy.
    read = 3 * width * table if width < FLOAT else 2 * FLOAT * table
    picked = entities * (3 * FLOAT * table + read + 2 * inside + width * dim)
    return picked + actions * (width * (config.action_width + dim) + inside)


def _encoder_gradients(config: DLRMv4Config, load: Load, width: int) -> int:
    """Gradients in the encoders' backward pass: of the outputs, of the inputs and of the picked rows."""
    entities, actions = encoded_rows(config, load)
    return entities * (width * (config.dim + 3 * config.table_dim) + 3 * FLOAT * config.table_dim) + (
        actions * width * config.dim
    )
