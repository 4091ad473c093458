"""The cuts of the events of each user, and which events are ranked.

Shapes: E events, U users, I items, N events with a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..config import EventSplitOptions, SplitOptions
from ..events.kinds import ACTION_BITS, ANCHORS, DRAWN, LIKE, LISTEN_PLUS
from ..events.store import EventStore
from .record import HELD_OUT, Counts, Split, boundaries, decided, facts_of, of_dataset

LEAST_TAKEN = 3
"""Leave-one-out holds out nothing of users who took fewer items: one is to train, one to validate and one to test."""
POSITIVE = LISTEN_PLUS | LIKE
_CHUNK = 1 << 20

Longs = NDArray[np.int64]
Marks = NDArray[np.bool_]
Part = Literal["choose", "valid"]
"""Events that choose the epoch, and events that are held out."""


def outermost(low_U: Longs, high_U: Longs, step: int, holds: Callable[[Longs], Marks]) -> Longs:
    """The first (step 1) or last (step -1) position of every user, from low to before high, for which something holds;
    -1 if there is none."""
    position_U = np.full(len(low_U), -1, np.int64)
    at_U = (low_U if step > 0 else high_U - 1).copy()
    left = np.flatnonzero(low_U < high_U)
    # It mostly holds for nearly every event: a few steps, each for all users at once, find almost all.
    while len(left):
        hit = holds(at_U[left])
        position_U[left[hit]] = at_U[left[hit]]
        left = left[~hit]
        at_U[left] += step
        left = left[(low_U[left] <= at_U[left]) & (at_U[left] < high_U[left])]
    return position_U


def default_of(store: EventStore) -> SplitOptions:
    """How events are divided if nobody says how: by time, if they have times that leave events to train on and to rank,
    else each user's last one is held out."""
    last = SplitOptions(split="leave-one-out")
    if store.time_order != "time":
        return last
    published = None if store.synthetic or store.manifest.split is None else store.manifest.split.get("test_start")
    boundary = None if published is None else str(published)
    options = SplitOptions(split="time", holdout=None if boundary else HELD_OUT, boundary=boundary)
    split = EventSplit(store, options)
    try:
        if all(len(split.targets(part)[0]) for part in ("choose", "valid")):
            return options
        return last if len(EventSplit(store, last).targets("valid")[0]) else options
    except DataError:
        return last


def of_events(store: EventStore, options: EventSplitOptions) -> EventSplit:
    """The split of events that a config asks for."""
    if options.split in (None, "time", "leave-one-out"):
        default = partial(of_dataset, store.folder, store.digest, partial(default_of, store))
        return EventSplit(store, decided(options, default))
    what = f"split {options.split!r} divides rows with a label; {store.name} has events"
    raise DataError(what, where={"store": store.folder}, fix="split time or leave-one-out, or import with --clicks")


