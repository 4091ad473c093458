"""What a rank has to do for its share of a batch, whatever the workload: tables, dense work, activations, input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..config import within
from ..errors import UsageError
from ..measure.cost import FLOAT, Cost
from ..models.dlrm_v4.config import DLRMv4Config

if TYPE_CHECKING:
    from ..models.config import DLRMConfig

PUBLISHED_HISTORY = 2663 / 4086
"""Mean length of the published interleaved histories, as a share of the most that is asked for."""


@dataclass(frozen=True, kw_only=True)
class Table:
    name: str
    rows: int
    dim: int
    ids: float
    """Ids a sample has in it."""
    vectors: float
    """Vectors of it that a sample needs: as many as ids, or one a bag."""
    distinct: Callable[[int], float]
    """Different rows among the ids of so many samples, where nothing better is known."""
    skewed: bool = True
    """Its ids are those of the data; those of a hashed cross are spread by the hash."""
    state: int = 1
    """Numbers the optimizer keeps for a row."""

    @property
    def pooled(self) -> bool:
        return self.vectors < self.ids

    @property
    def bytes(self) -> int:
        return FLOAT * self.rows * self.dim


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one training step."""

    tables: tuple[Table, ...]
    dense_parameters: int
    dense_states: int
    """Numbers the dense optimizer keeps for a parameter."""
    precision: str
    """What products are taken in."""
    parts: Callable[[int], Mapping[str, Cost]]
    """Dense work of so many samples on one rank, by the names of spans; lookups and updates of tables are not in it."""
    activations: Callable[[int], int]
    """Bytes kept for the way back at the fullest moment, of so many samples."""
    input_bytes: Callable[[int], int]
    """Of so many samples, copied to the device."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """What the counts rest on."""


def work_of(config: Any, *, history: float | None = None, items: float | None = None) -> Work:
    """Of a workload's config. `history` is the mean length of a history, where samples have one, and `items` counts the
    different ones of a batch for each of its samples."""
    if isinstance(getattr(config, "model", None), DLRMv4Config):
        return _histories(config, history, items)
    if history is not None:
        raise UsageError("--history is of dlrm-v4: other workloads have no histories")
    from ..workloads.dlrm.config import DLRMWorkloadConfig
    from ..workloads.micro_dlrm.config import MicroDLRMConfig
    from ..workloads.micro_dlrm_dram.config import MicroDLRMDramConfig, resolved_rows

    if isinstance(config, DLRMWorkloadConfig):
        from ..workloads.dlrm.config import _mean_length, max_ids

        exact = config.data.source == "criteo" or config.data.fixed
        ids = tuple(float(most) if exact else _mean_length(most) for most in max_ids(config))
        precision = "bfloat16" if config.fast.precision == "auto" else config.fast.precision
        return _clicks(config.dlrm, ids, optimizer=config.train.optimizer, precision=precision)
    if isinstance(config, MicroDLRMDramConfig):
        model = config.model.dlrm(resolved_rows(config))
        return _clicks(model, (float(config.data.ids_per_bag * len(model.features)),), optimizer="adamw", state=1)
    if isinstance(config, MicroDLRMConfig):
        return _clicks(config.model, (1.0,) * len(config.model.rows), optimizer="adamw")
    raise UsageError(f"there is no plan for {type(config).__name__}", fix="recperf list")


def mean_history(config: Any, history: float | None) -> tuple[float, str]:
    """Events of a history, and where the figure comes from."""
    asked = config.data.history
    if history is not None:
        within(0.0, history, float(asked.longest), "history")
        return history, "given"
    if asked.strategy == "last-n":
        return float(asked.longest), "counted: the last events, all of them"
    return PUBLISHED_HISTORY * asked.longest, "published: 2,663 of 4,086 asked for"


def _histories(config: Any, history: float | None, items: float | None) -> Work:
    from ..models.dlrm_v4 import cost, memory

    model: DLRMv4Config = config.model
    events, origin = mean_history(config, history)
    length = max(model.context_tokens + 1, round(events) + model.context_tokens + 1)

    @lru_cache(maxsize=64)
    def rows(samples: int) -> dict[str, int]:
        return cost.usual_rows(model, (length,) * samples)

    def load(samples: int) -> Any:
        # Artist and album follow from the item, so there are as many triples as items.
        triples = rows(samples)["item_id"] if items is None else round(items * samples)
        return cost.load_of(model, (length,) * samples, triples=triples)

    # The search for the end of memory asks for the same batches again and again.
    @lru_cache(maxsize=64)
    def activations(samples: int) -> int:
        return sum(memory.activations(model, load(samples)).values())

    @lru_cache(maxsize=64)
    def input_bytes(samples: int) -> int:
        return memory.input_bytes(model, load(samples), rows(samples))

    def parts(samples: int) -> dict[str, Cost]:
        found = dict(cost.step(model, [load(samples)], rows=0))
        del found["sparse_update"]
        return found

    def distinct(name: str) -> Callable[[int], float]:
        return lambda samples: rows(samples)[name]

    ids = {name: float(length - model.context_tokens) for name in cost.UNIQUE}
    tables = tuple(
        Table(
            name=name,
            rows=count,
            dim=model.table_dim,
            ids=ids.get(name, 1.0),
            vectors=ids.get(name, 1.0),
            distinct=distinct(name),
            skewed=name in cost.UNIQUE,
        )
        for name, count in model.table_rows.items()
    )
    return Work(
        tables=tables,
        dense_parameters=model.dense_parameters,
        dense_states=2,
        precision=model.precision,
        parts=parts,
        activations=activations,
        input_bytes=input_bytes,
        origins={
            "histories": f"{events:,.0f} events, all rows alike ({origin})",
            "distinct rows": "published shares of a batch of 1,024: item 2.4 %, album 1.5 %, artist 0.6 %",
        },
    )


def _clicks(
    model: DLRMConfig,
    ids: tuple[float, ...],
    *,
    optimizer: str,
    precision: str = "float32",
    state: int | None = None,
) -> Work:
    from ..models import cost

    states, flops = cost.OPTIMIZERS[optimizer]
    kept = {"sgd": 0, "rowwise-adagrad": 1}.get(optimizer, model.dim) if state is None else state
    names = model.features if len(model.rows) == len(model.features) else ("table",)
    vectors = len(model.features) / len(names)

    def parts(samples: int) -> dict[str, Cost]:
        found = cost.sparse_dlrm_step(model, samples, ids=1, unique=1, optimizer=optimizer)
        left_out = ("data", "embedding", "embedding_backward", "sparse_update")
        return {name: part for name, part in found.items() if name not in left_out}

    def spread(rows: int, each: float) -> Callable[[int], float]:
        return lambda samples: float(rows * -_expm1_log1p(rows, each * samples))

    tables = tuple(
        Table(
            name=name,
            rows=rows,
            dim=model.dim,
            ids=each,
            # A table that all features share gives each of them a vector.
            vectors=vectors,
            distinct=spread(rows, each),
            state=kept,
        )
        for name, rows, each in zip(names, model.rows, ids)
    )
    a_sample = sum(ids)
    return Work(
        tables=tables,
        dense_parameters=model.mlp_parameters,
        dense_states=states,
        precision=precision,
        parts=parts,
        activations=lambda samples: cost._activations(model, samples),
        input_bytes=lambda samples: cost.batch_bytes(model, samples, round(samples * a_sample)),
        origins={
            "ids": f"{a_sample:,.1f} a sample in {len(names)} tables (counted from the config)",
            "distinct rows": "counted as if all rows were alike",
            "optimizer": f"{optimizer}, {states} numbers a dense parameter, {kept} a table row, {flops} FLOPs",
        },
    )


def _expm1_log1p(rows: int, ids: float) -> float:
    """(1 - 1 / rows) ** ids - 1 without rounding to nothing."""
    return -1.0 if rows == 1 else math.expm1(ids * math.log1p(-1 / rows))
