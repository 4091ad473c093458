"""A trained dlrm: scores rows of imported clicks or of Criteo's columns; of random data, the held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from ...data.batch import ClickBatch
from ...data.click_store.rows import Rows
from ...data.criteo import lines
from ...data.criteo.config import DENSE, KEYS
from ...data.criteo.parse import Parser
from ...data.criteo.store import CriteoStore
from ...data.rows import BadRow, Table, as_integers, is_text, one_array, pyarrow
from ...errors import DataError, UsageError
from ...execution.serving import Encoded, Served
from ...models.streams import SideStreams
from ...models.tiers.config import TablesConfig, scored_only
from ...stop import poll
from ..click_serve import ServedClicks, ServedImported
from .build import ConfiguredDLRM, DLRMBuilder
from .config import DLRMWorkloadConfig
from .data import ClickSource, imported

NUMBERS = tuple(f"i{number}" for number in range(1, DENSE + 1))


def serve(config: DLRMWorkloadConfig) -> Served:
    # Neither a captured step nor where batches are drawn matters without training; tables lie where they fit now.
    fast, tables = replace(config.fast, graph="off", input="auto"), TablesConfig(folder=config.tables.folder)
    configured = ConfiguredDLRM(replace(config, fast=fast, tables=tables))
    configured.tiers = scored_only(configured.tiers)
    if config.data.source == "clicks":
        return ServedImported(imported(config), Builder(configured).model, configured.settings)
    return ServedCriteo(configured) if config.data.source == "criteo" else ServedDrawn(configured)


class Builder(DLRMBuilder):
    def __init__(self, configured: ConfiguredDLRM) -> None:
        self.prepared = configured
        self.model = self._model(0, SideStreams(enabled=False))


class ServedCriteo(ServedClicks):
    """Rows have the columns i1 to i13, integers, and c1 to c26, hexadecimal; the log itself is not needed."""

    keys, slots, dense_names = KEYS, (1,) * len(KEYS), NUMBERS

    def __init__(self, configured: ConfiguredDLRM) -> None:
        self.config, self.settings = configured.config, configured.settings
        self.model = Builder(configured).model
        self.roles = {name: (name,) for name in (*NUMBERS, *KEYS)}
        self.parser = Parser(configured.model.rows, configured.config.data.hash_seed)

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        """Write the rows as lines of a log, which the parser of logs reads."""
        compute, arrow = pyarrow(".compute"), pyarrow()
        columns = [self._text(rows[name], name) for name in (*NUMBERS, *KEYS)]
        label = arrow.array(["0"] * len(columns[0]))
        joined = compute.binary_join_element_wise(label, *columns, "\t").to_pylist()
        parsed = self.parser.parse("".join(f"{line}\n" for line in joined).encode())
        if parsed.bad:
            row, line = parsed.bad[0]
            fault = lines.read(line)
            what = fault.what if isinstance(fault, lines.Fault) else "cannot be read"
            raise BadRow(row, what, "write integers and hexadecimal categories, as Criteo does")
        encoded = Rows(parsed.dense_ND, parsed.ids_NF, parsed.labels_N)
        return Encoded(encoded, {})

    def _text(self, column: Any, name: str) -> Any:
        arrow, compute = pyarrow(), pyarrow(".compute")
        column = one_array(column)
        if name in NUMBERS and not is_text(column):
            column = as_integers(column, name)
        elif not (is_text(column) or arrow.types.is_integer(column.type) or arrow.types.is_null(column.type)):
            raise DataError(f"column {name!r} has the type {column.type}, not hexadecimal text", fix="read it as text")
        return compute.fill_null(column.cast(arrow.string()), "")

    @cached_property
    def _store(self) -> CriteoStore:
        return CriteoStore.open(self.config.data.criteo(self.config.dlrm.rows))

    def held_out_digest(self) -> str:
        return str(self._store.conversion.manifest["digest"])

    def held_out(self, seed: int) -> Iterator[tuple[Table, Rows]]:
        store = self._store
        for first, last in self.blocks(store.count("valid")):
            rows = store.rows_of("valid", first, last)
            numbers = np.arange(store.count("train") + first, store.count("train") + last)
            yield pyarrow().table({"row": numbers, "label": rows.labels_N}), rows


class ServedDrawn(Served):
    """Random rows have no columns: only the held-out ones can be scored."""

    def __init__(self, configured: ConfiguredDLRM) -> None:
        self.config, self.settings = configured.config, configured.settings
        self.model, self.roles = Builder(configured).model, {}
        self.batch_size = configured.config.train.batch_size
        self.data_digest = ClickSource(configured.config).facts()["digest"]

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        raise UsageError("random rows have no columns", fix="recperf score RUN --held-out scores the held-out rows")

    def logits(self, inputs: ClickBatch) -> Tensor:
        poll()
        logits: Tensor = self.model(inputs.dense_BD, inputs.features)
        return logits.cpu()

    def held_out(self, seed: int) -> Iterator[tuple[Table, ClickBatch]]:
        for number, batch in enumerate(ClickSource(self.config).held_out(seed, self.settings.device)):
            rows = np.arange(number * len(batch), (number + 1) * len(batch))
            yield pyarrow().table({"row": rows, "label": batch.labels_B.cpu().numpy().astype(np.int8)}), batch
