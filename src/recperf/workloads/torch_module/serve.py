"""A trained torch module that scores rows and ranks items."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...data.batch import ClickBatch
from ...data.next_item_batches import SequenceBatch
from ...data.rows.clicks import Clicks
from ...execution.serving import Export, Served
from ...execution.workload import load
from ...train.device import choose
from ..click_serve import ServedClicks, ServedImported, ServedRatings
from ..next_item.data import SequenceSource
from ..next_item.serve import ServedItems
from . import ItemModuleConfig, ModuleConfig, clicks, items


class ClickModule(ServedClicks):
    model: nn.Module  # type: ignore[assignment]

    def logits_of(self, batch: ClickBatch) -> Tensor:
        return clicks.logits_of(self.model, batch)

    def export(self, example: Any, inputs: Any) -> Export:
        return Served.export(self, example, inputs)


class ModuleOnRatings(ClickModule, ServedRatings): ...


class ModuleOnImported(ClickModule, ServedImported): ...


def served_clicks(config: ModuleConfig, model: str) -> Served:
    rows, settings = clicks.clicks_of(config), choose(config.train, largest_product_flops=0)
    module = load(model)(clicks.columns_of(rows), config).to(settings.device)
    if isinstance(rows, Clicks):
        return ModuleOnRatings(rows, module, settings)
    return ModuleOnImported(rows, module, settings)


class ItemModule(ServedItems):
    def __init__(self, config: ItemModuleConfig, model: str) -> None:
        sequences, settings = SequenceSource(config.data), choose(config.train, largest_product_flops=0)
        super().__init__(sequences, settings, length=config.max_length)
        self.model: nn.Module = load(model)(items.columns_of(sequences), config).to(settings.device)

    def last(self, batch: SequenceBatch) -> Tensor:
        return items.last_of(self.model, batch)

    def item_vectors(self) -> Tensor:
        return items.item_vectors_of(self.model, len(self.items))
