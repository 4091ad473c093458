"""Batches whose rows have exchanged an input, which shows whether a trained model uses it.

Shapes: B samples, T events of their histories, V ids in the batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...data.batch import HistoryBatch
from ...data.streaming.features import RUNNING_RATES
from .config import FEATURE_TABLES, DLRMv4Config

ACTIONS = "actions"
"""What the user did with the events of the history."""


def inputs_of(model: DLRMv4Config) -> list[str]:
    """The inputs of a model: tables with several rows, actions of the history and running rates."""
    tables = [name for name, rows in model.table_rows.items() if rows > 1]
    return [*tables, ACTIONS, *([RUNNING_RATES] if model.rates_hidden else [])]


def exchanged(batch: HistoryBatch, name: str) -> HistoryBatch:
    """The batch with one input exchanged at random between its rows or, in histories, its events; the same in every
    call."""
    draw = torch.Generator().manual_seed(len(batch.actions_T) + len(batch))

    def drawn(count: int) -> torch.Tensor:
        return torch.randperm(count, generator=draw).to(batch.labels_B.device)

    if name == ACTIONS:
        return replace(batch, actions_T=batch.actions_T[drawn(len(batch.actions_T))])
    if name == RUNNING_RATES:
        assert batch.rates_BF is not None
        return replace(batch, rates_BF=batch.rates_BF[drawn(len(batch))])
    features, values_V, first = batch.features, batch.features.values_V.clone(), 0
    for key, count in zip(features.keys, features.ids_per_key):
        if FEATURE_TABLES[key] == name:
            part = slice(first, first + count)
            values_V[part] = values_V[part][drawn(count)]
        first += count
    return replace(batch, features=replace(features, values_V=values_V, largest_F=None))
