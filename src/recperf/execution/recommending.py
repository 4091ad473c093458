"""The items that each user most likely sees and likes, or takes next, from the whole catalogue.

Shapes: U users of a chunk, I items of the catalogue, K items of a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.tables import Ids, Table, Unknown, add_unknown, one_array, pyarrow
from ..errors import UsageError
from ..stop import poll
from ..train.ranking import list_quality, rank_scores
from .serving import TrainedModel, free_name

PAIRS, FEWEST = 1 << 19, 8
"""Pairs of user and item that are scored at a time, and users, where there are so many items that these are more."""


def require_recommender(model: TrainedModel) -> tuple[Ids, Ids]:
    """The own ids of users and items, of a model that can rank items for a user."""
    served = model.served
    reason = served.why_no_ranking()
    if reason is not None:
        raise UsageError(f"this model cannot recommend: {reason}", fix="recperf score with rows of your own")
    assert served.users is not None
    assert served.items is not None
    return served.users, served.items


@dataclass(frozen=True, eq=False)
class Requests:
    """Whom to recommend for: users of the data, or histories of items that need not be in it."""

    ids: Any
    """Own ids of the users, or the numbers of the histories from 1 on."""
    role: str
    """Name of the column of `ids`."""
    histories: list[NDArray[np.int64]] | None
    """Places in the model's items, the newest last."""
    unknown: dict[str, Unknown]
    """Users, or items of histories, that the data of the model has never had."""

    @staticmethod
    def of_users(model: TrainedModel, users: Any) -> Requests:
        known, _ = require_recommender(model)
        users = one_array(users)
        unknown = {known.role: Unknown.of(known.indices(users) < 0, users)}
        return Requests(users, free_name(known.role, model.served.names() - {known.role}), None, unknown)

    @staticmethod
    def of_histories(model: TrainedModel, histories: Sequence[Sequence[Any]]) -> Requests:
        """Items of histories are own ids; those that the data does not have are left out."""
        _, items = require_recommender(model)
        arrow, known = pyarrow(), []
        unknown: dict[str, Unknown] = {}
        for history in histories:
            column = arrow.array(history) if len(history) else arrow.array([], arrow.int64())
            places = items.indices(column)
            unknown = add_unknown(unknown, {items.role: Unknown.of(places < 0, column)})
            known.append(places[places >= 0])
        ids = arrow.array(range(1, len(known) + 1), arrow.int64())
        return Requests(ids, free_name("history", model.served.names()), known, unknown)

    def __len__(self) -> int:
        return len(self.ids)


def quality_of(lists: list[Tensor], model: TrainedModel) -> dict[str, float] | None:
    """What lists of several users have in common, and how popular their items are; None for one list."""
    if sum(map(len, lists)) < 2:
        return None
    return list_quality(torch.cat(lists), len(require_recommender(model)[1]), model.served.item_events())


