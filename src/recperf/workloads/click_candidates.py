"""What click models are compared with: candidates, simple rules, and the feature that predicts best alone.

A candidate is a row with another item: which columns belong to the item is read off the training rows.

A column belongs to the item if it has one value in all training rows of each item, as a genre or the item's id does.
The others, such as the user's id or the hour, stay those of the row.

Shapes: N scored rows, P pairs of a row and an item, I items, D dense features, S columns of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.batch import ClickBatch
from ..data.order import ClickOrder, Samples, cut
from ..data.rows import Rows, Split
from ..execution.workload import ScoredRows
from ..train.baselines import MOST_TRAINING_ROWS, FeatureRows, click_rules
from ..train.metrics import auc
from ..train.ranking import Scorer, grouped_items, item_rules, log_shares, repeated_share

if TYPE_CHECKING:
    from ..data.click_store.imported import ImportedClicks

AT_ONCE = 1 << 18
"""Training rows that are read at a time."""
SPLITS: tuple[Split, Split] = ("train", "valid")
SHOWN = "its share of the training rows"
"""What says how likely users meet items."""


class ItemColumns:
    """The values of the columns that belong to items, gathered from training rows in any number of parts. The same
    class serves users: read user for item."""

    def __init__(self, items: int, dense: int, slots: int) -> None:
        self.dense_ID, self.ids_IS = torch.zeros(items, dense), torch.zeros(items, slots, dtype=torch.int64)
        self.rows_I = torch.zeros(items, dtype=torch.int64)
        """Training rows of each item."""
        self.by_item_D, self.by_item_S = torch.ones(dense, dtype=torch.bool), torch.ones(slots, dtype=torch.bool)

    def add(self, items_N: Tensor, dense_ND: Tensor, ids_NS: Tensor) -> None:
        distinct, where_N = torch.unique(items_N, return_inverse=True)
        places_N = torch.arange(len(items_N))
        first = torch.full_like(distinct, len(items_N)).scatter_reduce_(0, where_N, places_N, "amin")
        new = self.rows_I[distinct] == 0
        self.dense_ID[distinct[new]] = dense_ND[first[new]]
        self.ids_IS[distinct[new]] = ids_NS[first[new]]
        self.rows_I += torch.bincount(items_N, minlength=len(self.rows_I))
        self.by_item_D &= (dense_ND == self.dense_ID[items_N]).all(0)
        self.by_item_S &= (ids_NS == self.ids_IS[items_N]).all(0)

    def replaced(self, items_P: Tensor, dense_PD: Tensor, ids_PS: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of rows if their items were these; an item without training rows changes nothing."""
        known_P1 = (self.rows_I[items_P] > 0).unsqueeze(1)
        dense_PD = torch.where(self.by_item_D & known_P1, self.dense_ID[items_P], dense_PD)
        return dense_PD, torch.where(self.by_item_S & known_P1, self.ids_IS[items_P], ids_PS)


class ClickCatalogue:
    """The items of training rows, as candidates for validation rows."""

    user_rows_are = "training rows"
    meeting_is = SHOWN

    def __init__(
        self,
        train: ScoredRows,
        valid: ScoredRows,
        columns: ItemColumns,
        batches: Callable[[Tensor, Tensor], Iterator[ClickBatch]],
    ) -> None:
        (self.users_N, self.items_N), (self.valid_users_N, valid_items_N) = _owners(train), _owners(valid)
        self.labels_N, self.rows_I, self.batches = train.labels_N, columns.rows_I, batches
        """`batches` yields validation rows, given by number, as if their items were these."""
        self.items_I = self.rows_I.nonzero().squeeze(1)
        self.item_rows_N = self.rows_I[valid_items_N]
        users = _size(self.users_N, self.valid_users_N)
        self.user_rows_N = torch.bincount(self.users_N, minlength=users)[self.valid_users_N]

    @cached_property
    def repeats(self) -> float:
        return repeated_share(self.users_N, self.items_N)

    @cached_property
    def _items_of(self) -> Callable[[int], Tensor]:
        return grouped_items(self.users_N, self.items_N)

    def seen(self, row: int) -> Tensor:
        return self._items_of(int(self.valid_users_N[row]))

    @cached_property
    def _log_shares_I(self) -> Tensor:
        return log_shares(self.rows_I)

    def meeting(self, rows_P: Tensor, items_P: Tensor) -> Tensor:
        return self._log_shares_I[items_P]

    def rules(self) -> dict[str, Scorer]:
        return item_rules(self.users_N, self.items_N, self.labels_N, len(self.rows_I), self.valid_users_N)


def _owners(rows: ScoredRows) -> tuple[Tensor, Tensor]:
    assert rows.users_N is not None
    assert rows.items_N is not None
    return rows.users_N, rows.items_N


def _size(train_N: Tensor, valid_N: Tensor) -> int:
    return 1 + max(int(train_N.max()), int(valid_N.max()))


