"""Implicit matrix factorisation by alternating least squares (Hu, Koren and Volinsky 2008): a vector for each user and
each item, whose product is 1 for what a user took and, with a smaller weight, 0 for all items.

With the vectors of the items fixed, that of a user solves a linear system, and the other way round. To rank, the vector
of a user is solved from the history, so that users need none of their own.

Shapes: U users, I items, O owners of vectors (users or items), P pairs of a user and an item, D width, B owners at a
time, L members of each.
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
from .next_item import Longs, Products, Scorer, histories

DIM, SWEEPS = 64, 4
ALL_ITEMS = 4.0
"""The weight of all items together, over that of the items that a user took on average."""
PENALTIES = (0.01, 0.03, 0.1)
"""Of the squares of a vector, for each unit of weight of its owner."""
MOST_PAIRS = 400_000
"""Pairs that the vectors of the items are fitted to: those of users at equal distances."""
STEPS, START_STEPS = 3, 12
"""Steps of conjugate gradients, from the vector of the sweep before and from 0."""
_ENTRIES = 1 << 23


def factor_baseline(data: NextItemData) -> dict[str, Callable[[], Scorer]]:
    """Makes the factorisation with the penalty that ranks validation targets best."""
    return {"als": lambda: best(data, (option.products for option in ItemFactors.options(data)))}


@dataclass(frozen=True, eq=False)
class Members:
    """The items of each user, or the users of each item."""

    offsets_O1: Longs
    members_P: Tensor

    @staticmethod
    def of(owners_P: Longs, members_P: Longs, owners: int) -> Members:
        offsets_O1 = np.append(0, np.cumsum(np.bincount(owners_P, minlength=owners)))
        return Members(offsets_O1, torch.from_numpy(members_P[np.argsort(owners_P, kind="stable")]))

    def solved(self, vectors: Tensor, weight: float, penalty: float, before_OD: Tensor | None = None) -> Tensor:
        """The vectors of the owners from those of their members, near those of the sweep before. `weight` is that of
        every pair. Owners with about as many members are solved together."""
        lengths_O, dim = np.diff(self.offsets_O1), vectors.shape[1]
        solved_OD = vectors.new_zeros(len(lengths_O), dim) if before_OD is None else before_OD.clone()
        steps, all_DD = START_STEPS if before_OD is None else STEPS, weight * (vectors.t() @ vectors)
        # One more member, for owners with fewer than others.
        padded, members_P1 = (
            torch.cat([vectors, vectors.new_zeros(1, dim)]),
            torch.cat([self.members_P, torch.tensor([-1])]),
        )
        order_O, first = np.argsort(-lengths_O, kind="stable")[: np.count_nonzero(lengths_O)], 0
        while first < len(order_O):
            poll()
            most = int(lengths_O[order_O[first]])
            owners_B = order_O[first : first + max(1, _ENTRIES // (most * dim))]
            first += len(owners_B)
            lengths_B1 = lengths_O[owners_B][:, None]
            places_BL = self.offsets_O1[owners_B][:, None] + np.arange(most)
            places_BL[np.arange(most) >= lengths_B1] = -1
            own_BLD = padded[members_P1[torch.from_numpy(places_BL)]]
            ridge_B1 = penalty * (torch.from_numpy(lengths_B1) + weight * len(vectors)).to(vectors.dtype)

            def product(x_BD: Tensor, own_BLD: Tensor = own_BLD, ridge_B1: Tensor = ridge_B1) -> Tensor:
                taken_BD = ((own_BLD @ x_BD[:, :, None]).transpose(1, 2) @ own_BLD)[:, 0]
                return taken_BD + x_BD @ all_DD + ridge_B1 * x_BD

            rows_B = torch.from_numpy(owners_B)
            solved_OD[rows_B] = conjugate_gradients(product, own_BLD.sum(1), solved_OD[rows_B], steps)
        return solved_OD


def conjugate_gradients(product: Callable[[Tensor], Tensor], right_BD: Tensor, x_BD: Tensor, steps: int) -> Tensor:
    """Solutions of symmetric positive definite systems, one in each row, as near as some steps from `x_BD` come."""
    rest_BD = right_BD - product(x_BD)
    way_BD, squares_B1 = rest_BD, rest_BD.square().sum(1, keepdim=True)
    for _ in range(steps):
        along_BD = product(way_BD)
        length_B1 = squares_B1 / (way_BD * along_BD).sum(1, keepdim=True).clamp_min(1e-30)
        x_BD, rest_BD = x_BD + length_B1 * way_BD, rest_BD - length_B1 * along_BD
        before_B1, squares_B1 = squares_B1, rest_BD.square().sum(1, keepdim=True)
        way_BD = rest_BD + squares_B1 / before_B1.clamp_min(1e-30) * way_BD
    return x_BD


@dataclass(frozen=True, eq=False)
class ItemFactors:
    """The vectors of the items, and what users' vectors are solved with."""

    data: NextItemData
    items_ID: Tensor
    weight: float
    penalty: float

    @staticmethod
    def options(data: NextItemData) -> Iterator[ItemFactors]:
        """One factorisation for each penalty."""
        pairs = _pairs(data)
        for penalty in PENALTIES:
            yield ItemFactors.fitted(data, penalty, pairs)

    @staticmethod
    def fitted(data: NextItemData, penalty: float, pairs: tuple[Longs, Longs]) -> ItemFactors:
        (users_P, columns_P), items = pairs, data.items
        of_users, of_items = (
            Members.of(users_P, columns_P, int(users_P.max()) + 1),
            Members.of(columns_P, users_P, items),
        )
        weight = ALL_ITEMS * len(users_P) / (len(np.unique(users_P)) * items)
        items_ID = 0.1 / DIM**0.5 * torch.randn(items, DIM, generator=torch.Generator().manual_seed(0))
        users_UD = None
        for _ in range(SWEEPS):
            users_UD = of_users.solved(items_ID, weight, penalty, users_UD)
            items_ID = of_items.solved(users_UD, weight, penalty, items_ID)
        return ItemFactors(data, items_ID, weight, penalty)

    def users(self, targets: Targets) -> Tensor:
        """The vectors of users before some targets."""
        rows_P, events_P = histories(self.data, targets)
        rows_P, columns_P = _distinct(self.data, rows_P, events_P)
        return Members.of(rows_P, columns_P, len(targets)).solved(self.items_ID, self.weight, self.penalty)

    @property
    def products(self) -> Products:
        return Products(self.users, self.items_ID)


def _pairs(data: NextItemData) -> tuple[Longs, Longs]:
    """Users, numbered anew, and the items of their training events, each once."""
    train = data.train()
    step = -(-int((train.ends_S - train.begins_S).sum()) // MOST_PAIRS)
    return _distinct(data, *histories(data, Targets(train.users_S[::step], train.ends_S[::step])))


def _distinct(data: NextItemData, rows_P: Longs, events_P: Longs) -> tuple[Longs, Longs]:
    return np.divmod(np.unique(rows_P * data.items + data.items_E[events_P] - 1), data.items)
