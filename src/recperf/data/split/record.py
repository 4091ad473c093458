"""What decides a split and what it comes to, the file of a dataset's split, and boundaries in time. Imports nothing
heavy: records of runs are read with it.

Shapes: N times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ...errors import ConfigError, DataError
from ...files import write_json
from ...jsonfile import Struct, as_json, read_sealed, sealed
from ..config import SPLIT_FIELDS, EventSplitOptions, SplitKind, SplitOptions, moment_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

FILE, FORM = "split.json", ("recperf-split", 1)
HELD_OUT, SEED = 0.2, 42
"""Share of the events or rows that is held out by default, and the seed that draws which."""
VALIDATION = 0.1
"""Share of what is not held out, the latest, that chooses the epoch."""
_YEAR_US = 365 * 86_400_000_000

T = TypeVar("T", bound=EventSplitOptions)


class Decided(Protocol):
    """A split, of events or of rows."""

    @property
    def options(self) -> SplitOptions:
        """What decides it; they leave nothing open."""


class Counts(Struct):
    """How many rows or events there are, and of how many users and items; None where these are not known."""

    rows: int
    users: int | None
    items: int | None


class Split(Struct, kw_only=True):
    """What a split came to: the content of a dataset's split.json, and part of a run's data.json."""

    format: str = FORM[0]
    version: int = FORM[1]
    data: str
    """Digest of the data that is divided."""
    of: Literal["events", "rows"]
    kind: SplitKind
    holdout: float | None
    """The share that was asked for; None with a boundary, and for leave-one-out."""
    boundary: str | None
    """The date that was asked for."""
    seed: int | None
    has_times: bool
    begins: int | None
    """With times: the microseconds since 1970 from which on everything is held out."""
    validation_begins: int | None
    """With times: those from which on what is before `begins` chooses the epoch."""
    rows: int
    """All rows, or all events of the imported file."""
    held_out: Counts
    unseen: Counts
    """Held-out users and items without a row that is not held out, and the held-out rows that have such."""

    @staticmethod
    def made(options: SplitOptions, moments: Sequence[int | None] | None, **facts: Any) -> Split:
        """The record of options that leave nothing open; `moments`: when validation and what is held out begin."""
        assert options.split is not None
        validation_begins, begins = moments or (None, None)
        return Split(
            kind=options.split,
            holdout=options.holdout,
            boundary=options.boundary,
            seed=options.split_seed,
            validation_begins=validation_begins,
            begins=begins,
            **facts,
        )

    @property
    def options(self) -> SplitOptions:
        return SplitOptions(split=self.kind, holdout=self.holdout, boundary=self.boundary, split_seed=self.seed)

    @property
    def digest(self) -> str:
        """What decides which rows or events are held out."""
        decides = [self.data, self.kind, [self.holdout, self.seed] if self.begins is None else self.begins]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    @property
    def text(self) -> str:
        """What is held out, in a line."""
        held, unseen = self.held_out, self.unseen
        amount = f"{held.rows:,} of {self.rows:,} {self.of}"
        users = "" if held.users is None else _count(held.users, "user")
        if self.kind == "leave-one-out":
            amount = f"the last event of {users}: {amount}"
        else:
            amount += "" if self.begins is None else f" from {moment(self.begins).removesuffix(' 00:00:00')} on"
            amount += f" drawn with seed {self.seed}" if self.kind in ("random", "cold") else ""
            amount += f", of {users}" if users else ""
        new = [_count(number, name) for name, number in (("user", unseen.users), ("item", unseen.items)) if number]
        return f"{self.kind}, {amount}" + (f"; unseen in training: {', '.join(new)}" if new else "")

    @property
    def warning(self) -> str:
        """What makes its results too good; empty if nothing does."""
        if self.kind != "leave-one-out" or not self.has_times:
            return ""
        return "leave-one-out: training sees later events of other users; --data.split time holds them out"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def moment(microseconds: int) -> str:
    """A date with its time; times of the first year after 1970 are numbers that count something else."""
    if not _YEAR_US < microseconds < 8000 * _YEAR_US:
        return f"{microseconds / 1e6:,g}"
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def read(folder: Path, data: str) -> Split | None:
    """The split of the dataset in a folder; None where it has none, as those of earlier versions. A file that was
    changed, or that is of other data, is an error."""
    path, fix = folder / FILE, "recperf data split NAME --split KIND writes it anew"
    if not os.path.lexists(path):
        return None
    split = read_sealed(path, FORM, Split, fix=fix)
    if split.data != data:
        raise DataError(f"{FILE} is the split of other data", where={"file": path}, fix=fix)
    return split


def write(folder: Path, split: Split) -> None:
    write_json(folder / FILE, sealed(split))


def decided(options: EventSplitOptions, of_dataset: Callable[[], SplitOptions]) -> SplitOptions:
    """What a run divides by: its options, and for what they leave open that of the dataset, which is read only then."""
    kind = options.split or ("time" if options.boundary else of_dataset().split)
    if kind == "leave-one-out":
        if options.split is None and options.holdout is not None:
            what = f"holdout is {options.holdout:g}, but leave-one-out holds out one event of each user"
            raise ConfigError(what, where={"field": "data.holdout"}, fix="leave it out, or choose split time")
        return SplitOptions(split=kind)
    holdout, boundary, seed = options.holdout, options.boundary, getattr(options, "split_seed", None)
    drawn = kind in ("random", "cold")
    if (holdout is None and boundary is None) or (drawn and seed is None):
        existing = of_dataset()
        same = existing if existing.split == kind else SplitOptions()
        boundary = boundary or (same.boundary if holdout is None else None)
        holdout, seed = holdout or same.holdout or HELD_OUT, same.split_seed if seed is None else seed
    return SplitOptions(
        split=kind,
        holdout=None if boundary else holdout,
        boundary=boundary,
        split_seed=(SEED if seed is None else seed) if drawn else None,
    )


def with_split(config: T, split: Decided | None) -> T:
    """A config that says itself what decides its split, so that a run is divided the same when the dataset's split
    changes."""
    assert split is not None
    return replace(config, **{name: getattr(split.options, name) for name in SPLIT_FIELDS if hasattr(config, name)})


def latest(times_N: NDArray[Any], share: float) -> int | None:
    """The time from which on about this share of times lies; None if all of them are the same."""
    import numpy as np

    count = min(max(1, round(share * len(times_N))), len(times_N))
    begin = np.partition(times_N, len(times_N) - count)[len(times_N) - count] if len(times_N) else 0
    later_N = times_N[times_N > begin] if len(times_N) and begin == times_N.min() else [begin] * bool(len(times_N))
    return int(min(later_N)) if len(later_N) else None


def boundaries(options: SplitOptions, times_N: NDArray[Any], *, unit: int, name: str) -> tuple[int | None, int]:
    """When validation begins, and when what is held out does, in the unit of the times, which has this many
    microseconds. Without two different times before the boundary nothing validates."""
    if options.boundary is None:
        begin = latest(times_N, options.holdout or HELD_OUT)
        if begin is None:
            what = f"all times of {name} are the same: it cannot be split by time"
            raise DataError(what, fix="--split leave-one-out, or for rows with a label random")
    else:
        begin = -(-moment_of(options.boundary) // unit)
        first, last = (int(one) for one in (times_N.min(), times_N.max()))
        if not first < begin <= last:
            what = f"nothing of {name} is {'before' if begin <= first else 'at or after'} {options.boundary}"
            days = f"{moment(first * unit)} to {moment(last * unit)}"
            raise DataError(what, where={"times": days}, fix="a boundary between them")
    return latest(times_N[times_N < begin], VALIDATION), begin


def of_dataset(folder: Path, data: str, default: Callable[[], SplitOptions]) -> SplitOptions:
    """What divides a dataset: its own split or, for one without, the default."""
    existing = read(folder, data)
    return default() if existing is None else existing.options


def facts_of(split: Split, note: str = "", *, newest: int | None = None) -> dict[str, Any]:
    """What data.json of a run says of its split; `newest` is the second of the last event, where there are times."""
    begins = newest if split.kind == "leave-one-out" else None if split.begins is None else split.begins // 10**6
    return {
        "split": split.kind + note,
        **({} if begins is None else {"held_out_from": begins}),
        "held_out": as_json(split),
    }