@dataclass(frozen=True, eq=False)
class EventSplit:
    """The cuts of the events of a store; `options` leave nothing open."""

    store: EventStore
    options: SplitOptions

    @property
    def kind(self) -> Literal["time", "leave-one-out"]:
        return "time" if self.options.split == "time" else "leave-one-out"

    @cached_property
    def moments(self) -> tuple[int | None, int] | None:
        """In seconds, when validation begins, and when what is held out does; None for leave-one-out."""
        if self.kind != "time":
            return None
        if self.store.time_order != "time":
            what = f"{self.store.name} has no times, only {self.store.time_order}: it cannot be split by time"
            raise DataError(what, where={"store": self.store.folder}, fix="split leave-one-out")
        parts = (self.store.times_E[part][self._happened(part)] for part in self._parts())
        return boundaries(self.options, np.concatenate(list(parts)), unit=10**6, name=self.store.name)

    @cached_property
    def cuts(self) -> tuple[Longs, Longs]:
        """Each user's first position that chooses the epoch, and the first that is held out."""
        end_U = self._users[1]
        if self.moments is not None:
            validation, begin = (end_U if at is None else self._from(at) for at in self.moments)
            return np.minimum(validation, begin), begin
        last_3U = self._last_taken
        holds_out_U = last_3U[-1] >= 0
        validation, begin = (np.where(holds_out_U, self._begin_of(position_U), end_U) for position_U in last_3U[1::-1])
        return validation, begin

    def targets(self, part: Part) -> tuple[Longs, Longs]:
        """What is ranked: the users of events, at most one of each, and their positions. By time it is a user's first
        positive event of the part that has an earlier event of an item that the user took."""
        first_U, end_U = self._users
        if self.moments is None:
            last_3U = self._last_taken
            position_U = np.where(last_3U[-1] >= 0, last_3U[0 if part == "valid" else 1], -1)
        else:
            validation_U, held_out_U = self.cuts
            low_U, high_U = (held_out_U, end_U) if part == "valid" else (validation_U, held_out_U)
            position_U = outermost(low_U, high_U, 1, lambda at: (self.store.kinds(at) & POSITIVE) > 0)
            # Nothing can be predicted from no history.
            position_U = np.where(outermost(first_U, position_U, -1, self.taken) >= 0, position_U, -1)
        users_N = np.flatnonzero(position_U >= 0)
        return users_N, position_U[users_N]

    def taken(self, which: slice | Longs) -> Marks:
        """Which events are of items that their users took: listens and likes, without those that a label or a played
        share says were not taken, and without drawn negatives. A rating of any height counts."""
        imported = self.store.imported
        labelled = imported is None or imported.options.label is not None
        return np.asarray((self.store.kinds(which) & np.uint8(POSITIVE if labelled else ACTION_BITS)) > 0)

    def beyond(self, cut_U: Longs, part: slice) -> Marks:
        """Which of consecutive events lie at or after their user's cut."""
        begin, end, _ = part.indices(self.store.events)
        first_U1 = self.store.user_first_U1
        users = slice(int(np.searchsorted(first_U1, begin, "right")) - 1, int(np.searchsorted(first_U1, end)))
        edges = np.clip(first_U1[users.start : users.stop + 1], begin, end)
        return np.asarray(np.arange(begin, end) >= np.repeat(cut_U[users], np.diff(edges)))

    def held_out(self, part: slice) -> Marks:
        return self.beyond(self.cuts[1], part)

    def of_anchors(self) -> tuple[Marks, Marks, Marks]:
        """Of all events with a label, in their order: which are held out, which choose the epoch, and which of those
        that are held out are ranked."""
        choosing_U, held_out_U = self.cuts
        targets_N, marks = self.targets("valid")[1], []
        for part in self._parts():
            labelled_E = (self.store.kinds(part) & np.uint8(ANCHORS)) > 0
            held_out_E, later_E = self.beyond(held_out_U, part), self.beyond(choosing_U, part)
            target_E = np.isin(np.arange(part.start, part.stop), targets_N)
            marks.append([one[labelled_E] for one in (held_out_E, later_E & ~held_out_E, target_E)])
        held_out_N, chooses_N, target_N = (np.concatenate(columns) for columns in zip(*marks))
        return held_out_N, chooses_N, target_N

    @cached_property
    def record(self) -> Split:
        """What it comes to. Drawn negatives belong to the event that they were drawn for, and are not counted."""
        store, (first_U, end_U), (_, begin_U) = self.store, self._users, self.cuts
        after_U = begin_U < end_U
        unseen_U = after_U & (begin_U == first_U)
        in_training_I, held_out_I = (np.zeros(store.items, np.bool_) for _ in range(2))
        rows = held_out = 0
        for part in self._parts():
            happened_E, after_E, items_E = self._happened(part), self.held_out(part), store.items_at(part)
            in_training_I[items_E[happened_E & ~after_E]] = True
            held_out_I[items_E[happened_E & after_E]] = True
            rows, held_out = rows + int(happened_E.sum()), held_out + int((happened_E & after_E).sum())
        unseen_I, unseen_rows = held_out_I & ~in_training_I, 0
        for part in self._parts() if unseen_U.any() or unseen_I.any() else ():
            after_E = self._happened(part) & self.held_out(part)
            users_E = store.users_of(np.arange(part.start, part.stop)[after_E])
            unseen_rows += int((unseen_U[users_E] | unseen_I[store.items_at(part)[after_E]]).sum())
        return Split.made(
            self.options,
            None if self.moments is None else [at and at * 10**6 for at in self.moments],
            data=store.digest,
            of="events",
            has_times=store.time_order == "time",
            rows=rows,
            held_out=Counts(held_out, int(after_U.sum()), int(held_out_I.sum())),
            unseen=Counts(unseen_rows, int(unseen_U.sum()), int(unseen_I.sum())),
        )

    def facts(self, note: str) -> dict[str, Any]:
        """What data.json of a run says of it."""
        newest = int(self.store.times_E[self._users[1] - 1].max()) if self.store.time_order == "time" else None
        return facts_of(self.record, note, newest=newest)

    @property
    def _users(self) -> tuple[Longs, Longs]:
        first_U1 = self.store.user_first_U1
        return first_U1[:-1], first_U1[1:]

    @cached_property
    def _last_taken(self) -> list[Longs]:
        """The positions of the last events of items that each user took, the last one first; -1: there is none."""
        first_U, high_U = self._users
        positions = []
        for _ in range(LEAST_TAKEN):
            high_U = outermost(first_U, high_U, -1, self.taken)
            positions.append(high_U)
        return positions

    def _begin_of(self, position_U: Longs) -> Longs:
        """Where a part that begins with these events does: with the negatives that were drawn for them."""
        if self.store.stored_per_event == 1:
            return position_U
        first_U = self._users[0]
        before_U = outermost(first_U, position_U, -1, lambda at: (self.store.kinds(at) & np.uint8(DRAWN)) == 0)
        return np.where(before_U >= 0, before_U + 1, first_U)

    def _from(self, moment: int) -> Longs:
        """The position of each user's first event at or after a moment."""
        return self.store.first_at(*self._users, np.full(self.store.users, moment))

    def _happened(self, part: slice) -> Marks:
        """Which events are of the imported file, not drawn."""
        return np.asarray((self.store.kinds(part) & np.uint8(DRAWN)) == 0)

    def _parts(self) -> Iterator[slice]:
        for start in range(0, self.store.events, _CHUNK):
            yield slice(start, min(start + _CHUNK, self.store.events))
