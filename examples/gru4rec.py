"""The next item by a GRU over the history: a torch module, an optimizer of torch and the line that makes a workload."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recperf.data.next_item_batches import SequenceBatch
from recperf.tasks import NEXT_ITEM
from recperf.workloads.torch_module import Columns, ItemModuleConfig, ItemModuleTrainConfig, torch_workload


@dataclass(frozen=True, kw_only=True)
class GRU4RecConfig(ItemModuleConfig):
    dim: int = 64
    """Width of the vectors of items and of the state."""
    dropout: float = 0.2
    """Share of the numbers of a history's items that training drops."""


class GRU4Rec(nn.Module):
    def __init__(self, columns: Columns, config: GRU4RecConfig) -> None:
        super().__init__()
        self.items = nn.Embedding(columns.rows[0], config.dim)
        nn.init.normal_(self.items.weight, std=config.dim**-0.5)
        self.dropout = nn.Dropout(config.dropout)
        self.gru = nn.GRU(config.dim, config.dim, batch_first=True)

    def forward(self, batch: SequenceBatch) -> Tensor:
        states_BLD, _ = self.gru(self.dropout(self.items(batch.padded(batch.items_T))))
        return batch.packed(states_BLD)

    def item_vectors(self) -> Tensor:
        return self.items.weight[1:]


def optimizer(model: nn.Module, train: ItemModuleTrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=train.learning_rate, weight_decay=train.weight_decay)


GRU4REC = torch_workload(
    "gru4rec",
    "A GRU over histories of items",
    model="gru4rec:GRU4Rec",
    optimizer="gru4rec:optimizer",
    task=NEXT_ITEM,
    config=GRU4RecConfig,
)
