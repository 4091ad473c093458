"""How well next-item models rank: the rank of each target in the whole catalogue, by scores of all items, by products
of vectors or by a rule that knows a quicker way; and whether items of its history compete.

Shapes: N targets, B targets of a batch, I items (column k is item k + 1), K items of a list, P pairs of a target and an
item of its history, E events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.next_item import NextItemData, Targets
from ..ops.catalogue_softmax import Masks
from ..ops.catalogue_softmax import top as highest
from ..ops.followers.reference import ranges
from ..stop import poll
from .ranking import REPEATS, TOP, gains, repeated_share
from .sparse_ranks import Hidden

Seen = Literal["left-out", "kept"]
"""Whether items of a user's history can be recommended again."""
SCORES, ON_GPU = 1 << 22, 1 << 26
"""Scores that are held at a time, in the memory of the host and of a GPU."""

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Scorer = Callable[[Targets], Tensor]
"""Scores of items 1 and up for the history before each target, a row for each, on any device."""
TOGETHER = 4096
"""Targets whose items are ranked at a time by products of vectors."""
ENTRIES = 1 << 22
"""Entries of a matrix that are added up at a time."""


@dataclass(frozen=True, eq=False)
class Products:
    """A scorer whose scores are products of two vectors: those of all items are never held."""

    users: Callable[[Targets], Tensor]
    """The vectors of users before some targets."""
    items_ID: Tensor
    """The vectors of items 1 and up."""

    def __call__(self, targets: Targets) -> Tensor:
        return self.users(targets) @ self.items_ID.t()


@dataclass(frozen=True, eq=False)
class Ranked:
    """The rank of every target, from 1 on, and the items recommended to its user."""

    ranks_N: Tensor
    lists_NK: Tensor
    """Item numbers; 0 where fewer than K items are left."""
    seen: Seen

    def metrics(self) -> dict[str, float]:
        """Hit rate and NDCG in the first places, and MRR: means over targets."""
        by_target = gains(self.ranks_N - 1, torch.zeros_like(self.ranks_N))
        return {name: float(gain_N.mean()) for name, gain_N in by_target.items()}


