"""Wide and deep on clicks: a torch module, an optimizer of torch and one line that makes a workload of them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recperf.data.batch import ClickBatch
from recperf.workloads.torch_module import Columns, ModuleConfig, ModuleTrainConfig, torch_workload


@dataclass(frozen=True, kw_only=True)
class WideAndDeepConfig(ModuleConfig):
    dim: int = 8
    """Width of an embedding row."""


class WideAndDeep(nn.Module):
    def __init__(self, columns: Columns, config: WideAndDeepConfig) -> None:
        super().__init__()
        bags = {"mode": "sum", "include_last_offset": True}
        self.wide = nn.ModuleList(nn.EmbeddingBag(rows, 1, **bags) for rows in columns.rows)
        self.embedding = nn.ModuleList(nn.EmbeddingBag(rows, config.dim, **bags) for rows in columns.rows)
        for table in [*self.wide, *self.embedding]:
            nn.init.normal_(table.weight, std=0.01)
        width = config.dim * len(columns.rows) + columns.dense
        self.deep = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: ClickBatch) -> Tensor:
        bags = [batch.features[key] for key in batch.features.keys]
        wide_B1 = sum(table(*bag) for table, bag in zip(self.wide, bags))
        vectors = [table(*bag) for table, bag in zip(self.embedding, bags)]
        return (wide_B1 + self.deep(torch.cat([*vectors, batch.dense_BD], dim=1))).squeeze(1)


def optimizer(model: nn.Module, train: ModuleTrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=train.learning_rate, weight_decay=train.weight_decay)


WIDE_AND_DEEP = torch_workload(
    "wide-and-deep",
    "Wide and deep on clicks",
    model="wide_and_deep:WideAndDeep",
    optimizer="wide_and_deep:optimizer",
    config=WideAndDeepConfig,
)
