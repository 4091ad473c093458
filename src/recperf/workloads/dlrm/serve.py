"""A trained dlrm: scores rows of imported clicks; of random data, the held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ...data.batch import ClickBatch
from ...data.rows import Table, pyarrow
from ...errors import UsageError
from ...execution.serving import Encoded, Served
from ...models.streams import SideStreams
from ...models.tiers.config import TablesConfig, scored_only
from ...stop import poll
from ..click_serve import ServedImported
from .build import ConfiguredDLRM, readable
from .config import DLRMWorkloadConfig


def serve(config: DLRMWorkloadConfig) -> Served:
    # Neither a captured step nor where batches are drawn matters without training; tables lie where they fit now.
    fast, tables = replace(config.fast, graph="off", input="auto"), TablesConfig(folder=config.tables.folder)
    configured = ConfiguredDLRM(replace(config, fast=fast, tables=tables))
    configured.tiers = scored_only(configured.tiers)
    if config.data.source == "clicks":
        return ServedImported(
            readable(config), configured.make_model(0, SideStreams(enabled=False)), configured.settings
        )
    return ServedDrawn(configured)


class ServedDrawn(Served):
    """Random rows have no columns: only the held-out ones can be scored."""

    def __init__(self, configured: ConfiguredDLRM) -> None:
        self.settings = configured.settings
        self.model, self.roles = configured.make_model(0, SideStreams(enabled=False)), {}
        self.batch_size = configured.config.train.batch_size
        self.rows = configured.rows()
        self.data_digest = self.rows.data["digest"]

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        raise UsageError("random rows have no columns", fix="recperf score RUN --held-out scores the held-out rows")

    def logits(self, inputs: ClickBatch) -> Tensor:
        poll()
        logits: Tensor = self.model(inputs.dense_BD, inputs.features)
        return logits.cpu()

    def held_out(self, seed: int) -> Iterator[tuple[Table, ClickBatch]]:
        for number, batch in enumerate(self.rows.held_out(seed)):
            rows = np.arange(number * len(batch), (number + 1) * len(batch))
            yield pyarrow().table({"row": rows, "label": batch.labels_B.cpu().numpy().astype(np.int8)}), batch
