"""Bytes a training step of DLRMv4 holds at its fullest, from its config and the lengths of a batch. Torch-free.

A step is fullest in the backward pass of one of its layers: everything that is kept for later, and what that layer
needs to pass its gradient on. What has a number for every sample, but not for every token, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...measure.cost import FLOAT, INDEX
from .config import ACTIONS, DLRMv4Config, HSTUConfig
from .cost import Load, activation_bytes, encoded_rows, usual_rows

STATISTICS = 2 * FLOAT
"""Of a norm, for every row of it: mean and deviation."""
NARROW = 4
"""Of an index that is read once a token."""


def memory(
    config: DLRMv4Config, loads: Sequence[Load], *, rows: Mapping[str, int] | None = None, ahead: int = 1
) -> dict[str, int]:
    """Of a step in as many micro-batches as there are loads, one at a time.

    `rows`: distinct ones of each table in the whole batch; none: the usual numbers. `ahead`: batches that are prepared
    while one is learned from.
    """
    rows = usual_rows(config, [length for load in loads for length in load.lengths]) if rows is None else rows
    dense, fetched = FLOAT * config.dense_parameters, FLOAT * config.table_dim * sum(rows.values())
    inputs = sum(input_bytes(config, load, rows) for load in loads)
    return {
        "parameters": FLOAT * config.table_parameters + dense,
        "optimizer": FLOAT * sum(config.table_rows.values()) + 2 * dense,
        "gradients": dense + fetched,
        "activations": fetched + max((sum(activations(config, load).values()) for load in loads), default=0),
        "batches": (1 + ahead) * inputs,
    }


def activations(config: DLRMv4Config, load: Load) -> dict[str, int]:
    """By what they are kept for, at the fullest moment: the encoders, the layers, and the layer on its way back.

    Where the encoders' own way back takes more than that, as it may with one for every position and layers that keep
    next to nothing, it is what is told.
    """
    width = activation_bytes(config)
    kept, leaving = layer_peak(config.hstu, load, width)
    encoders, their_own = _encoder_bytes(config, load, width), _encoder_gradients(config, load, width)
    if their_own > kept + leaving:
        kept, leaving = 0, their_own
    return {"encoders": encoders, "layers": kept, "backward": leaving}


def layer_bytes(hstu: HSTUConfig, load: Load, width: int, *, last_only: bool) -> int:
    """Kept by one layer for its backward pass, its input included."""
    tokens, batch = load.tokens, load.batch
    keys, wide = hstu.key_width, hstu.attention_width
    kept = width * tokens * hstu.dim + STATISTICS * tokens
    if last_only:
        kept += 2 * STATISTICS * batch
        return kept if hstu.recompute else kept + width * ((tokens + batch) * (keys + wide) + batch * wide)
    kept += STATISTICS * tokens
    return kept if hstu.recompute else kept + width * tokens * (hstu.uvqk_width + wide)


def backward_bytes(hstu: HSTUConfig, load: Load, width: int, *, last_only: bool) -> int:
    """What one layer needs on its way back besides what was kept."""
    tokens, dim = load.tokens, hstu.dim
    keys, wide = hstu.key_width, hstu.attention_width
    if last_only:
        # The gradient of keys and values, and of the normed input and the input.
        again = keys + wide if hstu.recompute else 0
        return width * tokens * (again + keys + wide + 2 * dim)
    again = hstu.uvqk_width + wide if hstu.recompute else 0
    always = dim + hstu.uvqk_width + wide
    # One after the other: the concatenation's gradient, queries' summed in float32, the normed input's and the input's.
    most = max(width * 3 * wide, FLOAT * keys, width * 2 * dim)
    return tokens * (width * (again + always) + most)


def layer_peak(hstu: HSTUConfig, load: Load, width: int) -> tuple[int, int]:
    """Kept by layers, and needed by the one on its way back, when the two together are most."""
    moments, kept = [], 0
    for index in range(hstu.layers):
        last_only = hstu.candidate_only and index == hstu.layers - 1
        kept += layer_bytes(hstu, load, width, last_only=last_only)
        moments.append((kept, backward_bytes(hstu, load, width, last_only=last_only)))
    return max(moments, key=sum)


def input_bytes(config: DLRMv4Config, load: Load, rows: Mapping[str, int]) -> int:
    """Of one micro-batch as the model reads it: ids, picks and in which order their gradients are summed, times."""
    positions, tokens, batch = load.positions(config), load.tokens, load.batch
    entities, _ = encoded_rows(config, load)
    picks = 3 * entities + (config.context_tokens + 1) * batch
    edges = sum(rows.values()) + len(rows) + entities + 1
    found = INDEX * (sum(rows.values()) + edges + 2 * picks + positions + tokens + 3 * batch + 2) + FLOAT * batch
    actions = ACTIONS + 1 if config.shared_encoders else 1
    kinds = (config.time_buckets + 1) * (actions + 1)
    return found + NARROW * (3 * positions + 2 * tokens) + INDEX * (entities + 1 + kinds + 1 + batch + 1)


def _encoder_bytes(config: DLRMv4Config, load: Load, width: int) -> int:
    """Rows picked in float32; of each encoder its input, what lies inside it twice and what its last norm reads."""
    entities, actions = encoded_rows(config, load)
    table, hidden, dim = config.table_dim, config.encoder_hidden, config.dim
    norms = 2 * STATISTICS
    inside = width * (2 * hidden + dim) + norms
    # In float32 the content's encoder reads the picked rows themselves; side by side, the extra's are a copy.
    read = 3 * width * table if width < FLOAT else 2 * FLOAT * table
    picked = entities * (3 * FLOAT * table + read + 2 * inside + width * dim)
    return picked + actions * (width * (config.action_width + dim) + inside)


def _encoder_gradients(config: DLRMv4Config, load: Load, width: int) -> int:
    """On the encoders' own way back: of what comes out, of what went in, and of the picked rows."""
    entities, actions = encoded_rows(config, load)
    return entities * (width * (config.dim + 3 * config.table_dim) + 3 * FLOAT * config.table_dim) + (
        actions * width * config.dim
    )