def of_samples(train: Samples, valid: Samples, batch_size: int) -> ClickCatalogue | None:
    """Of rows in memory; None where they have no user or no item."""
    sides = [ScoredRows(one.labels_N, one.users_N, one.items_N) for one in (train, valid)]
    if any(side.users_N is None or side.items_N is None for side in sides):
        return None
    (_, train_N), (_, valid_N) = map(_owners, sides)
    columns = ItemColumns(_size(train_N, valid_N), train.dense_ND.shape[1], len(train.keys))
    columns.add(train_N, train.dense_ND, train.ids_FN.t())

    def batches(rows_P: Tensor, items_P: Tensor) -> Iterator[ClickBatch]:
        dense_PD, ids_PS = columns.replaced(items_P, valid.dense_ND[rows_P], valid.ids_FN.t()[rows_P])
        samples = Samples(keys=valid.keys, dense_ND=dense_PD, ids_FN=ids_PS.t(), labels_N=valid.labels_N[rows_P])
        return cut(samples, batch_size)

    return ClickCatalogue(sides[0], sides[1], columns, batches)


def of_imported(clicks: ImportedClicks, batch_size: int) -> ClickCatalogue | None:
    """Of imported rows, which are read a part at a time; None where they have no user or no item."""
    sides = [imported_rows(clicks, split) for split in SPLITS]
    if any(side.users_N is None or side.items_N is None for side in sides):
        return None
    (_, train_N), (_, valid_N) = map(_owners, sides)
    columns = ItemColumns(_size(train_N, valid_N), len(clicks.dense_names), sum(clicks.slots))
    add_training_rows(clicks, (train_N, columns))

    def batches(rows_P: Tensor, items_P: Tensor) -> Iterator[ClickBatch]:
        rows = clicks.take("valid", rows_P.numpy())
        dense_PD, ids_PS = columns.replaced(
            items_P, torch.from_numpy(rows.dense_ND), torch.from_numpy(rows.ids_NS).long()
        )
        replaced = Rows(dense_PD.numpy(), ids_PS.numpy().astype(np.int32), rows.labels_N)
        store = MemoryRows(clicks.keys, clicks.slots, replaced)
        return ClickOrder(store=store, batch_size=batch_size, seed=0, split="valid").cut()

    return ClickCatalogue(sides[0], sides[1], columns, batches)


def add_training_rows(clicks: ImportedClicks, *columns: tuple[Tensor, ItemColumns]) -> None:
    """Gather columns from the training rows; each comes with the item, or the user, of every row."""
    for first in range(0, clicks.count("train"), AT_ONCE):
        rows = clicks.rows_of("train", first, first + AT_ONCE)
        dense_ND, ids_NS = torch.from_numpy(rows.dense_ND), torch.from_numpy(rows.ids_NS).long()
        for owners_N, of_owner in columns:
            of_owner.add(owners_N[first : first + AT_ONCE], dense_ND, ids_NS)


