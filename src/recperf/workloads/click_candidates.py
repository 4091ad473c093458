"""What click models are compared with: candidates, simple rules, and the feature that predicts best alone.

A candidate is a row with another item: which columns belong to the item is read off the training rows.

A column belongs to the item if it has one value in all training rows of each item, as a genre or the item's id does.
The others, such as the user's id or the hour, stay those of the row.

Shapes: N scored rows, P pairs of a row and an item, I items, D dense features, S columns of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..data.batch import ClickBatch
from ..data.order import ClickOrder
from ..data.tables import MemoryRows, Rows, Split
from ..execution.workload import ScoredRows
from ..train.baselines import MOST_TRAINING_ROWS, ClickRule, FeatureRows, Rules, click_rules
from ..train.ranking import Scorer, grouped_items, item_rules, log_shares, repeated_share

if TYPE_CHECKING:
    from ..data.rows.clicks import Clicks
    from ..data.rows.imported import ImportedClicks
    from ..train.row_histories import TrainingRows

    ClickRows = ImportedClicks | Clicks

AT_ONCE = 1 << 18
"""Training rows that are read at a time."""
SPLITS: tuple[Split, Split] = ("train", "valid")
SHOWN = "its share of the training rows"
"""What says how likely users see items."""


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
    """The items of all rows, as candidates for validation rows."""

    user_rows_are = "training rows"
    meeting_is = SHOWN

    def __init__(
        self,
        train: ScoredRows,
        valid: ScoredRows,
        columns: ItemColumns,
        batches: Callable[[Tensor, Tensor], Iterator[ClickBatch]],
        taken: tuple[Tensor, Tensor],
    ) -> None:
        """`taken`: of which training and validation rows the user took the item."""
        (self.users_N, self.items_N), (self.valid_users_N, valid_items_N) = _owners(train), _owners(valid)
        self.labels_N, self.rows_I, self.batches = train.labels_N, columns.rows_I, batches
        """`batches` yields validation rows, given by number, as if their items were these."""
        self._valid, (self._taken_N, self._taken_V), self._times_N = valid, taken, train.times_N
        # 0 stands for a missing item.
        self.items_I = torch.unique(torch.cat([self.items_N, valid_items_N]))
        self.items_I = self.items_I[self.items_I > 0]
        self.item_rows_N = self.rows_I[valid_items_N]
        users = _size(self.users_N, self.valid_users_N)
        self.user_rows_N = torch.bincount(self.users_N, minlength=users)[self.valid_users_N]

    @cached_property
    def repeats(self) -> float:
        return repeated_share([(self.users_N[self._taken_N], self.items_N[self._taken_N])])

    @cached_property
    def _items_of(self) -> Callable[[int], Tensor]:
        return grouped_items(self.users_N[self._taken_N], self.items_N[self._taken_N])

    @cached_property
    def _rows_of(self) -> Callable[[int], Tensor]:
        taken_V = self._taken_V.nonzero().squeeze(1)
        return grouped_items(self.valid_users_N[taken_V], taken_V)

    def seen(self, row: int) -> Tensor:
        user, times_N = int(self.valid_users_N[row]), self._valid.times_N
        trained = self._items_of(user)
        if times_N is None:
            return trained
        _, items_N = _owners(self._valid)
        rows = self._rows_of(user)
        return torch.cat([trained, items_N[rows[times_N[rows] < times_N[row]]]])

    @cached_property
    def sequences(self) -> TrainingRows:
        """The items that users took in training rows, in the order of time or, without times, of the rows."""
        from ..train.row_histories import TrainingRows

        taken_N = self._taken_N
        return TrainingRows.of(
            self.users_N[taken_N],
            self.items_N[taken_N],
            None if self._times_N is None else self._times_N[taken_N],
            users=_size(self.users_N, self.valid_users_N),
            items=len(self.rows_I),
        )

    @cached_property
    def _log_shares_I(self) -> Tensor:
        return log_shares(self.rows_I)

    def meeting(self, rows_P: Tensor, items_P: Tensor) -> Tensor:
        return self._log_shares_I[items_P]

    def rules(self) -> Rules[Scorer]:
        """Counts and biases, then what ranks items by those that a user took."""
        from ..train.row_histories import by_history

        simple = item_rules(self.users_N, self.items_N, self.labels_N, len(self.rows_I), self.valid_users_N)
        return Rules.of(simple) | by_history(self.sequences, self.valid_users_N)


def _owners(rows: ScoredRows) -> tuple[Tensor, Tensor]:
    assert rows.users_N is not None
    assert rows.items_N is not None
    return rows.users_N, rows.items_N


def _size(train_N: Tensor, valid_N: Tensor) -> int:
    return 1 + max(int(train_N.max()), int(valid_N.max()))


def catalogue_of(clicks: ClickRows, batch_size: int) -> ClickCatalogue | None:
    """The items of training rows, which are read a part at a time; None where rows have no user or no item."""
    train, valid = (scored_rows(clicks, split) for split in SPLITS)
    if train.users_N is None or train.items_N is None or valid.items_N is None:
        return None
    columns = ItemColumns(_size(train.items_N, valid.items_N), len(clicks.dense_names), sum(clicks.slots))
    add_rows(clicks, "train", (train.items_N, columns))

    def batches(rows_P: Tensor, items_P: Tensor) -> Iterator[ClickBatch]:
        rows = clicks.take("valid", rows_P.numpy())
        dense_PD, ids_PS = columns.replaced(
            items_P, torch.from_numpy(rows.dense_ND), torch.from_numpy(rows.ids_NS).long()
        )
        replaced = Rows(dense_PD.numpy(), ids_PS.numpy().astype(np.int32), rows.labels_N)
        store = MemoryRows(clicks.keys, clicks.slots, replaced)
        return ClickOrder(store=store, batch_size=batch_size, seed=0, split="valid").cut()

    taken = [torch.from_numpy(clicks.taken(split)) for split in SPLITS]
    return ClickCatalogue(train, valid, columns, batches, (taken[0], taken[1]))


def add_rows(clicks: ClickRows, split: Split, *columns: tuple[Tensor, ItemColumns]) -> None:
    """Gather columns from the rows of a split; each comes with the item, or the user, of every row."""
    for first in range(0, clicks.count(split), AT_ONCE):
        rows = clicks.rows_of(split, first, first + AT_ONCE)
        dense_ND, ids_NS = torch.from_numpy(rows.dense_ND), torch.from_numpy(rows.ids_NS).long()
        for owners_N, of_owner in columns:
            of_owner.add(owners_N[first : first + AT_ONCE], dense_ND, ids_NS)


def part_of(rows: Rows, first: int, last: int) -> Rows:
    here = slice(first, last)
    return Rows(rows.dense_ND[here], rows.ids_NS[here], rows.labels_N[here])


def scored_rows(clicks: ClickRows, split: Split = "valid") -> ScoredRows:
    """The labels, users, items and times of a split, and which rows are ranked."""
    labels_N = torch.from_numpy(clicks.labels(split)).float()
    targets_N = getattr(clicks, "targets_N", None) if split == "valid" else None
    columns = (clicks.role_ids("user", split), clicks.role_ids("item", split), clicks.times(split), targets_N)
    return ScoredRows(labels_N, *(None if column is None else torch.from_numpy(column) for column in columns))


def imported_logits(clicks: ImportedClicks) -> Rules[Tensor]:
    """Of baselines on the features of imported clicks."""
    roles = {role: getattr(clicks.manifest, role) for role in ("user", "item")}
    names = {role: name if name in clicks.keys else None for role, name in roles.items()}
    step = fitted_step(clicks)
    before = _items_before(clicks, step)
    train = _feature_rows(clicks, clicks.every("train", step), {key: ids[0] for key, ids in before.items()})
    if clicks.count("choose"):
        train = replace(train, chooses_N=torch.from_numpy(clicks.chooses()[::step]))

    def scored(rule: ClickRule) -> Tensor:
        parts = []
        for first in range(0, clicks.count("valid"), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            valid = clicks.rows_of("valid", part.start, part.stop)
            parts.append(rule(_feature_rows(clicks, valid, {key: ids[1][part] for key, ids in before.items()})))
        return torch.cat(parts)

    return click_rules(train, **names).then(scored)


def fitted_step(clicks: ImportedClicks) -> int:
    """The distance between the training rows that baselines are fitted on."""
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


def _feature_rows(clicks: ClickRows, rows: Rows, before: dict[str, Tensor] | None = None) -> FeatureRows:
    columns = torch.split(torch.from_numpy(rows.ids_NS).long(), list(clicks.slots), dim=1)
    ids = {key: column[:, 0] if column.shape[1] == 1 else column for key, column in zip(clicks.keys, columns)}
    dense_ND = torch.from_numpy(rows.dense_ND)
    if clicks.dense_names == ("constant",):
        dense_ND = dense_ND[:, :0]
    labels_N = torch.from_numpy(rows.labels_N).float()
    return FeatureRows(dense_ND=dense_ND, ids=ids, labels_N=labels_N, before=before or {})


def training_rows(clicks: ClickRows) -> dict[str, Tensor]:
    """How many training rows have the value of each scored row, by column; of a value that has no table row of its own,
    0. Of columns with several ids the first counts."""
    from ..data.rows.imported import RARE

    counts = {}
    for number, key in enumerate(clicks.keys):
        column, size = sum(clicks.slots[:number]), 0
        count_R = torch.zeros(0, dtype=torch.int64)
        for first in range(0, clicks.count("train"), AT_ONCE):
            ids_N = torch.from_numpy(clicks.rows_of("train", first, first + AT_ONCE).ids_NS[:, column]).long()
            size = max(size, int(ids_N.max()) + 1)
            count_R = torch.nn.functional.pad(count_R, (0, size - len(count_R)))
            count_R += torch.bincount(ids_N.clamp(min=0), minlength=size)
        count_R[RARE] = 0
        ids_N = torch.from_numpy(clicks.rows_of("valid", 0, clicks.count("valid")).ids_NS[:, column]).long()
        counts[key] = torch.where(ids_N < size, count_R[ids_N.clamp(0, size - 1)], 0)
    return counts
