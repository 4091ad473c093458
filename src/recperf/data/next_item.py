"""Users' items in time order for next-item models: which part trains, and which events are to be predicted.

Shapes: U users, E events, S training sequences, N targets, I items (row 0 is padding), G groups of planted items.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..ops.followers.reference import ranges
from .config import EventSplitOptions
from .events.item_table import ItemValues, item_values
from .events.store import EventStore
from .known.event_files import open_events
from .split.events import LEAST_TAKEN, EventSplit, of_events

MOST_EVENTS = 1 << 30
PART = 1 << 24
"""Events that are counted at a time."""
FOLLOWS = 0.9
"""Share of planted events whose group follows from the last two; the group of the others is drawn evenly."""
DAY = 86_400
SHORTEST, LONGEST = 10, 30
"""Events of a user in planted sequences, drawn evenly."""

Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sequences:
    """The part of each user's events that trains, as ranges of `NextItemData.items_E`."""

    users_S: Longs
    begins_S: Longs
    ends_S: Longs

    def __len__(self) -> int:
        return len(self.users_S)


@dataclass(frozen=True, eq=False)
class Targets:
    """Events to predict. The history is everything of the user before the event, or with `spans_N2` before the first of
    the events that are predicted together."""

    users_N: Longs
    positions_N: Longs
    """Positions of the target events in `NextItemData.items_E`."""
    spans_N2: Longs | None = None
    """Where the events begin and end that are predicted together with each target; None: it is alone."""

    def __len__(self) -> int:
        return len(self.users_N)

    def __getitem__(self, part: slice | Longs) -> Targets:
        spans_N2 = None if self.spans_N2 is None else self.spans_N2[part]
        return Targets(self.users_N[part], self.positions_N[part], spans_N2)

    @property
    def ends_N(self) -> Longs:
        """Where the histories end."""
        return self.positions_N if self.spans_N2 is None else self.spans_N2[:, 0]


@dataclass(frozen=True, kw_only=True, eq=False)
class NextItemData:
    """All events by user in time order. Items are numbered 1 to `items`; 0 is padding."""

    name: str
    items: int
    users: int
    offsets_U1: Longs
    items_E: NDArray[np.int32]
    times_E: Longs | None
    """Seconds; None where the file has no times, only an order."""
    split: EventSplit | None = None
    """Which events of the store are held out; None: each user's last one, and the one before it validates."""
    store: EventStore | None = None
    horizon: float = 0.0
    """Days after a held-out event within which the user's later events are predicted with it."""
    padding_id: int = 0
    """Item k has the number k + padding_id in the store: 0, or -1 if the store has events of its item 0."""
    train_share: float = 1.0
    """Share of the users with training events, drawn at random, whose events train."""

    @staticmethod
    def from_store(store: EventStore, split: EventSplit | None = None, *, horizon: float = 0.0) -> NextItemData:
        """The items that users took. The split is by default that of the dataset."""
        if store.events > MOST_EVENTS:
            what = f"{store.events:,} events are too many for next-item models, which hold all of them in memory"
            raise DataError(what, where={"store": store.folder}, fix=f"import at most {MOST_EVENTS:,} events")
        split = split or of_events(store, EventSplitOptions())
        if horizon and split.kind != "time":
            what = f"data.horizon counts days from the held-out events on, and {store.name} is split {split.kind}"
            raise DataError(what, where={"field": "data.horizon"}, fix="--data.split time, or leave data.horizon out")
        chosen_E: Any = split.taken(slice(None))
        if not chosen_E.any():
            what = f"no event of {store.name} says that a user took an item"
            raise DataError(what, where={"store": store.folder}, fix="check the label that was imported")
        offsets_U1 = _before(chosen_E, store.user_first_U1)
        if chosen_E.all():
            # Without copies of all events.
            chosen_E = slice(None)
        items_E = store.items_at(slice(None))[chosen_E].astype(np.int32)
        padding_id = 0 if items_E.min() > 0 else -1
        return NextItemData(
            name=store.name,
            items=store.items - 1 - padding_id,
            users=store.users,
            offsets_U1=offsets_U1,
            items_E=items_E - np.int32(padding_id),
            times_E=store.times_E[:][chosen_E].astype(np.int64) if store.time_order == "time" else None,
            split=split,
            store=store,
            horizon=horizon,
            padding_id=padding_id,
        )

    @property
    def kind(self) -> Literal["time", "leave-one-out"]:
        return "leave-one-out" if self.split is None else self.split.kind

    def values(self) -> ItemValues | None:
        """The features of items 0 to `items`; None where the store has none."""
        values = item_values(self.store) if self.store else None
        if values is None:
            return None
        before = ((-self.padding_id, 0), (0, 0))
        return ItemValues(values.names, np.pad(values.rows_IK, before), np.pad(values.weights_IK, before))

    def train(self) -> Sequences:
        """The training events of every user that has any, or of a share of these users."""
        begins_U, ends_U = self.offsets_U1[:-1], self._divided[0]
        users_S = np.flatnonzero(ends_U > begins_U)
        if self.train_share < 1.0:
            # Those of a smaller share are part of those of a larger one.
            users_S = users_S[np.random.default_rng(len(users_S)).random(len(users_S)) < self.train_share]
        return Sequences(users_S, begins_U[users_S], ends_U[users_S])

    def validation(self) -> Targets:
        """The events that choose the epoch."""
        return self._divided[1]

    def test(self) -> Targets:
        """The held-out events that are scored."""
        return self._divided[2]

    @cached_property
    def _divided(self) -> tuple[Longs, Targets, Targets]:
        """Where the training events of each user end, and what is to be predicted."""
        if self.split is None:
            ends_U = self.offsets_U1[1:]
            users_N = np.flatnonzero(np.diff(self.offsets_U1) >= LEAST_TAKEN)
            targets = [Targets(users_N, ends_U[users_N] - back) for back in (2, 1)]
            ends_U = ends_U.copy()
            ends_U[users_N] -= 2
            return ends_U, targets[0], targets[1]
        taken_E, parts = self.split.taken(slice(None)), [self.split.targets(part) for part in ("choose", "valid")]
        targets = [Targets(users_N, _before(taken_E, positions_N)) for users_N, positions_N in parts]
        if self.horizon:
            ends = (_before(taken_E, self.split.cuts[1]), self.offsets_U1[1:])
            targets = [self._together(part, end_U) for part, end_U in zip(targets, ends)]
        return _before(taken_E, self.split.cuts[0]), targets[0], targets[1]

    def _together(self, firsts: Targets, end_U: Longs) -> Targets:
        """These events and those of the same users within the horizon before some ends, each item of a user once."""
        assert self.times_E is not None
        longest_N = end_U[firsts.users_N] - firsts.positions_N
        rows_P, positions_P = ranges(firsts.positions_N, longest_N)
        until_N = self.times_E[firsts.positions_N] + int(self.horizon * DAY)
        inside_P = self.times_E[positions_P] <= until_N[rows_P]
        rows_P, positions_P = rows_P[inside_P], positions_P[inside_P]
        begins_P, counts_N = firsts.positions_N[rows_P], np.bincount(rows_P, minlength=len(firsts))
        spans_P2 = np.stack([begins_P, begins_P + counts_N[rows_P]], 1)
        once = np.sort(np.unique(rows_P * (self.items + 1) + self.items_E[positions_P], return_index=True)[1])
        return Targets(firsts.users_N[rows_P], positions_P, spans_P2)[once]


