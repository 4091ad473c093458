"""A trained torch module that scores rows and ranks items."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...data.batch import ClickBatch
from ...data.clicks import Clicks
from ...execution.serving import Export, Served
from ...execution.workload import load
from ...train.device import choose
from ..click_serve import ServedClicks, ServedImported, ServedRatings
from . import Columns, ModuleConfig, clicks_of
from .build import logits_of


class ServedModule(ServedClicks):
    model: nn.Module  # type: ignore[assignment]

    def logits_of(self, batch: ClickBatch) -> Tensor:
        return logits_of(self.model, batch)

    def export(self, example: Any, inputs: Any) -> Export:
        return Served.export(self, example, inputs)


class ModuleOnRatings(ServedModule, ServedRatings): ...


class ModuleOnImported(ServedModule, ServedImported): ...


def served_module(config: ModuleConfig, model: str) -> Served:
    clicks, settings = clicks_of(config), choose(config.train, largest_product_flops=0)
    columns = Columns(tuple(clicks.keys), tuple(clicks.table_rows), len(clicks.dense_names))
    module = load(model)(columns, config).to(settings.device)
    if isinstance(clicks, Clicks):
        return ModuleOnRatings(clicks, module, settings)
    return ModuleOnImported(clicks, module, settings)
