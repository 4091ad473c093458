"""The public DLRM's training loop in our own words, to stand beside ours in one run.

Kept as it is there, because it decides the time: one EmbeddingBag a table with a sparse gradient; MLPs of Linear and
ReLU modules with a sigmoid at the end; pairs of the dot interaction listed in Python and turned into tensors at every
forward; batches made sample by sample in Python, inside a DataLoader, on the main process; a copy to the device for
every tensor, from pageable memory; the loss fetched to the host every step; torch's SGD class. Left out, in favour of
the peer: its learning-rate scheduler and what it prints.

Shapes: B samples, D width of a row, P vectors that meet (tables + 1), I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from recperf.errors import UsageError
from recperf.models.config import DLRMConfig
from recperf.workloads.dlrm.config import DLRMWorkloadConfig

ENDLESS = 1 << 40
"""Batches its Dataset says it has."""
SAMPLES, DENSE = 2048, 512


def public_batch(draw: np.random.RandomState, rows: tuple[int, ...], most: int) -> list[Any]:
    """A batch made table by table and sample by sample in Python."""
    dense = torch.tensor(draw.rand(SAMPLES, DENSE).astype(np.float32))
    all_offsets, all_ids = [], []
    for table in rows:
        offsets, ids, offset = [], [], 0
        for _ in range(SAMPLES):
            length = int(np.round(np.maximum([1.0], draw.rand(1) * min(table, most)))[0])
            group = np.unique(np.round(draw.rand(length) * (table - 1)).astype(np.int64))
            offsets += [offset]
            ids += group.tolist()
            offset += group.size
        all_offsets.append(torch.tensor(offsets))
        all_ids.append(torch.tensor(ids))
    target = torch.tensor(draw.rand(SAMPLES, 1).astype(np.float32))
    return [dense, all_offsets, all_ids, target]


@dataclass(frozen=True)
class PublicBatches(Dataset[list[Any]]):
    """An item is a whole batch, made when it is asked for."""

    draw: np.random.RandomState
    rows: tuple[int, ...]
    ids_per_bag: int

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> list[Any]:
        return public_batch(self.draw, self.rows, self.ids_per_bag)


def only_one(batches: list[list[Any]]) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """What the DataLoader collates: one batch, its offsets stacked."""
    dense_BD, offsets, ids, target_B1 = batches[0]
    return dense_BD, torch.stack(offsets), ids, target_B1


class PublicDLRM(nn.Module):
    """Parameters carry the public names."""

    def __init__(self, config: DLRMConfig, draw: np.random.RandomState) -> None:
        super().__init__()
        self.diagonal = config.diagonal
        self.emb_l = nn.ModuleList(_table(rows, config.dim, draw) for rows in config.rows)
        self.bot_l = _mlp(config.bottom, draw, sigmoid_at_end=False)
        self.top_l = _mlp(config.top_widths, draw, sigmoid_at_end=True)

    def forward(self, dense_BD: Tensor, offsets: Tensor, ids: list[Tensor]) -> Tensor:
        x_BD = self.bot_l(dense_BD)
        pooled = [table(ids[index], offsets[index]) for index, table in enumerate(self.emb_l)]
        met: Tensor = self.top_l(self._meet(x_BD, pooled))
        return met

    def _meet(self, x_BD: Tensor, pooled: list[Tensor]) -> Tensor:
        samples, width = x_BD.shape
        all_BPD = torch.cat([x_BD, *pooled], dim=1).view(samples, -1, width)
        products_BPP = torch.bmm(all_BPD, torch.transpose(all_BPD, 1, 2))
        vectors, more = products_BPP.shape[1], 1 if self.diagonal else 0
        # Indexing with tensors of the host copies them to the device, at every step.
        first = torch.tensor([i for i in range(vectors) for _ in range(i + more)])
        second = torch.tensor([j for i in range(vectors) for j in range(i + more)])
        return torch.cat([x_BD, products_BPP[:, first, second]], dim=1)


def _table(rows: int, dim: int, draw: np.random.RandomState) -> nn.EmbeddingBag:
    bound = rows**-0.5
    weight = torch.from_numpy(draw.uniform(-bound, bound, (rows, dim)).astype(np.float32))
    return nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=weight)


def _mlp(widths: tuple[int, ...], draw: np.random.RandomState, *, sigmoid_at_end: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:]):
        layer = nn.Linear(inputs, outputs)
        weight_OI = draw.normal(0.0, (2 / (inputs + outputs)) ** 0.5, (outputs, inputs)).astype(np.float32)
        bias_O = draw.normal(0.0, (1 / outputs) ** 0.5, outputs).astype(np.float32)
        layer.weight.data, layer.bias.data = torch.from_numpy(weight_OI), torch.from_numpy(bias_O)
        layers += [layer, nn.ReLU()]
    if sigmoid_at_end:
        layers[-1] = nn.Sigmoid()
    return nn.Sequential(*layers)


class PublicLoop:
    """Trains on its own batches, a step at a time."""

    def __init__(self, config: DLRMWorkloadConfig, device: str) -> None:
        if (config.train.batch_size, config.dlrm.dense) != (SAMPLES, DENSE):
            raise UsageError(
                f"the public generator is imitated for {SAMPLES} samples of {DENSE} dense features",
                fix="a preset with these sizes: experiment or intended",
            )
        draw = np.random.RandomState(config.seed)
        self.device = torch.device(device)
        self.model = PublicDLRM(config.dlrm, draw).to(self.device)
        self.loss = nn.MSELoss(reduction="mean")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.train.learning_rate)
        made = PublicBatches(draw, config.dlrm.rows, config.data.ids_per_bag)
        loader = DataLoader(made, batch_size=1, shuffle=False, num_workers=0, collate_fn=only_one, pin_memory=False)
        self.batches: Iterator[tuple[Tensor, Tensor, list[Tensor], Tensor]] = iter(loader)

    def step(self) -> tuple[float, float]:
        """One step: its loss, and the seconds it would print, which begin after the batch is there."""
        dense_BD, offsets, ids, target_B1 = next(self.batches)
        began = self._now()
        probability_B1 = self.model(
            dense_BD.to(self.device), offsets.to(self.device), [one.to(self.device) for one in ids]
        )
        loss = self.loss(probability_B1, target_B1.to(self.device))
        fetched = float(loss.detach().cpu().numpy())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return fetched, self._now() - began

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()
