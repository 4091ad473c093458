"""A batch of histories in the form that DLRMv4 reads: all sorting, and all reads by the host, happen here.

A row consists of the context tokens, the history and the candidate; its positions are those of history and candidate.

Shapes: B samples, T tokens of all rows, S positions of all rows, U distinct rows of a table, E distinct (item, artist,
album) in the batch, N picks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_leaves

from ...data.batch import HistoryBatch
from ...data.streaming.features import CANDIDATE, CONTEXT, HISTORY
from ...errors import DataError
from ...ops.arrange import native
from ...ops.assemble import AssemblyPlan, plan
from ...ops.lookup import expand, unique
from ..tiers.slots import Placed
from .config import ACTIONS, CANDIDATE_CODE, FEATURE_TABLES, DLRMv4Config

KEYS = (*CONTEXT, *HISTORY, *CANDIDATE)
"""The features of a batch in the order in which they are read."""
MAX_KEY = 1 << 62
"""Larger numbers of (item, artist, album) combinations do not fit into one int64 key."""


@dataclass(frozen=True, eq=False)
class Pick:
    """Rows picked from a tensor and, for the backward pass, the picks that each row gets its gradient from."""

    index_N: Tensor
    order_N: Tensor
    """The picks, sorted by row."""
    starts_U1: Tensor
    """Where each row's picks begin in the order; a row may have none."""

    @staticmethod
    def among(index_N: Tensor, rows: int) -> Pick:
        sorted_N, order_N = index_N.sort(stable=True)
        edges_U1 = torch.arange(rows + 1, device=index_N.device)
        return Pick(index_N, order_N, torch.searchsorted(sorted_N, edges_U1))

    @staticmethod
    def each(rows: int, device: torch.device) -> Pick:
        """Pick every row once."""
        index_N = torch.arange(rows, device=device)
        return Pick(index_N, index_N, torch.arange(rows + 1, device=device))

    def of(self, rows_UD: Tensor) -> Tensor:
        """The picked rows; differentiable."""
        return expand(rows_UD, self.index_N, self.order_N, self.starts_U1)


