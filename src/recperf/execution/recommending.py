"""The items that each user most likely meets and likes, from the whole catalogue.

Shapes: U users of a chunk, I items of the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..data.rows import Ids, Table, Unknown, one_array, pyarrow
from ..errors import UsageError
from ..stop import poll
from ..train.ranking import rank_scores
from .serving import TrainedModel, free_name, score_columns

PAIRS = 1 << 19
"""Pairs of user and item that are scored at a time."""


def require_recommender(model: TrainedModel) -> tuple[Ids, Ids]:
    """The own ids of users and items, of a model that can rank items for a user."""
    served = model.served
    reason = served.why_no_ranking()
    if reason is not None:
        raise UsageError(f"this model cannot recommend: {reason}", fix="recperf score with rows of your own")
    assert served.users is not None
    assert served.items is not None
    return served.users, served.items


def unknown_users(model: TrainedModel, users: Any) -> dict[str, Unknown]:
    """Users that the data of the model has never had, by the name of their column."""
    known_users, _ = require_recommender(model)
    return {known_users.role: Unknown.of(known_users.places(users) < 0, users)}


def recommend(model: TrainedModel, users: Any, k: int, *, exclude_seen: bool = False) -> Iterator[Table]:
    """Tables of user, rank, item, score, logit and rank_score for the users of a column of own ids, in its order. A
    column that would be named like a feature of the model has another name.

    The order is that of rank_score: the log probability that the user meets the item and the label is positive; the
    logit where labels themselves say which items users meet. Items with equal ones are ranked in the order of their
    ids. With `exclude_seen` the items that a user has in the training data are left out; a user may then have fewer
    than k.
    """
    if k < 1:
        raise UsageError(f"k is {k}; allowed: 1 or more")
    known_users, items = require_recommender(model)
    arrow, users, names = pyarrow(), one_array(users), model.served.names()
    places = known_users.places(users)
    k, step, meeting = min(k, len(items)), max(1, PAIRS // max(1, len(items))), model.meeting
    for first in range(0, len(places), step):
        poll()
        chunk = users[first : first + step]
        logits_UI = model.rank(chunk)
        ranked_UI = logits_UI.clone() if meeting is None else rank_scores(logits_UI, meeting[0])
        if exclude_seen:
            for row, user in enumerate(places[first : first + step].tolist()):
                if user >= 0:
                    ranked_UI[row, model.served.seen(user)] = -torch.inf
        ranked, items_N, ranks, rows = highest(ranked_UI, k)
        columns = {
            free_name("user", names - {known_users.role}): chunk.take(arrow.array(rows.numpy())),
            free_name("rank", names): ranks.numpy(),
            free_name("item", names - {items.role}): items.values.take(arrow.array(items_N.numpy())),
            **score_columns(logits_UI[rows, items_N], names),
            free_name("rank_score", names): ranked.float().numpy(),
        }
        yield arrow.table(columns)


def highest(scores_UI: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, items, ranks from 1 on, and users of the k highest scores of each user; -inf is left out."""
    sorted_UI, order_UI = scores_UI.sort(dim=1, descending=True, stable=True)
    scores_UK, items_UK = sorted_UI[:, :k], order_UI[:, :k]
    there_UK = scores_UK > -torch.inf
    users_UK = torch.arange(len(scores_UI))[:, None].expand_as(there_UK)
    ranks_UK = torch.arange(1, scores_UK.shape[1] + 1).expand_as(there_UK)
    return scores_UK[there_UK], items_UK[there_UK], ranks_UK[there_UK], users_UK[there_UK]