def recommend(
    model: TrainedModel,
    requests: Requests,
    k: int,
    *,
    exclude_seen: bool | None = None,
    time: int | None = None,
    lists: list[Tensor] | None = None,
) -> Iterator[Table]:
    """Tables of user or history, rank, item, title if the data has titles, score, logit and rank_score, in the order of
    the requests. User and item have the names of the import; a column that would be named like a feature of the model
    has another name.

    The order is that of rank_score: the log probability that the user sees the item and the label is positive; the
    logit where labels themselves say which items users see, or where the model predicts the next item. Items with
    equal ones are ranked in the order of their ids. Next-item models of events with times depend on the `time` of the
    request, in seconds since 1970; None: now. With `exclude_seen` items that a user has in the training data, or that
    a history has, are left out; by default next-item models do so unless their data has repeats. A user may then have
    fewer than k.
    """
    if k < 1:
        raise UsageError(f"k is {k}; allowed: 1 or more")
    known_users, items = require_recommender(model)
    if time is not None and not model.served.timed:
        what = "recommendations of this model do not depend on the time of a request"
        raise UsageError(what, fix="leave the time out, or a next-item model of events with times")
    model.served.request_time = time
    arrow, served, names = pyarrow(), model.served, model.served.names()
    exclude_seen = served.excludes_seen if exclude_seen is None else exclude_seen
    titles = None if served.titles is None else arrow.array(served.titles, arrow.string())
    k, meeting = min(k, len(items)), model.meeting
    step = 1 if served.pass_per_item else max(FEWEST, PAIRS // max(1, len(items)))
    for first in range(0, len(requests), step):
        poll()
        chunk = slice(first, first + step)
        ids, histories = requests.ids[chunk], None if requests.histories is None else requests.histories[chunk]
        seen: list[Any] = []
        if exclude_seen and histories is None:
            users = known_users.indices(ids).tolist()
            seen = [served.seen(user) if user >= 0 else np.zeros(0, np.int64) for user in users]
        elif exclude_seen:
            seen = list(histories or ())
        if served.pass_per_item and histories is None and meeting is not None:
            # With one pass of the model per item a chunk has one user.
            logits_UI = torch.stack([likely_logits(model, ids[:1], meeting[0], k, seen[0] if seen else None)])
        else:
            logits_UI = model.rank(ids, histories)
        ranked_UI = logits_UI.clone() if meeting is None else rank_scores(logits_UI, meeting[0])
        for row, items_S in enumerate(seen):
            ranked_UI[row, torch.as_tensor(items_S)] = -torch.inf
        ranked, items_N, ranks, rows = highest(ranked_UI, k)
        if lists is not None:
            lists_UK = torch.zeros((len(ids), k), dtype=torch.int64)
            lists_UK[rows, ranks - 1] = items_N + 1
            lists.append(lists_UK)
        at = arrow.array(items_N.numpy())
        columns = {
            requests.role: ids.take(arrow.array(rows.numpy())),
            free_name("rank", names): ranks.numpy(),
            free_name(items.role, names - {items.role}): items.values.take(at),
            **({} if titles is None else {free_name("title", names): titles.take(at)}),
            free_name("score", names): served.probabilities(logits_UI)[rows, items_N].numpy(),
            free_name("logit", names): logits_UI[rows, items_N].numpy(),
            free_name("rank_score", names): ranked.float().numpy(),
        }
        yield arrow.table(columns)


def likely_logits(model: TrainedModel, user: Any, meeting_I: Tensor, k: int, seen: Any) -> Tensor:
    """The logits of the items that can be among the k highest of a user, -inf for all others.

    Items are scored in the order in which the user most likely sees them. Since a rank score is at most the log
    probability of meeting, none can follow once that of the next item is below the k-th highest score.
    """
    ahead_I = meeting_I.clone()
    if seen is not None:
        ahead_I[torch.as_tensor(seen)] = -torch.inf
    ahead_I, order_I = ahead_I.sort(descending=True, stable=True)
    there = int((ahead_I > -torch.inf).sum())
    logits_I, ranked_N, scored = torch.full_like(meeting_I, -torch.inf, dtype=torch.float32), meeting_I[:0], 0
    while scored < there:
        poll()
        part_N = order_I[scored : min(there, max(2 * scored, model.served.batch_size))]
        logits_I[part_N] = model.rank_items(user, part_N.numpy())
        scored += len(part_N)
        ranked_N = torch.cat([ranked_N, rank_scores(logits_I[part_N], meeting_I[part_N])])
        if scored < there and scored >= k and ranked_N.topk(k)[0][-1] > ahead_I[scored]:
            break
    return logits_I


def highest(scores_UI: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, items, ranks from 1 on, and users of the k highest scores of each user; -inf is left out."""
    # Those that are as high as the k-th, which may be more: a small part of a large catalogue is sorted.
    least_U1 = scores_UI.topk(min(k, scores_UI.shape[1]), dim=1)[0][:, -1:]
    users_N, items_N = ((scores_UI >= least_U1) & (scores_UI > -torch.inf)).nonzero(as_tuple=True)
    scores_N, order_N = scores_UI[users_N, items_N].sort(descending=True, stable=True)
    users_N, by_user_N = users_N[order_N].sort(stable=True)
    ranks_N = torch.arange(1, len(users_N) + 1) - torch.searchsorted(users_N, users_N)
    first_N = ranks_N <= k
    order_N = order_N[by_user_N]
    return scores_N[by_user_N][first_N], items_N[order_N][first_N], ranks_N[first_N], users_N[first_N]