def part_of(rows: Rows, first: int, last: int) -> Rows:
    here = slice(first, last)
    return Rows(rows.dense_ND[here], rows.ids_NS[here], rows.labels_N[here])


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Rows in memory, as an order of batches reads them."""

    keys: tuple[str, ...]
    slots: tuple[int, ...]
    rows: Rows

    def count(self, split: Split) -> int:
        return len(self.rows)

    def rows_of(self, split: Split, first: int, last: int) -> Rows:
        return part_of(self.rows, first, last)

    def take(self, split: Split, places: NDArray[np.int64]) -> Rows:
        return self.rows.take(places)


def strongest_feature(train: Samples, valid: Samples) -> tuple[str, float] | None:
    """The column whose own AUC on the validation rows is highest: a number as it is, an id by the share of positive
    training labels that it has."""
    scores = {f"dense feature {place + 1}": valid.dense_ND[:, place] for place in range(valid.dense_ND.shape[1])}
    scores |= {name: scores.pop(f"dense feature {place + 1}") for place, name in enumerate(valid.dense_names)}
    for key, train_N, valid_N in zip(train.keys, train.ids_FN, valid.ids_FN):
        size = 1 + max(int(train_N.max()), int(valid_N.max()))
        positives, count = (torch.bincount(train_N, weights, size) for weights in (train.labels_N.double(), None))
        overall = float(train.labels_N.double().mean())
        scores[key] = ((positives + overall) / (count + 1))[valid_N]
    areas = {name: auc(scores_N, valid.labels_N) for name, scores_N in scores.items()}
    areas = {name: max(area, 1 - area) for name, area in areas.items()}
    return max(areas.items(), key=lambda pair: pair[1], default=None)


def imported_rows(clicks: ImportedClicks, split: Split = "valid") -> ScoredRows:
    """The labels, users, items and times of imported clicks."""
    labels_N = torch.from_numpy(clicks.labels(split)).float()
    columns = (clicks.role_ids("user", split), clicks.role_ids("item", split), clicks.times(split))
    return ScoredRows(labels_N, *(None if column is None else torch.from_numpy(column) for column in columns))


def imported_logits(clicks: ImportedClicks) -> dict[str, Tensor]:
    """Of baselines on the features of imported clicks."""
    roles = {role: getattr(clicks.manifest, role) for role in ("user", "item")}
    names = {role: name if name in clicks.keys else None for role, name in roles.items()}
    step = fitted_step(clicks)
    before = _items_before(clicks, step)
    train = _feature_rows(clicks, clicks.every("train", step), {key: ids[0] for key, ids in before.items()})
    if clicks.count("choose"):
        train = replace(train, chooses_N=torch.from_numpy(clicks.chooses()[::step]))
    rules = click_rules(train, **names)
    logits: dict[str, list[Tensor]] = {name: [] for name in rules}
    for first in range(0, clicks.count("valid"), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        valid = clicks.rows_of("valid", part.start, part.stop)
        rows = _feature_rows(clicks, valid, {key: ids[1][part] for key, ids in before.items()})
        for name, rule in rules.items():
            logits[name].append(rule(rows))
    return {name: torch.cat(parts) for name, parts in logits.items()}


def fitted_step(clicks: ImportedClicks) -> int:
    """Baselines are fitted on every so many training rows."""
    return -(-clicks.count("train") // MOST_TRAINING_ROWS)


def _items_before(clicks: ImportedClicks, step: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The last item that the user of every `step`-th training row, and of each validation row, had at an earlier time
    (0: none), and the pair of it and the row's own item, with one number for all pairs that no such training row has;
    empty where rows have no user, item or time."""
    sides = [(clicks.role_ids("user", split), clicks.role_ids("item", split), clicks.times(split)) for split in SPLITS]
    if any(column is None for side in sides for column in side):
        return {}
    users_N, items_N, times_N = (np.concatenate(columns) for columns in zip(*sides))
    order_N = np.lexsort((times_N, users_N))
    users_N, times_N = users_N[order_N], times_N[order_N]
    # Rows of one moment have the same item before.
    begins_N = np.append(True, (users_N[1:] != users_N[:-1]) | (times_N[1:] != times_N[:-1]))
    place_N = np.maximum.accumulate(np.where(begins_N, np.arange(len(users_N)), 0)) - 1
    known_N = (place_N >= 0) & (users_N[place_N] == users_N)
    before_N = np.zeros(len(users_N), np.int64)
    before_N[order_N] = np.where(known_N, items_N[order_N][place_N] + 1, 0)
    count, spread = clicks.count("train"), items_N.max() + 2
    parts = [(before_N[part], items_N[part]) for part in (slice(0, count, step), slice(count, None))]
    fitted, valid = (before * spread + items for before, items in parts)
    known, pairs_N = np.unique(fitted, return_inverse=True)
    place_V = np.searchsorted(known, valid)
    place_V[known[np.minimum(place_V, len(known) - 1)] != valid] = len(known)
    columns = {"item before": [before for before, _ in parts], "items in turn": [pairs_N, place_V]}
    return {key: (torch.from_numpy(train), torch.from_numpy(scored)) for key, (train, scored) in columns.items()}


def _feature_rows(clicks: ImportedClicks, rows: Rows, before: dict[str, Tensor] | None = None) -> FeatureRows:
    columns = torch.split(torch.from_numpy(rows.ids_NS).long(), list(clicks.slots), dim=1)
    ids = {key: column[:, 0] if column.shape[1] == 1 else column for key, column in zip(clicks.keys, columns)}
    dense_ND = torch.from_numpy(rows.dense_ND)
    if not clicks.columns.numeric:
        dense_ND = dense_ND[:, :0]
    labels_N = torch.from_numpy(rows.labels_N).float()
    return FeatureRows(dense_ND=dense_ND, ids=ids, labels_N=labels_N, before=before or {})


def imported_strongest(clicks: ImportedClicks) -> tuple[str, float] | None:
    """The column of imported clicks whose own AUC is highest; of columns with several categories none is considered."""
    sides = []
    for split in SPLITS:
        step = -(-clicks.count(split) // MOST_TRAINING_ROWS)
        rows = _feature_rows(clicks, clicks.every(split, step))
        ids = {key: ids_N for key, ids_N in rows.ids.items() if ids_N.dim() == 1}
        columns = list(ids.values())
        ids_FN = torch.stack(columns) if columns else torch.zeros(0, len(rows.labels_N), dtype=torch.int64)
        sides.append(
            Samples(
                keys=tuple(ids),
                dense_ND=rows.dense_ND,
                ids_FN=ids_FN,
                labels_N=rows.labels_N,
                dense_names=clicks.dense_names if rows.dense_ND.shape[1] else (),
            )
        )
    return strongest_feature(*sides)
