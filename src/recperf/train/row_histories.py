"""Rules that rank items by those that a user took before, for rows with a label: the baselines of next items, fitted to
the training rows.

Shapes: N rows, P pairs of a row and an item, U users.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..data.next_item import NextItemData, Sequences, Targets
from . import next_item
from .baselines import Rules
from .factor_items import factor_baseline
from .item_rules import baselines
from .linear_items import linear_baseline
from .next_item import Longs
from .ranking import Scorer

LEAST = 3
"""Users with at least so many training rows have the last one chosen by."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingRows(NextItemData):
    """The items that users took in training rows. The last one of each user chooses the settings of the rules."""

    @staticmethod
    def of(users_N: Tensor, items_N: Tensor, times_N: Tensor | None, *, users: int, items: int) -> TrainingRows:
        """Of rows with numbers of users and items that begin with 0."""
        order_N = np.arange(len(users_N)) if times_N is None else np.argsort(times_N.numpy(), kind="stable")
        order_N = order_N[np.argsort(users_N.numpy()[order_N], kind="stable")]
        return TrainingRows(
            name="training rows",
            items=items,
            users=users,
            offsets_U1=np.append(0, np.cumsum(np.bincount(users_N.numpy(), minlength=users))),
            items_E=(items_N.numpy()[order_N] + 1).astype(np.int32),
            times_E=None,
        )

    @property
    def _chooses_U(self) -> Longs:
        return np.flatnonzero(np.diff(self.offsets_U1) >= LEAST)

    def train(self) -> Sequences:
        begins_U, ends_U = self.offsets_U1[:-1], self.offsets_U1[1:].copy()
        ends_U[self._chooses_U] -= 1
        users_S = np.flatnonzero(ends_U > begins_U)
        return Sequences(users_S, begins_U[users_S], ends_U[users_S])

    def validation(self) -> Targets:
        return Targets(self._chooses_U, self.offsets_U1[1:][self._chooses_U] - 1)


def by_history(data: TrainingRows, users_N: Tensor) -> Rules[Scorer]:
    """The rules as scorers of rows of these users with other items; none where there is nothing to fit."""
    if not len(data.validation()):
        return Rules({})
    makers: dict[str, Callable[[], next_item.Scorer | None]] = {
        name: make for name, make in baselines(data).items() if name in ("item_to_item", "item_knn")
    }
    rules = Rules({**makers, **factor_baseline(data), **linear_baseline(data)})
    return rules.then(lambda rule: _scorer(rule, data, users_N.numpy()))


def _scorer(rule: next_item.Scorer, data: TrainingRows, users_N: Longs) -> Scorer:
    together = max(1, next_item.SCORES // data.items)

    def score(rows_P: Tensor, items_P: Tensor) -> Tensor:
        """Neighbouring pairs mostly have the same row, which is scored for all items once."""
        rows_B, places_P = torch.unique_consecutive(rows_P, return_inverse=True)
        users_B, parts = users_N[rows_B.numpy()], []
        for first in range(0, len(rows_B), together):
            users = users_B[first : first + together]
            begin, end = torch.searchsorted(places_P, torch.tensor([first, first + len(users)])).tolist()
            scores_BI = rule(Targets(users, data.offsets_U1[1:][users]))
            parts.append(scores_BI[places_P[begin:end] - first, items_P[begin:end]])
        return torch.cat(parts)

    return score
