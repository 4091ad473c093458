"""EASE, a linear model of items with a closed form (Steck 2019): each item is predicted from all other items of a user,
by the weights that lose the least squares with a penalty. A strong baseline for catalogues whose squared size fits.

Shapes: U users, I items, P pairs of a user and an item, B targets of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..data.next_item import NextItemData, Targets
from ..stop import poll
from .item_rules import best
from .next_item import Scorer, histories

MOST_ITEMS = 10_000
"""Items of which the square of floats, and its inverse, is held."""
PENALTIES = (30.0, 100.0, 300.0, 1000.0)
USUAL = 300.0
"""The only penalty that is tried where an inverse takes seconds."""
TRIED_ITEMS = 3_000
_ENTRIES = 1 << 25


def linear_baseline(data: NextItemData) -> dict[str, Callable[[], Scorer]]:
    """Makes EASE with the penalty that ranks validation targets best; nothing where the catalogue is too large."""
    return {"ease": lambda: best(data, LinearItems.options(data))} if data.items <= MOST_ITEMS else {}


@dataclass(frozen=True, eq=False)
class LinearItems:
    data: NextItemData
    weights_II: Tensor
    """How much an item of a history adds to the score of each item; 0 on the diagonal."""

    @staticmethod
    def options(data: NextItemData) -> Iterator[LinearItems]:
        """One model for each penalty."""
        counts_II = _together(data)
        for penalty in PENALTIES if data.items <= TRIED_ITEMS else (USUAL,):
            poll()
            penalised_II = counts_II.clone()
            penalised_II.diagonal().add_(penalty)
            inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(penalised_II))
            weights_II = inverse_II.div_(-inverse_II.diagonal())
            weights_II.fill_diagonal_(0.0)
            yield LinearItems(data, weights_II)

    def __call__(self, targets: Targets) -> Tensor:
        rows_P, events_P = histories(self.data, targets)
        taken_BI = torch.zeros(len(targets), self.data.items)
        taken_BI[torch.from_numpy(rows_P), torch.from_numpy(self.data.items_E[events_P].astype(np.int64) - 1)] = 1.0
        return taken_BI @ self.weights_II


def _together(data: NextItemData) -> Tensor:
    """How many users have both of two items in their training events."""
    train, items = data.train(), data.items
    rows_P, events_P = histories(data, Targets(train.users_S, train.ends_S))
    pairs_P = torch.from_numpy(np.unique(rows_P * items + data.items_E[events_P] - 1))
    users_P, columns_P = pairs_P // items, pairs_P % items
    users, ones_P = len(train), torch.ones(len(pairs_P))
    places_P = torch.stack([columns_P, users_P])
    taken_IU = torch.sparse_coo_tensor(places_P, ones_P, (items, users), check_invariants=True).coalesce()
    counts_II, size = torch.empty(items, items), max(1, _ENTRIES // max(1, users))
    for first in range(0, items, size):
        poll()
        within_P = (columns_P >= first) & (columns_P < first + size)
        part_UC = torch.zeros(users, min(size, items - first))
        part_UC[users_P[within_P], columns_P[within_P] - first] = 1.0
        counts_II[:, first : first + size] = torch.sparse.mm(taken_IU, part_UC)
    return counts_II
