"""Embedded sequences with a known effect of order: the group of the next item follows from the groups of the last two.

Which item of the group comes is drawn: the k-th of a group with a probability proportional to 1 / k. The last item
alone says little, so that only a model that reads both of the last items, in their order, ranks well.

Shapes: U users, E events, G groups, I items, N targets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .next_item import NextItemData, Targets

FOLLOWS = 0.9
"""Share of the events whose group follows from the last two; the group of the others is drawn evenly."""
SHORTEST, LONGEST = 10, 30
"""Events of a user, drawn evenly."""


@dataclass(frozen=True)
class PlantedSequences:
    """Events and the probabilities that they were drawn with."""

    users: int
    groups: int
    group_items: int
    seed: int

    @property
    def items(self) -> int:
        return self.groups * self.group_items

    def next_groups(self) -> NDArray[np.int64]:
        """The group that follows two groups, by the last but one and the last."""
        return np.random.default_rng(self.seed).integers(self.groups, size=(self.groups, self.groups))

    def shares(self) -> NDArray[np.float64]:
        """How likely each item of a group is, given the group."""
        shares = 1 / np.arange(1.0, self.group_items + 1)
        return shares / shares.sum()  # type: ignore[no-any-return]

    def data(self) -> NextItemData:
        rng = np.random.default_rng([self.seed, 1])
        lengths_U = rng.integers(SHORTEST, LONGEST + 1, self.users)
        follows_GG = self.next_groups()
        groups_UL = rng.integers(self.groups, size=(self.users, LONGEST))
        drawn_UL = rng.random((self.users, LONGEST)) >= FOLLOWS
        for place in range(2, LONGEST):
            following_U = follows_GG[groups_UL[:, place - 2], groups_UL[:, place - 1]]
            groups_UL[:, place] = np.where(drawn_UL[:, place], groups_UL[:, place], following_U)
        places_UL = rng.choice(self.group_items, size=(self.users, LONGEST), p=self.shares())
        there_UL = np.arange(LONGEST) < lengths_U[:, None]
        return NextItemData(
            name="planted-sequences",
            items=self.items,
            users=self.users,
            offsets_U1=np.concatenate([[0], np.cumsum(lengths_U)]),
            items_E=(1 + groups_UL * self.group_items + places_UL)[there_UL].astype(np.int32),
            times_E=None,
        )

    def scores(self, data: NextItemData, targets: Targets) -> NDArray[np.float64]:
        """The true probability of every item at each target, which no model can rank better by."""
        last_N2 = (data.items_E[targets.positions_N[:, None] - [2, 1]].astype(np.int64) - 1) // self.group_items
        follows_N = self.next_groups()[last_N2[:, 0], last_N2[:, 1]]
        groups_NG = np.full((len(targets), self.groups), (1 - FOLLOWS) / self.groups)
        groups_NG[np.arange(len(targets)), follows_N] += FOLLOWS
        return (groups_NG[:, :, None] * self.shares()).reshape(len(targets), self.items)


def digest_of(data: NextItemData) -> str:
    """SHA-256 of the events."""
    return hashlib.sha256(data.offsets_U1.tobytes() + data.items_E.tobytes()).hexdigest()
