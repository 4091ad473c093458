"""Counted work of click models, as `recperf plan` needs it. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..measure.cost import Cost
from ..models import config as cost
from ..models.config import DLRMConfig
from ..ops.table_rules import RULES
from ..plan.work import CALLS, CALLS_PER_LAYER, PlannedWorkload, Shapes, Table, Work

TABLE_PARTS = ("data", "embedding", "embedding_backward", "sparse_update")
"""Parts of a step that the planner counts itself, from the tables."""

CALLS_DRAWING = 60
"""Further operators called in an eager step where the batch is drawn in it."""


def planned_clicks(
    model: DLRMConfig,
    batch_size: int,
    ids: tuple[float, ...],
    *,
    optimizer: str,
    precision: str = "float32",
    state: int | None = None,
    drawn: bool = False,
) -> PlannedWorkload:
    """A click model with `ids` per sample in each table; `state` overrides the optimizer's numbers per table row.
    `drawn`: each step draws its batch."""
    states, flops = cost.dense_optimizer(optimizer)
    row_state = RULES.get(optimizer, RULES["adam"]).state_width(model.dim) if state is None else state
    copied = "AdamW changes every row in every step" if optimizer == "adamw" and state is None else ""
    names = model.features if len(model.rows) == len(model.features) else ("table",)

    def parts(samples: int) -> dict[str, Cost]:
        step = cost.sparse_dlrm_step(model, samples, ids=1, unique=1, optimizer=optimizer)
        return {name: part for name, part in step.items() if name not in TABLE_PARTS}

    tables = tuple(
        Table(
            name=name,
            rows=rows,
            dim=model.dim,
            ids=each,
            # A table that all features share returns one vector for each of them.
            vectors=len(model.features) / len(names),
            distinct=_distinct(rows, each),
            pooled=True,
            state=row_state,
            copied=copied,
        )
        for name, rows, each in zip(names, model.rows, ids)
    )
    ids_per_sample = sum(ids)
    calls = CALLS + CALLS_PER_LAYER * (len(model.bottom) + len(model.top_widths) - 2)
    work = Work(
        tables=tables,
        dense_parameters=model.mlp_parameters,
        dense_states=states,
        precision=precision,
        parts=parts,
        calls=calls + drawn * CALLS_DRAWING,
        kernels=lambda samples, threads: calls,
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
