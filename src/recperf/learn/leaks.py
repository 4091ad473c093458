"""What makes a score better than is possible, as far as rows show it: an input that alone predicts the label, rows on
both sides of the split, events that are logged twice; and what is possible, where equal rows have different labels.
Without torch, so that an import can look too.

Shapes: N rows, V scored rows, D numbers, S slots of ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..data.files.values import COLUMNS, plain
from ..data.tables import Rows, Split
from ..errors import DataError
from .records import RepeatsSeen
from .rules import ALONE, LEAST_REPEATED, REPEATED, SAME_TARGET, known_text, later_text, repeated_text

if TYPE_CHECKING:
    from ..data.rows.imported import ImportedClicks

MOST, AT_IMPORT = 300_000, 50_000
"""Rows of each side of the split that are read, and of those after an import."""
DISTINCT = 100
"""Different values of a number from which on rows with equal ones are taken for the same."""
LATER, INSIDE, DATES = 0.05, 0.9, 100_000_000
"""Share of rows whose number is a time after their own from which that is said, share of a column's numbers that are
times near those of the rows where it has times, and the seconds from which these are dates, not numbers of rows."""
EQUAL = 0.5
"""Share of the held-out rows that equal another one from which their labels tell what is possible."""
SPLITS: tuple[Split, Split] = ("train", "valid")
EVENTS = 1_000_000
"""Events at the start of a store that are read after an import."""


class ClickRows(Protocol):
    """Rows with a label, by the side of the split."""

    keys: tuple[str, ...]
    slots: tuple[int, ...]

    @property
    def dense_names(self) -> tuple[str, ...]: ...

    def count(self, split: Split) -> int: ...

    def every(self, split: Split, step: int) -> Rows: ...


def _some(clicks: ClickRows, split: Split, most: int) -> Rows:
    return clicks.every(split, max(1, -(-clicks.count(split) // most)))


def areas(clicks: ClickRows, most: int = MOST) -> dict[str, float]:
    """The AUC of each column alone on the scored rows: of a number as it is, of an id by the share of positive training
    labels that it has; columns with several ids are not considered."""
    train, valid = (_some(clicks, split, most) for split in SPLITS)
    scores: dict[str, NDArray[Any]] = dict(zip(clicks.dense_names, valid.dense_ND.T))
    labels_N, mean = train.labels_N.astype(np.float64), float(train.labels_N.mean())
    for number, key in enumerate(clicks.keys):
        if clicks.slots[number] > 1:
            continue
        column = sum(clicks.slots[:number])
        train_N, valid_V = (rows.ids_NS[:, column].astype(np.int64) for rows in (train, valid))
        size = 1 + int(max(train_N.max(), valid_V.max()))
        positives, count = np.bincount(train_N, labels_N, size), np.bincount(train_N, minlength=size)
        scores[key] = ((positives + mean) / (count + 1))[valid_V]
    found = {name: area(scores_V, valid.labels_N) for name, scores_V in scores.items()}
    return {name: max(one, 1 - one) for name, one in found.items()}


def area(scores_V: NDArray[Any], labels_V: NDArray[Any]) -> float:
    """Area under the ROC curve, ties count half; 0.5 where there is only one class."""
    positives = int(labels_V.sum())
    negatives = len(labels_V) - positives
    if not positives or not negatives:
        return 0.5
    _, place_V, counts = np.unique(scores_V.astype(np.float64), return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = float(ranks[place_V][labels_V > 0].sum())
    return (total - positives * (positives + 1) / 2) / (positives * negatives)


def repeats(clicks: ClickRows, most: int = MOST) -> RepeatsSeen | None:
    """Scored rows that are training rows too, number by number; None where rows have no numbers that tell them
    apart, or are too many to compare all."""
    if max(clicks.count("train"), clicks.count("valid")) > most:
        return None
    parts = [clicks.every(split, 1) for split in SPLITS]
    if not any(len(np.unique(column)) > DISTINCT for column in parts[1].dense_ND.T):
        return None
    codes_N, codes_V = map(_codes, parts)
    known, first = np.unique(codes_N, return_index=True)
    place_V = np.searchsorted(known, codes_V)
    same_V = known[np.minimum(place_V, len(known) - 1)] == codes_V
    labels = parts[0].labels_N[first[place_V[same_V]]] == parts[1].labels_N[same_V]
    agree = float(labels.mean()) if len(labels) else 0.0
    return RepeatsSeen(rows=int(same_V.sum()), of=len(same_V), agree=agree)


def at_most(clicks: ClickRows, most: int = MOST) -> float | None:
    """The highest AUC that any scores of the inputs reach on the held-out rows: that of each row's share of positive
    labels among the rows that equal it. None where few are equal, or they are too many to compare all."""
    if clicks.count("valid") > most:
        return None
    rows = clicks.every("valid", 1)
    _, place_V, counts = np.unique(_codes(rows), return_inverse=True, return_counts=True)
    if (counts[place_V] > 1).mean() < EQUAL or rows.labels_N.min() == rows.labels_N.max():
        return None
    shares = np.bincount(place_V, rows.labels_N) / counts
    return area(shares[place_V], rows.labels_N)


def _codes(rows: Rows) -> NDArray[Any]:
    """A value for each row that only rows with the same inputs have."""
    codes = np.ascontiguousarray(np.concatenate([rows.dense_ND.view(np.int32), rows.ids_NS], 1))
    return codes.view([("", codes.dtype)] * codes.shape[1]).ravel()


def later_times(clicks: ImportedClicks, most: int = MOST) -> dict[str, float]:
    """Of columns of numbers that are times, as seconds, milliseconds or microseconds: the share of the rows that have
    one in which it is later than the time of the row."""
    times_N = getattr(clicks.split, "times_N", None)
    if times_N is None or not clicks.columns.numeric or times_N.min() < DATES * 1e6:
        return {}
    index_N = np.arange(clicks.rows)[:: max(1, -(-clicks.rows // most))]
    values_ND, times_N = clicks.arrays["dense"][index_N], times_N[index_N].astype(np.float64)
    first, span, found = times_N.min(), max(np.ptp(times_N), 1.0), {}
    for one, column_N in zip(clicks.columns.numeric, values_ND.T):
        present_N = ~np.isnan(column_N)
        for unit in (1e6, 1e3, 1.0) if present_N.any() else ():
            moments_N = column_N[present_N].astype(np.float64) * unit
            if (np.abs(moments_N - first) <= 2 * span).mean() >= INSIDE:
                # Numbers are stored as 32-bit ones.
                later = moments_N - times_N[present_N] > 2 * np.spacing(column_N[present_N]) * unit
                if later.mean() >= LATER:
                    found[one.name] = float(later.mean())
                break
    return found


def known_users(clicks: ImportedClicks) -> dict[str, float]:
    """With split cold, which promises users that never train: how many of the held-out rows have a known user all the
    same, as a share by what shows it: the spelling of ids, or another column with the name of one of users."""
    from ..data.rows.imported import FIRST

    split, shares = clicks.split, dict[str, float]()
    if split.options.split != "cold":
        return shares
    user, (train_N, valid_N) = clicks.manifest.user, (clicks.role_ids("user", part) for part in SPLITS)
    ids = clicks.own_ids("user")
    if ids is not None and train_N is not None and valid_N is not None:
        _, person_U = np.unique([_spelling(one) or f"?{place}" for place, one in enumerate(ids)], return_inverse=True)
        shares[f"{user} in another spelling"] = float(np.isin(person_U[valid_N], person_U[train_N]).mean())
    for number, (name, (_, values)) in enumerate(zip(clicks.keys, clicks.columns.sparse)):
        # Two hashed ids may share a row.
        if name != user and plain(name) in COLUMNS["user"] and values.values is not None:
            column = sum(clicks.slots[:number])
            of_train_N, of_valid_N = (clicks.every(part, 1).ids_NS[:, column] for part in SPLITS)
            shares[name] = float((np.isin(of_valid_N, of_train_N) & (of_valid_N >= FIRST)).mean())
    least = max(REPEATED, LEAST_REPEATED / max(1, clicks.count("valid")))
    return {name: share for name, share in shares.items() if share >= least}


def _spelling(text: str) -> str:
    """What ids of one user have in common: no spaces at the ends, small letters, whole numbers without zeros."""
    text = text.strip().casefold()
    number = re.fullmatch(r"0*(\d+)(\.0*)?", text)
    return number[1] if number else text


def after_import(kind: str, folder: Path) -> Iterator[str]:
    """What an imported dataset shows of leaks."""
    if kind == "clicks":
        from ..data.config import SplitConfig
        from ..data.rows.imported import ImportedClicks

        try:
            clicks = ImportedClicks(folder, SplitConfig())
        except DataError:
            # Nothing is held out: a run says so.
            return
        for name, alone in areas(clicks, AT_IMPORT).items():
            if alone >= ALONE:
                yield f"{name} alone predicts held-out labels with an AUC of {alone:.3f}: it may contain the label"
        for name, share in later_times(clicks, AT_IMPORT).items():
            yield f"{later_text(name, share)}: it may not be known yet when a row is scored"
        if text := repeated_text(repeats(clicks, AT_IMPORT)):
            yield f"{text}: import each row once, or split by time or user"
        for name, share in known_users(clicks).items():
            yield f"{known_text(name, share)}: give each user one id, or name the column of users with --user"
        return
    from ..data.events.kinds import DRAWN
    from ..data.known.event_files import open_events

    store = open_events(folder)
    first = slice(0, min(store.events, EVENTS))
    # Negatives that the import drew are no events of the user.
    happened_N = np.flatnonzero((store.kinds(first) & np.uint8(DRAWN)) == 0)
    items_N, users_N = store.items_at(first)[happened_N], store.users_of(happened_N)
    again_N = (items_N[1:] == items_N[:-1]) & (users_N[1:] == users_N[:-1])
    same = float(again_N.mean()) if len(again_N) else 0.0
    if same >= SAME_TARGET / 2:
        yield f"{same:.0%} of the events repeat the item of the event before: the next item is often in its history"