def together(data: NextItemData, device: torch.device | None = None) -> int:
    """Targets whose scores of all items are held at a time."""
    return max(1, (ON_GPU if device is not None and device.type == "cuda" else SCORES) // max(1, data.items))


def rank(
    data: NextItemData,
    targets: Targets,
    score: Scorer,
    *,
    seen: Seen | None = None,
    top: int = TOP,
    device: torch.device | None = None,
) -> Ranked:
    """Rank all items for each target. Items with the score of the target count as ranked before it, and so do NaNs; a
    target that is left out because its user has met it comes last. `device`: where the scores are, if not here."""
    seen = seen or seen_by_default(data)
    most = min(top, data.items)
    held = TOGETHER if isinstance(score, Products) else together(data, device)
    ranks, lists = [torch.zeros(0, dtype=torch.int64)], [torch.zeros((0, most), dtype=torch.int64)]
    for first in range(0, len(targets), held):
        poll()
        part = targets[first : first + held]
        if isinstance(score, Products):
            ranks_B, items_BK = _ranked_byblocks(data, part, score, most, seen)
            ranks.append(ranks_B)
            lists.append(items_BK)
            continue
        scores_BI = score(part)
        rows_P, columns_P = left_out(data, part, seen)
        if len(rows_P):
            codes_P = torch.from_numpy(rows_P * data.items + columns_P).to(scores_BI.device)
            scores_BI = scores_BI.contiguous().view(-1).index_fill(0, codes_P, -torch.inf).view(scores_BI.shape)
        targets_B = torch.from_numpy(data.items_E[part.positions_N].astype(np.int64)).to(scores_BI.device) - 1
        own_B1 = scores_BI.gather(1, targets_B[:, None])
        ranks.append((data.items - (scores_BI < own_B1).sum(1)).cpu())
        scores_BK, columns_BK = scores_BI.topk(most, dim=1)
        lists.append(torch.where(scores_BK > -torch.inf, columns_BK + 1, 0).cpu())
    return Ranked(torch.cat(ranks), torch.cat(lists), seen)


def ranks_of(data: NextItemData, targets: Targets, score: Scorer, *, seen: Seen | None = None) -> Tensor:
    """The ranks that `rank` gives the targets. Rules that know a quicker way are not asked for the scores of all items;
    those that know one for some targets only say which."""
    seen = seen or seen_by_default(data)
    if not isinstance(score, QuickRule):
        return rank(data, targets, score, seen=seen, top=0).ranks_N
    ranks_N, others = score.ranks(targets, lambda part: _hidden(data, part, seen))
    if len(others):
        part = targets[others]
        ranks_N[others] = rank(data, part, score, seen=seen, top=0).ranks_N.numpy()
    return torch.from_numpy(ranks_N)


Hide = Callable[[Targets], Hidden]
"""What does not compete for some targets."""


@runtime_checkable
class QuickRule(Protocol):
    """A rule that ranks targets without the scores of all items."""

    def __call__(self, targets: Targets) -> Tensor: ...

    def ranks(self, targets: Targets, hide: Hide) -> tuple[Longs, Longs]:
        """The rank of each target, and the numbers of targets for which the scores of all items are quicker."""


def _hidden(data: NextItemData, targets: Targets, seen: Seen) -> Hidden:
    return Hidden.of(data.items, *left_out(data, targets, seen))


def left_out(data: NextItemData, targets: Targets, seen: Seen) -> tuple[Longs, Longs]:
    """The targets and the columns of items that do not compete with them, in the order of the targets: those of the
    history, unless they are kept, and what is predicted together with a target."""
    rows_P, events_P = np.zeros((2, 0), np.int64) if seen == "kept" else histories(data, targets)
    columns_P: Longs = data.items_E[events_P].astype(np.int64) - 1
    if targets.spans_N2 is None:
        return rows_P, columns_P
    rows_Q, events_Q = ranges(targets.spans_N2[:, 0], targets.spans_N2[:, 1] - targets.spans_N2[:, 0])
    others_Q = data.items_E[events_Q] != data.items_E[targets.positions_N][rows_Q]
    rows_P = np.append(rows_P, rows_Q[others_Q])
    columns_P = np.append(columns_P, data.items_E[events_Q[others_Q]].astype(np.int64) - 1)
    order_P = np.argsort(rows_P, kind="stable")
    return rows_P[order_P], columns_P[order_P]


def _ranked_byblocks(
    data: NextItemData, targets: Targets, score: Products, most: int, seen: Seen
) -> tuple[Tensor, Tensor]:
    """The rank of each target, and the items with the highest scores."""
    users_BD, device, masks = score.users(targets), score.items_ID.device, None
    rows_P, columns_P = left_out(data, targets, seen)
    if len(rows_P):
        offsets_B1 = np.append(0, np.bincount(rows_P, minlength=len(targets)).cumsum())
        masks = Masks(*(torch.from_numpy(array).to(device) for array in (offsets_B1, columns_P)))
    targets_B = torch.from_numpy(data.items_E[targets.positions_N].astype(np.int64) - 1).to(device)
    _, columns_BK, reached_B = highest(users_BD, score.items_ID, max(1, most), masks=masks, targets_T=targets_B)
    assert reached_B is not None
    return reached_B.cpu(), (columns_BK[:, :most] + 1).cpu()


def histories(data: NextItemData, targets: Targets, last: int | None = None) -> tuple[Longs, Longs]:
    """The target and the place of every event before each target, or of the `last` ones, in the order of time."""
    begins_N, ends_N = data.offsets_U1[targets.users_N], targets.ends_N
    if last is not None:
        begins_N = np.maximum(begins_N, ends_N - last)
    return ranges(begins_N, ends_N - begins_N)


_seen: WeakKeyDictionary[NextItemData, Seen] = WeakKeyDictionary()


def seen_by_default(data: NextItemData) -> Seen:
    """Items that users have met are left out, unless the training events show that users take items again."""
    if data not in _seen:
        train = data.train()
        spans = blocks(train.ends_S - train.begins_S, ENTRIES)
        parts = (histories(data, Targets(train.users_S[first:stop], train.ends_S[first:stop])) for first, stop in spans)
        rows = ((torch.from_numpy(rows_P), torch.from_numpy(data.items_E[events_P])) for rows_P, events_P in parts)
        _seen[data] = "kept" if repeated_share(rows) > REPEATS else "left-out"
    return _seen[data]


def training_events(data: NextItemData) -> NDArray[np.bool_]:
    """Which events are training events."""
    train, steps_E1 = data.train(), np.zeros(len(data.items_E) + 1, np.int8)
    steps_E1[train.begins_S] += 1
    steps_E1[train.ends_S] -= 1
    return np.cumsum(steps_E1[:-1], dtype=np.int8).view(np.bool_)


def item_counts(data: NextItemData) -> NDArray[np.int64]:
    """How many training events each item has, by column."""
    return np.bincount(data.items_E[training_events(data)], minlength=data.items + 1)[1:]


def blocks(lengths_N: Longs, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of positions whose lengths add up to at most `most`; a longer one is a range of its own."""
    upto_N, first = np.cumsum(lengths_N), 0
    while first < len(upto_N):
        before = upto_N[first] - lengths_N[first]
        stop = max(first + 1, int(np.searchsorted(upto_N, before + most, side="right")))
        yield first, stop
        first = stop
