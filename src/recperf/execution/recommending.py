"""The items with the highest scores for each user, from the whole catalogue.

Shapes: U users of a chunk, I items of the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..data.rows import Ids, Table, one_array, pyarrow
from ..errors import UsageError
from ..stop import poll
from .serving import SCORES, TrainedModel, score_columns

PAIRS = 1 << 19
"""Pairs of user and item that are scored at a time."""
COLUMNS = ("user", "rank", "item", *SCORES)


def require_recommender(model: TrainedModel) -> tuple[Ids, Ids]:
    """The own ids of users and items, of a model that can rank items for a user."""
    served = model.served
    reason = served.why_no_ranking()
    if reason is not None:
        raise UsageError(f"this model cannot recommend: {reason}", fix="recperf score with rows of your own")
    assert served.users is not None
    assert served.items is not None
    return served.users, served.items


def recommend(model: TrainedModel, users: Any, k: int, *, exclude_seen: bool = False) -> Iterator[Table]:
    """Tables of user, rank, item, score and logit for the users of a column of own ids, in its order.

    Items with equal scores are ranked in the order of their ids. With `exclude_seen` the items that a user has in the
    training data are left out; a user may then have fewer than k.
    """
    if k < 1:
        raise UsageError(f"k is {k}; allowed: 1 or more")
    known_users, items = require_recommender(model)
    arrow, users = pyarrow(), one_array(users)
    places = known_users.places(users)
    k, step = min(k, len(items)), max(1, PAIRS // max(1, len(items)))
    for first in range(0, len(places), step):
        poll()
        chunk = users[first : first + step]
        logits_UI = model.rank(chunk)
        if exclude_seen:
            for row, user in enumerate(places[first : first + step].tolist()):
                if user >= 0:
                    logits_UI[row, torch.as_tensor(model.served.seen(user), dtype=torch.int64)] = -torch.inf
        logits, items_N, ranks, rows = highest(logits_UI, k)
        columns = {
            "user": chunk.take(arrow.array(rows.numpy())),
            "rank": ranks.numpy(),
            "item": items.values.take(arrow.array(items_N.numpy())),
            **score_columns(logits),
        }
        yield arrow.table(columns)


def highest(logits_UI: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, items, ranks from 1 on, and users of the k highest logits of each user; -inf is left out."""
    sorted_UI, order_UI = logits_UI.sort(dim=1, descending=True, stable=True)
    logits_UK, items_UK = sorted_UI[:, :k], order_UI[:, :k]
    there_UK = logits_UK > -torch.inf
    users_UK = torch.arange(len(logits_UI))[:, None].expand_as(there_UK)
    ranks_UK = torch.arange(1, logits_UK.shape[1] + 1).expand_as(there_UK)
    return logits_UK[there_UK], items_UK[there_UK], ranks_UK[there_UK], users_UK[there_UK]
