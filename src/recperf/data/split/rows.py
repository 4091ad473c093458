"""Which rows with a label are held out.

Shapes: N rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..config import SplitOptions
from .record import HELD_OUT, VALIDATION, Counts, Split, boundaries

Longs = NDArray[np.int64]
Ids = NDArray[np.int64] | NDArray[np.int32]
Marks = NDArray[np.bool_]


def default_of(has_times: bool) -> SplitOptions:
    """How rows with a label are divided if nobody says how."""
    return SplitOptions(split="time" if has_times else "random")


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSplit:
    """Which rows with a label are held out; `options` leave nothing open. Rows of the same time, or without one, count
    in the order of the file."""

    name: str
    data: str
    """Digest of the rows."""
    rows: int
    options: SplitOptions
    users_N: Ids | None = None
    items_N: Ids | None = None
    times_N: Longs | None = None
    """In microseconds."""

    @property
    def has_times(self) -> bool:
        return self.times_N is not None

    @cached_property
    def _boundaries(self) -> tuple[int | None, int] | None:
        """When validation begins, and when what is held out does, without times as numbers of rows; None where rows are
        not divided by time."""
        if self.options.split != "time":
            return None
        if self.options.boundary is not None and not self.has_times:
            raise DataError(f"{self.name} has no times: it has no boundary", fix="--holdout with a share of the rows")
        return boundaries(self.options, self._times_N, unit=1, name=self.name)

    @property
    def _times_N(self) -> Longs:
        return np.arange(self.rows) if self.times_N is None else self.times_N

    @cached_property
    def valid_N(self) -> Marks:
        """The rows that are held out. At least one is, and one is not."""
        options, holdout = self.options, self.options.holdout or HELD_OUT
        if self._boundaries is not None:
            return np.asarray(self._times_N >= self._boundaries[1])
        if options.split == "leave-one-out":
            what = f"leave-one-out divides events; {self.name} has rows with a label"
            raise DataError(what, fix="split last holds out the last rows of each user")
        generator = np.random.Generator(np.random.PCG64(options.split_seed))
        if options.split == "random":
            valid_N = np.zeros(self.rows, np.bool_)
            valid_N[generator.permutation(self.rows)[: round(holdout * self.rows)]] = True
        elif self.users_N is None:
            what = f"split {options.split!r} needs a user column, which {self.name} does not have"
            raise DataError(what, fix="import it with --user COLUMN, or --data.split random")
        elif options.split == "cold":
            known = np.unique(self.users_N)
            drawn = known[generator.permutation(len(known))[: round(holdout * len(known))]]
            valid_N = np.isin(self.users_N, drawn)
        else:
            valid_N = _last_of_each_user(self.users_N, self._times_N, holdout)
        empty = "train" if valid_N.all() else "validate" if not valid_N.any() else None
        if empty:
            size = f"{self.rows:,} rows" + (
                "" if self.users_N is None else f" of {len(np.unique(self.users_N)):,} users"
            )
            raise DataError(
                f"split {options.split!r} with holdout {holdout} leaves no row to {empty} on ({size})",
                where={"data": self.name},
                fix="use more rows, another data.split or another data.holdout",
            )
        return valid_N

    @property
    def chooses_N(self) -> Marks:
        """The rows that choose the epoch. At least one row is left to train on."""
        chooses_N, train_N = np.zeros(self.rows, np.bool_), np.flatnonzero(~self.valid_N)
        if self._boundaries is not None:
            validation, begin = self._boundaries
            return chooses_N if validation is None else (self._times_N >= validation) & (self._times_N < begin)
        count = min(round(VALIDATION * len(train_N)), len(train_N) - 1)
        if count < 1:
            return chooses_N
        if self.has_times and self.options.split != "random":
            chooses_N[train_N[np.argsort(self._times_N[train_N], kind="stable")[-count:]]] = True
        else:
            chooses_N[train_N[np.linspace(0, len(train_N) - 1, count).astype(np.int64)]] = True
        return chooses_N

    @cached_property
    def record(self) -> Split:
        valid_N = self.valid_N
        columns = (self.users_N, self.items_N)
        held = [None if ids_N is None else np.unique(ids_N[valid_N]) for ids_N in columns]
        unseen_N, counts = np.zeros(int(valid_N.sum()), np.bool_), list[int | None]()
        for ids_N, distinct in zip(columns, held):
            if ids_N is None or distinct is None:
                counts.append(None)
                continue
            new = np.setdiff1d(distinct, ids_N[~valid_N])
            unseen_N |= np.isin(ids_N[valid_N], new)
            counts.append(len(new))
        return Split.made(
            self.options,
            self._boundaries if self.has_times else None,
            data=self.data,
            of="rows",
            has_times=self.has_times,
            rows=self.rows,
            held_out=Counts(len(unseen_N), *(None if distinct is None else len(distinct) for distinct in held)),
            unseen=Counts(int(unseen_N.sum()), *counts),
        )


def _last_of_each_user(users_N: Ids, times_N: Longs, holdout: float) -> Marks:
    size = len(users_N)
    order = np.lexsort((np.arange(size), times_N, users_N))
    count = np.bincount(users_N)
    from_end = np.cumsum(count)[users_N[order]] - np.arange(size)
    held = np.minimum(np.floor(count * holdout + 0.5).astype(np.int64), np.maximum(count - 1, 0))
    valid_N = np.zeros(size, np.bool_)
    valid_N[order] = from_end <= held[users_N[order]]
    return valid_N