def _before(taken_E: NDArray[np.bool_], positions_N: Longs) -> Longs:
    """How many events before each position users took."""
    if taken_E.all():
        return positions_N.astype(np.int64)
    # Sums of parts, so that there is no number for each event.
    edges_P1 = np.append(np.arange(0, len(taken_E), PART), len(taken_E))
    sums_P = np.append(0, np.cumsum(np.add.reduceat(taken_E, edges_P1[:-1], dtype=np.int64)))
    before_N, order_N = np.empty(len(positions_N), np.int64), np.argsort(positions_N, kind="stable")
    bounds_P1 = np.searchsorted(positions_N[order_N], edges_P1)
    bounds_P1[-1] = len(order_N)
    for part, (begin, end) in enumerate(zip(edges_P1, edges_P1[1:])):
        some = order_N[bounds_P1[part] : bounds_P1[part + 1]]
        within = np.append(0, np.cumsum(taken_E[begin:end]))
        before_N[some] = sums_P[part] + within[positions_N[some] - begin]
    return before_N


def read(path: Path, options: EventSplitOptions) -> NextItemData:
    """The items that users took in the events of a folder, divided as a config says."""
    store = open_events(path)
    return NextItemData.from_store(store, of_events(store, options), horizon=getattr(options, "horizon", 0.0))


@dataclass(frozen=True)
class PlantedSequences:
    """Embedded sequences with a known effect of order: the group of the next item follows from the groups of the last
    two.

    Which item of the group comes is drawn: the k-th of a group with a probability proportional to 1 / k. The last item
    alone says little, so that only a model that reads both of the last items, in their order, ranks well.
    """

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
        for step in range(2, LONGEST):
            following_U = follows_GG[groups_UL[:, step - 2], groups_UL[:, step - 1]]
            groups_UL[:, step] = np.where(drawn_UL[:, step], groups_UL[:, step], following_U)
        item_UL = rng.choice(self.group_items, size=(self.users, LONGEST), p=self.shares())
        there_UL = np.arange(LONGEST) < lengths_U[:, None]
        return NextItemData(
            name="planted-sequences",
            items=self.items,
            users=self.users,
            offsets_U1=np.concatenate([[0], np.cumsum(lengths_U)]),
            items_E=(1 + groups_UL * self.group_items + item_UL)[there_UL].astype(np.int32),
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
