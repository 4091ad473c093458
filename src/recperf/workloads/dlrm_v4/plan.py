"""What `recperf plan` and `recperf data reuse` need to know about dlrm-v4. Torch-free until a dataset is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...config import within
from ...errors import DataError
from ...execution.tables import Lookups, planned_steps
from ...measure.cost import FLOAT, Cost
from ...models.dlrm_v4 import cost, memory
from ...models.dlrm_v4.config import FEATURE_TABLES, DLRMv4Config
from ...plan.work import DatasetIds, Evaluations, PlannedWorkload, RankIds, Spread, Table, Work
from .config import DLRMv4WorkloadConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...data.yambda.store import EventStore
    from ...data.yambda.windows import WindowIndex

PUBLISHED_HISTORY = 2663 / 4086
"""Mean length of the published interleaved histories, as a share of the maximum length."""
PUBLISHED_RANK_BATCH = 1024
"""Samples of one rank in the published runs."""
PUBLISHED_SAMPLES = {
    8192: Spread(61.9e6, 69.3e6, 80.3e6),
    16384: Spread(78.0e6, 87.7e6, 100.9e6),
    32768: Spread(98.6e6, 113.0e6, 128.5e6),
}
"""Samples to AUC 0.75 by global batch size, each from twenty published runs."""
PUBLISHED_ANCHORS, PUBLISHED_HOLDOUT = 2_290_835_423, 2_058_204
"""Samples of the training windows, and of the window that is scored."""
POPULARITY = (
    0.478,
    "it gives the hottest of 32 ranks the 81.5 GiB of rows that a published run ran out of memory with",
)
"""Exponent of the power law that gives one of 32 ranks as many ids as the one that ran out of memory had."""


def planned(config: DLRMv4WorkloadConfig) -> PlannedWorkload:
    published = config.model.row_scale == 1 and config.target.auc == 0.75

    def read_ids(folder: Path, rank_batch: int, ranks: int, batches: int) -> DatasetIds:
        return _read_ids(config, folder, rank_batch, ranks, batches)

    return PlannedWorkload(
        batch_size=config.train.batch_size,
        count=lambda history, distinct: _work(config, history, distinct.get("item_id")),
        histories=True,
        read_ids=read_ids,
        rank_batch=PUBLISHED_RANK_BATCH if published and config.train.batch_size == PUBLISHED_RANK_BATCH else None,
        popularity=POPULARITY,
        published_samples=PUBLISHED_SAMPLES if published else {},
        evaluations=_evaluations(config) if published and config.evaluate.every_share else None,
    )


def _evaluations(config: DLRMv4WorkloadConfig) -> Evaluations:
    def every(batch: int) -> int:
        return batch * max(1, math.ceil(config.evaluate.every_share * PUBLISHED_ANCHORS / batch))

    def first(batch: int) -> int:
        return batch * config.evaluate.first_step(PUBLISHED_ANCHORS, batch)

    return Evaluations(samples=PUBLISHED_HOLDOUT, every=every, first=first)


def mean_history(config: DLRMv4WorkloadConfig, history: float | None) -> tuple[float, str]:
    """Mean events of a history, and where the figure comes from."""
    requested = config.data.history
    if history is not None:
        within(0.0, history, float(requested.longest), "history")
        return history, "given"
    if requested.strategy == "last-n":
        return float(requested.longest), "counted: every history has the full length"
    return PUBLISHED_HISTORY * requested.longest, "published: 2,663 of at most 4,086"


def _work(config: DLRMv4WorkloadConfig, history: float | None, items: float | None) -> Work:
    """`items` counts the different items of a batch for each of its samples; None: the published share."""
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

    # The search for the largest batch that fits asks for the same batch sizes many times.
    @lru_cache(maxsize=64)
    def activations(samples: int) -> int:
        return sum(memory.activations(model, load(samples)).values())

    @lru_cache(maxsize=64)
    def input_bytes(samples: int) -> int:
        return memory.input_bytes(model, load(samples), rows(samples))

    def parts(samples: int) -> dict[str, Cost]:
        step = dict(cost.step(model, [load(samples)], rows=0))
        del step["sparse_update"]
        return step

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
            "histories": f"{events:,.0f} events, all of this length ({origin})",
            "distinct rows": "published shares of a batch of 1,024: item 2.4 %, album 1.5 %, artist 0.6 %",
        },
    )


def _read_ids(config: DLRMv4WorkloadConfig, folder: Path, rank_batch: int, ranks: int, batches: int) -> DatasetIds:
    """Ids of `batches` global batches, spread over the stream of the training windows.

    Rank r takes every `ranks`-th anchor from the r-th on, as the MLPerf benchmark does.
    """
    within(1, batches, 1 << 16, "skew batches")
    from ...data.yambda.history import Histories
    from ...data.yambda.reference.cache import open_events
    from ...data.yambda.windows import WindowIndex

    store = open_events(folder)
    index = WindowIndex.open(store, config.data.windows)
    global_batch = rank_batch * ranks
    anchors = _anchors(store, index, global_batch)
    histories = Histories(store, config.data.history)

    def rank_ids(anchors_of_rank: NDArray[np.int64]) -> RankIds:
        batch = histories.batch(anchors_of_rank)
        return RankIds(ids_by_table(batch, config.model.table_rows), len(batch.times_T))

    def global_batches() -> Iterator[Iterator[RankIds]]:
        for start in np.linspace(0, len(anchors) - global_batch, batches).astype(np.int64):
            selected = anchors[start : start + global_batch]
            yield (rank_ids(selected[rank::ranks]) for rank in range(ranks))

    return DatasetIds(store.name, batches, global_batches())


def lookups(config: DLRMv4WorkloadConfig) -> Lookups:
    """The rows of the training batches."""
    from ...data.yambda.loader import Loader
    from .data import EventWindows

    windows, tables = EventWindows(config), config.model.table_rows
    order = windows.train_order()

    def rows() -> Iterator[list[NDArray[np.int64]]]:
        for _ in range(config.train.epochs):
            with Loader(order, windows.plain, workers=config.data.workers) as loader:
                for batch in loader:
                    used = ids_by_table(batch, tables)
                    yield [used[table] for table in tables]

    # Row-wise Adagrad has one number for each row.
    record_bytes = FLOAT * (config.model.table_dim + 1)
    steps = planned_steps(config.train, len(order))
    return Lookups(data=windows.store.name, tables=tables, record_bytes=record_bytes, steps=steps, rows=rows)


def _anchors(store: EventStore, index: WindowIndex, needed: int) -> NDArray[np.int64]:
    """Anchors of the training windows in order, from as many of the last windows as some global batches need."""
    windows: list[NDArray[np.int64]] = []
    for window in reversed(range(max(1, index.windows - 1))):
        windows.insert(0, index.order(window, "train"))
        if sum(map(len, windows)) >= 64 * needed:
            break
    anchors = np.concatenate(windows)
    if len(anchors) < needed:
        raise DataError(
            f"a global batch has {needed:,} samples, but the dataset has only {len(anchors):,} anchors",
            where={"store": store.folder},
            fix="a smaller --global-batch, or --data.windows.min-history",
        )
    return anchors


def ids_by_table(batch: Any, table_rows: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
    """The rows of each table that a batch looks up, with repeats."""
    features: dict[str, list[NDArray[np.int64]]] = {}
    for feature, name in FEATURE_TABLES.items():
        features.setdefault(name, []).append(batch.features[feature][0].numpy())
    return {name: _wrapped(np.concatenate(ids), table_rows[name]) for name, ids in features.items()}


def _wrapped(ids: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Ids beyond the end of a scaled-down table start again at its first row."""
    return ids % rows if ids.max(initial=0) >= rows else ids