@dataclass(frozen=True, eq=False)
class Inputs:
    rows: dict[str, Tensor]
    """For each table the distinct rows that the batch uses. Parts of one batch hold the same tensor objects."""
    context: dict[str, Pick]
    """For each context feature the samples' rows among the distinct ones of its table."""
    entities: dict[str, Pick]
    """Item, artist and album among the distinct rows of their tables: one pick per (item, artist, album) with shared
    encoders, otherwise one per position."""
    plan: AssemblyPlan
    """How tokens are assembled from the entities and, with shared encoders, the kinds of actions."""
    candidates: Pick
    """Each sample's candidate among the entities."""
    codes_S: Tensor
    """The action at each position, 0 to 7 as three bits; 8 for a candidate."""
    offsets_B1: Tensor
    """Where each row begins among the tokens; the rows after the samples' are padding (padding.py)."""
    position_offsets_B1: Tensor
    """Where each row begins among the positions."""
    times_T: Tensor
    """Seconds; 0 for context tokens, the time of the query for the candidate."""
    query_times_B: Tensor
    labels_B: Tensor
    tokens: int
    """Number of tokens in all rows."""
    longest: int
    """Tokens of the longest row."""
    whole_longest: int
    """Tokens of the longest row of the whole batch, of which this may be a part."""
    rates_BF: Tensor | None = None
    """Running rates, for a model that reads them."""
    slots: dict[str, Tensor] = field(default_factory=dict)
    """For each table the slots of its rows, where tables lie in tiers and the batch was placed."""
    placed: Placed | None = None
    """The handle that keeps the rows in these slots."""
    numbers_T: Tensor | None = None
    """The number of each token in the whole batch, of which this may be a part: dropout knows tokens by it. None: 0, 1,
    2 and so on."""

    def __len__(self) -> int:
        return self.labels_B.shape[0]

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of all tensors until the stream has finished its current work."""
        for tensor in self.tensors():
            tensor.record_stream(stream)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        return [leaf for leaf in tree_leaves(self) if isinstance(leaf, Tensor)]


for _struct in (Inputs, Pick, AssemblyPlan):
    register_dataclass(_struct)


def prepare(batch: HistoryBatch, config: DLRMv4Config) -> Inputs:
    """Prepare a batch on its device: in C on a CPU. Waits for any other device a few times."""
    return prepare_parts(batch, config, 1)[0] if not_in_c(batch, config) else _prepare_in_c(batch, config)


def not_in_c(batch: HistoryBatch, config: DLRMv4Config) -> bool:
    """Whether a batch must be prepared by torch."""
    known = batch.features.keys == KEYS and max(form_of(config).tables) <= native.MOST_ROWS
    return not (known and batch.labels_B.is_cpu and len(batch)) or isinstance(native.library(), str)


@lru_cache(maxsize=64)
def form_of(config: DLRMv4Config) -> native.Form:
    """The sizes of the model that the C code reads."""
    rows = config.table_rows
    return native.Form(
        tables=tuple(rows[name] for name in (*HISTORY, *CONTEXT)),
        shared=config.shared_encoders,
        ages=config.time_buckets + 1,
        longest=config.hstu.max_length,
    )


def plain(batch: HistoryBatch, config: DLRMv4Config) -> native.Batch:
    """The tensors of a batch in the types that C reads."""
    return native.Batch(
        values_V=batch.features.values_V.long(),
        offsets_B1=batch.history_offsets_B1.long(),
        actions_T=batch.actions_T.to(torch.uint8),
        times_T=batch.times_T.long(),
        query_times_B=batch.query_times_B.long(),
        labels_B=batch.labels_B,
        rates_BF=_rates(batch, config, 0, len(batch)),
    )


def _prepare_in_c(batch: HistoryBatch, config: DLRMv4Config) -> Inputs:
    """Prepare a whole batch in one call of C, with the result of `prepare_parts`."""
    form, counts, parts = form_of(config), np.zeros(len(config.tables) + 1, np.int64), plain(batch, config)
    room = native.BatchMemory(form, len(batch), parts.times_T.shape[0])
    longest, short = native.arrange(parts, form, room.addresses, counts)
    if not short:
        raise too_long(longest, config)
    arrays = room.arrays(counts.tolist())
    return from_arrays(config, arrays, longest, parts.query_times_B, batch.labels_B, parts.rates_BF)


def from_arrays(
    config: DLRMv4Config,
    arrays: Iterable[Tensor],
    longest: int,
    query_times_B: Tensor,
    labels_B: Tensor,
    rates_BF: Tensor | None,
) -> Inputs:
    """The arrays that C wrote, in its order."""
    form, array = form_of(config), iter(arrays)

    def take(count: int) -> Iterator[Tensor]:
        return islice(array, count)

    rows = dict(zip((*HISTORY, *CONTEXT), take(len(config.tables))))
    context = {name: Pick(*take(3)) for name in CONTEXT}
    entities = {name: Pick(*take(3)) for name in HISTORY}
    _, source_S, action_S, age_T, source_order_S, source_starts_U1, kind_order_T, kind_starts = take(8)
    candidates = Pick(*take(3))
    codes_S, offsets_B1, position_offsets_B1, times_T = array
    return Inputs(
        rows=rows,
        context=context,
        entities=entities,
        plan=AssemblyPlan(
            offsets_B1=offsets_B1, source_S=source_S, action_S=action_S, age_T=age_T, source_order_S=source_order_S,
            source_starts_U1=source_starts_U1, kind_order_T=kind_order_T, kind_starts=kind_starts,
            actions=ACTIONS + 1 if form.shared else 1, ages=form.ages, context=form.context, longest=longest,
        ),
        candidates=candidates,
        codes_S=codes_S,
        offsets_B1=offsets_B1,
        position_offsets_B1=position_offsets_B1,
        times_T=times_T,
        query_times_B=query_times_B,
        labels_B=labels_B,
        tokens=times_T.shape[0],
        longest=longest,
        whole_longest=longest,
        rates_BF=rates_BF,
    )  # fmt: skip


@torch.no_grad()
def prepare_parts(batch: HistoryBatch, config: DLRMv4Config, parts: int) -> list[Inputs]:
    """Prepare a batch in parts of similar size whose gradients add up: they share the distinct rows of every table."""
    layout = _Layout.of(batch, config)
    ids = {name: _table_ids(batch, name, config, layout) for name in config.tables}
    distinct = {name: unique(ids_N) for name, ids_N in ids.items()}
    rows = {name: one.values_U for name, one in distinct.items()}
    places = {name: one.inverse_N for name, one in distinct.items()}
    edges = [len(batch) * part // parts for part in range(parts + 1)]
    return [_part(batch, config, layout, rows, places, low, high) for low, high in zip(edges, edges[1:]) if high > low]


def too_long(longest: int, config: DLRMv4Config) -> DataError:
    """The error of a row with more tokens than the model takes."""
    return DataError(
        f"a row of the batch has {longest:,} tokens, including its candidate and {config.context_tokens} of context; "
        f"the model takes at most {config.hstu.max_length:,}",
        fix=f"use histories of at most {config.max_history:,} events, or a larger hstu.max_length",
    )


@dataclass(frozen=True, eq=False)
class _Layout:
    """The positions of the whole batch."""

    position_offsets_B1: Tensor
    starts: list[int]
    """The same offsets on the host."""
    history_S: Tensor
    """Which positions belong to a history."""
    codes_S: Tensor
    times_S: Tensor

    @staticmethod
    def of(batch: HistoryBatch, config: DLRMv4Config) -> _Layout:
        device, size = batch.labels_B.device, len(batch)
        offsets_B1 = batch.history_offsets_B1 + torch.arange(size + 1, device=device)
        starts: list[int] = offsets_B1.tolist()
        longest = max((b - a for a, b in zip(starts, starts[1:])), default=0) + config.context_tokens
        if longest > config.hstu.max_length:
            raise too_long(longest, config)
        history_S = torch.ones(starts[-1], dtype=torch.bool, device=device)
        history_S[offsets_B1[1:] - 1] = False
        codes_S = torch.full((starts[-1],), CANDIDATE_CODE, device=device)
        codes_S[history_S] = batch.actions_T.long() & (ACTIONS - 1)
        times_S = _joined(batch.times_T.long(), batch.query_times_B.long(), history_S)
        return _Layout(offsets_B1, starts, history_S, codes_S, times_S)


def _joined(history_T: Tensor, candidates_B: Tensor, history_S: Tensor) -> Tensor:
    """Merge values of events and of candidates by position."""
    joined_S = torch.empty(history_S.shape, dtype=history_T.dtype, device=history_T.device)
    joined_S[history_S] = history_T
    joined_S[~history_S] = candidates_B
    return joined_S


def _table_ids(batch: HistoryBatch, table: str, config: DLRMv4Config, layout: _Layout) -> Tensor:
    """The rows that the batch looks up in a table: one per position, or one per sample for a context feature."""
    features = [feature for feature, place in FEATURE_TABLES.items() if place == table]
    ids = [batch.features[feature][0].long() for feature in features]
    ids_N = _joined(ids[0], ids[1], layout.history_S) if len(ids) == 2 else ids[0]
    return ids_N.remainder(config.table_rows[table])


def _part(
    batch: HistoryBatch,
    config: DLRMv4Config,
    layout: _Layout,
    rows: dict[str, Tensor],
    places: dict[str, Tensor],
    low: int,
    high: int,
) -> Inputs:
    """The samples low to high; they share the rows of the whole batch."""
    first, last = layout.starts[low], layout.starts[high]
    position_offsets_B1 = layout.position_offsets_B1[low : high + 1] - first
    ends_B = position_offsets_B1[1:] - 1
    counts = {name: rows[name].shape[0] for name in rows}
    context = {name: Pick.among(places[name][low:high], counts[name]) for name in config.context}
    placed = {name: places[name][first:last] for name in HISTORY}
    sources, candidates_B, entities = Pick.each(last - first, ends_B.device), ends_B, last - first
    if config.shared_encoders:
        sources, first_E = _distinct(placed, counts)
        placed = {name: places_S[first_E] for name, places_S in placed.items()}
        candidates_B, entities = sources.index_N[ends_B], first_E.shape[0]
    size, tokens = high - low, config.context_tokens
    offsets_B1 = position_offsets_B1 + tokens * torch.arange(size + 1, device=ends_B.device)
    lengths = [b - a for a, b in zip(layout.starts, layout.starts[1:])]
    longest, codes_S = max(lengths[low:high]) + tokens, layout.codes_S[first:last]
    times_T = _with_context(layout.times_S[first:last], position_offsets_B1, tokens)
    return Inputs(
        rows=rows,
        context=context,
        entities={name: Pick.among(placed[name], counts[name]) for name in HISTORY},
        plan=_plan(offsets_B1, times_T, sources, codes_S, longest, config),
        candidates=Pick.among(candidates_B, entities),
        codes_S=codes_S,
        offsets_B1=offsets_B1,
        position_offsets_B1=position_offsets_B1,
        times_T=times_T,
        query_times_B=batch.query_times_B[low:high].long(),
        labels_B=batch.labels_B[low:high],
        tokens=last - first + size * tokens,
        longest=longest,
        whole_longest=max(lengths) + tokens,
        rates_BF=_rates(batch, config, low, high),
    )


def _rates(batch: HistoryBatch, config: DLRMv4Config, low: int, high: int) -> Tensor | None:
    if not config.rates_hidden:
        return None
    if batch.rates_BF is None:
        raise DataError("the model reads running rates, but the batch has none", fix="--model.rates-hidden 0")
    return batch.rates_BF[low:high]


def _distinct(placed: dict[str, Tensor], counts: dict[str, int]) -> tuple[Pick, Tensor]:
    """The distinct (item, artist, album) at the positions, and one position of each."""
    item_S, artist_S, album_S = (placed[name] for name in HISTORY)
    pair_S, pairs = artist_S * counts["album_id"] + album_S, counts["artist_id"] * counts["album_id"]
    if counts["item_id"] * pairs > MAX_KEY:
        distinct = unique(pair_S)
        pair_S, pairs = distinct.inverse_N, distinct.values_U.shape[0]
    distinct = unique(item_S * pairs + pair_S)
    pick = Pick(distinct.inverse_N, distinct.order_N, distinct.starts_U1)
    return pick, pick.order_N[pick.starts_U1[:-1]]


def _plan(
    offsets_B1: Tensor, times_T: Tensor, sources: Pick, codes_S: Tensor, longest: int, config: DLRMv4Config
) -> AssemblyPlan:
    actions, action_S = (ACTIONS + 1, codes_S) if config.shared_encoders else (1, torch.zeros_like(codes_S))
    return plan(
        offsets_B1, times_T, sources.index_N, sources.order_N, sources.starts_U1, action_S,
        actions=actions, ages=config.time_buckets + 1, context=config.context_tokens, longest=longest,
    )  # fmt: skip


def _with_context(times_S: Tensor, position_offsets_B1: Tensor, tokens: int) -> Tensor:
    """Times of all tokens; those of context tokens are 0."""
    size = position_offsets_B1.shape[0] - 1
    times_T = times_S.new_zeros(times_S.shape[0] + size * tokens)
    lengths_B = position_offsets_B1.diff()
    before_S = (torch.arange(size, device=times_S.device) + 1).repeat_interleave(
        lengths_B, output_size=times_S.shape[0]
    )
    times_T[torch.arange(times_S.shape[0], device=times_S.device) + tokens * before_S] = times_S
    return times_T
