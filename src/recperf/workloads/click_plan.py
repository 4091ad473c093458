"""Counted work of click models, as `recperf plan` needs it. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from ..measure.cost import Cost
from ..models import config as cost
from ..models.config import DLRMConfig
from ..ops.table_rules import RULES
from ..planning.work import CALLS, CALLS_PER_LAYER, PlannedWorkload, Shapes, Table, Work

TABLE_PARTS = ("data", "embedding", "embedding_backward", "sparse_update")
"""Parts of a step that the planner counts itself, from the tables."""

KERNELS, KERNELS_PER_LAYER = 26, 6
"""Kernels of a CUDA graph of torch's operators, counted in that of micro-dlrm, and more for each layer of the MLPs."""
CHAIN, CHAIN_PER_LAYER = 7, {"bfloat16": 2}
"""Those of a fused step that wait for each other: weight gradients, updates of tables and the next batch run beside.
In other precisions the ReLU's gradient has a kernel of its own, a third one of a layer."""
CALLS_DRAWING = 60
"""Further operators called in an eager step where the GPU draws the batch in it."""
CALLS_PLAIN, CALLS_PLAIN_LAYER, CALLS_CHUNK, CHUNK = 80, 12, 4, 16_384
"""Operators called in a step of plain torch, more for each layer, and for each CHUNK ids of a batch."""
DRAW_S, DRAW_ID_S = 3e-9, 10e-9
"""Seconds in which one thread of the host draws a dense number and an id."""


def planned_clicks(
    model: DLRMConfig,
    batch_size: int,
    ids: tuple[float, ...],
    *,
    optimizer: str,
    precision: str = "float32",
    state: int | None = None,
    graph: bool = True,
    drawn: Literal["", "device", "host"] = "",
    mlp: Literal["", "plain", "fused"] = "",
) -> PlannedWorkload:
    """A click model with `ids` per sample in each table; `state` overrides the optimizer's numbers per table row.
    `graph`: one process replays its step as a CUDA graph; `drawn`: what draws the batch in each step; `mlp`: plain, by
    torch's operators only, or fused, with side streams in a graph."""
    states, flops = cost.dense_optimizer(optimizer)
    row_state = RULES.get(optimizer, RULES["adam"]).state_width(model.dim) if state is None else state
    copied = "AdamW changes every row in every step" if optimizer == "adamw" and state is None else ""
    names = model.features if len(model.rows) == len(model.features) else ("table",)

    def parts(samples: int) -> dict[str, Cost]:
        step = cost.sparse_dlrm_step(model, samples, ids=1, unique=1, optimizer=optimizer)
        dense = {name: part for name, part in step.items() if name not in TABLE_PARTS}
        # Products read and write activations in their own precision.
        half = [name for name in dense if precision == "bfloat16" and name.startswith(("bottom", "top"))]
        return dense | {name: Cost(dense[name].flops, dense[name].bytes // 2) for name in half}

    tables = tuple(
        Table(
            name=name, rows=rows, dim=model.dim, ids=each, pooled=True, state=row_state, copied=copied,
            # A table that all features share returns one vector for each of them.
            vectors=len(model.features) / len(names), distinct=_distinct(rows, each),
        )
        for name, rows, each in zip(names, model.rows, ids)
    )  # fmt: skip
    ids_per_sample = sum(ids)
    calls, kernels = _launches(model, mlp, precision, batch_size * ids_per_sample)
    by_host = drawn == "host"
    work = Work(
        tables=tables,
        dense_parameters=model.mlp_parameters,
        dense_states=states,
        precision=precision,
        parts=parts,
        calls=calls + (drawn == "device") * CALLS_DRAWING,
        kernels=lambda samples, threads: graph * kernels,
        prepare_s=DRAW_S * model.bottom[0] + DRAW_ID_S * ids_per_sample if by_host else 0.0,
        prepared_ahead=not by_host,
        shapes=_largest(model),
        activations=lambda samples: cost._activations(model, samples),
        input_bytes=lambda samples: cost.batch_bytes(model, samples, round(samples * ids_per_sample)),
        origins={
            "ids": f"{ids_per_sample:,.1f} per sample in {len(names)} tables (counted from the config)",
            "distinct rows": "counted as if all rows were equally likely",
            "optimizer": f"{optimizer}: {states} numbers per dense parameter, {row_state} per table row, {flops} FLOPs",
        },
    )
    return PlannedWorkload(batch_size=batch_size, count=lambda history, distinct: work)


def _launches(model: DLRMConfig, mlp: str, precision: str, ids: float) -> tuple[int, int]:
    """Operators called in an eager step with `ids` ids, and kernels that follow each other in a graph of it."""
    layers = len(model.bottom) + len(model.top_widths) - 2
    calls, kernels = CALLS + CALLS_PER_LAYER * layers, KERNELS + KERNELS_PER_LAYER * layers
    if mlp == "fused":
        kernels = CHAIN + CHAIN_PER_LAYER.get(precision, 3) * layers
    if mlp == "plain":
        calls = CALLS_PLAIN + CALLS_PLAIN_LAYER * layers + CALLS_CHUNK * int(ids / CHUNK)
    return calls, kernels


def _largest(model: DLRMConfig) -> Shapes:
    """The layer of the MLPs with most FLOPs."""
    layers = [*zip(model.bottom, model.bottom[1:]), *zip(model.top_widths, model.top_widths[1:])]
    inputs, outputs = max(layers, key=lambda layer: layer[0] * layer[1])
    return Shapes(rows_per_sample=1.0, inputs=inputs, outputs=outputs)


def _distinct(rows: int, ids_per_sample: float) -> Callable[[int], float]:
    """Expected number of different rows if all are equally likely, without cancellation for large tables."""

    def expected(samples: int) -> float:
        if rows == 1:
            return 1.0
        return -rows * math.expm1(samples * ids_per_sample * math.log1p(-1 / rows))

    return expected
