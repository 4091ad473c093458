"""A torch module on next items: the sequences of a config, a trial, and its loss over all items.

Shapes: T positions of all sequences of a batch, B sequences, D width, I items.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...data.next_item_batches import EventsOnDevice, SequenceBatch
from ...errors import ConfigError
from ...measure.spans import span
from ...models.next_item.softmax import full_loss
from .. import division
from ..next_item.data import RankedSequences, RankedTrial, SequenceSource
from . import Columns, ItemModuleConfig, item_bounds
from .build import ModuleTrial, PreparedModule, require_shape


def columns_of(sequences: SequenceSource) -> Columns:
    return Columns(("items",), (sequences.data.items + 1,), 0)


def check(config: ItemModuleConfig) -> str:
    return SequenceSource(config.data).describe()


class ModuleItems(PreparedModule, RankedSequences):
    """The sequences of a config, and a module for them."""

    def __init__(self, config: ItemModuleConfig, model: str, optimizer: str) -> None:
        self.sequences, self.length = SequenceSource(config.data), config.max_length
        super().__init__(config, model, optimizer, columns_of(self.sequences))
        self.data, self.target = self.sequences.facts(), item_bounds(config)
        self.events = EventsOnDevice(self.sequences.data, self.settings.device)

    def new_trial(self, seed: int) -> ModuleTrial:
        return ItemModuleTrial(self, seed)

    def size_of(self, batch: SequenceBatch) -> Any:
        return len(batch), batch.longest, len(batch.items_T)


class ItemModuleTrial(ModuleTrial, RankedTrial):
    """A module and the order of its sequences."""

    def __init__(self, prepared: ModuleItems, seed: int) -> None:
        self.prepared, self.items, self.ranks = prepared, prepared.sequences.data.items, division(prepared)
        self.begin(seed, prepared.order(seed), partial(loss_of, items=self.items))
        train = prepared.config.train
        self.recipe = replace(self.recipe, patience=train.patience, evaluate_epochs=train.evaluate_epochs)
        self.recipe = self.ranks.sequences(self.recipe, self.module)

    def last(self, batch: SequenceBatch) -> Tensor:
        return last_of(self.module, batch)

    def item_vectors(self) -> Tensor:
        return item_vectors_of(self.module, self.items)

    def rows_of(self, batch: SequenceBatch) -> Tensor:
        return batch.items_T


def vectors_of(module: nn.Module, batch: SequenceBatch) -> Tensor:
    """One vector for each position."""
    positions, vectors_TD = len(batch.items_T), module(batch)
    what = f"for a batch of {positions} positions the module"
    return require_shape(vectors_TD, (positions, -1), what, fix="return one vector for each, as batch.packed does")


def last_of(module: nn.Module, batch: SequenceBatch) -> Tensor:
    """The vector after the last position of each sequence."""
    return vectors_of(module, batch)[batch.offsets_B1[1:] - 1]


def item_vectors_of(module: nn.Module, items: int) -> Tensor:
    """The vectors of items 1 and up, of as many items as the data has."""
    if not callable(getattr(module, "item_vectors", None)):
        what = f"{type(module).__name__} has no method item_vectors"
        raise ConfigError(what, fix="return the vectors of items 1 and up from it")
    vectors_ID = module.item_vectors()  # type: ignore[operator]
    return require_shape(vectors_ID, (items, -1), "item_vectors", fix=f"return one vector for each of {items:,} items")


def loss_of(module: nn.Module, batch: SequenceBatch, items: int) -> Tensor:
    """The mean over positions of the softmax loss of the next item among all items."""
    with span("forward"):
        vectors_TD = vectors_of(module, batch)
    with span("softmax"):
        vectors_ID, targets_T = item_vectors_of(module, items), batch.targets_T - 1
        return full_loss(vectors_TD, vectors_ID, targets_T, 1.0, batch.weights_T, bounded=False)
