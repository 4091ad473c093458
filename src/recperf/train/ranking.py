"""Ranking metrics of one relevant item among candidates: hit rate, NDCG and reciprocal rank; ties have no luck.

Shapes: N rows, Q ranked rows, P pairs of a row and a candidate, I items of the catalogue, K items of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .baselines import fit_additive

TOP = 10
TOPS = (TOP, 50)
PAIRS = 1 << 16
"""Pairs that are scored at a time."""
REPEATS = 0.05
"""Where more than this share of the training rows repeat an item of their user, such items are recommended again."""
COUNTS = ("popularity", "recent_popularity", "positives", "item_to_item", "item_knn", "als", "ease")
"""Rules of which items users take: they predict no label."""
QUARTERS, HALVINGS = 4, 12
"""Parts of the events whose first positives say how long an event counts, and how many times are compared."""

Scorer = Callable[[Tensor, Tensor], Tensor]
"""Scores of pairs: the numbers of scored rows, and for each the item that takes the place of the row's own."""


def positions(
    score: Scorer, rows_Q: Tensor, own_Q: Tensor, targets_Q: Tensor, candidates: Iterator[Tensor], *, top: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """For each row how many candidates score higher than its own item, how many others score the same, and the `top`
    items that score highest, -1 where there are fewer.

    `candidates` yields each row's; the row's own item among them is passed over, because its score `own_Q` is known.
    Pairs are scored in groups of about equal size, so memory is bounded."""
    higher_Q, same_Q = (torch.zeros(len(rows_Q), dtype=torch.int64) for _ in range(2))
    lists_QK = torch.full((len(rows_Q), top), -1)
    places: list[Tensor] = []
    items: list[Tensor] = []

    def flush(first: int, stop: int) -> None:
        """Score the pairs of these rows; some may have no candidate but their own item."""
        if first == stop:
            return
        place_P, item_P = torch.cat(places), torch.cat(items)
        places.clear()
        items.clear()
        parts = (slice(start, start + PAIRS) for start in range(0, len(place_P), PAIRS))
        scores = (score(rows_Q[place_P[part]], item_P[part]).double().cpu() for part in parts)
        score_P = torch.cat([torch.zeros(0, dtype=torch.float64), *scores])
        own_P = own_Q.double()[place_P]
        higher_Q.index_add_(0, place_P, (score_P > own_P).long())
        same_Q.index_add_(0, place_P, (score_P == own_P).long())
        if not top:
            return
        _highest(
            lists_QK,
            torch.cat([place_P, torch.arange(first, stop)]),
            torch.cat([item_P, targets_Q[first:stop]]),
            torch.cat([score_P, own_Q.double()[first:stop]]),
        )

    first = 0
    for place, items_C in enumerate(candidates):
        others_C = items_C[items_C != targets_Q[place]]
        places.append(torch.full_like(others_C, place))
        items.append(others_C)
        if sum(map(len, items)) >= PAIRS:
            flush(first, place + 1)
            first = place + 1
    flush(first, len(rows_Q))
    return higher_Q, same_Q, lists_QK


def _highest(lists_QK: Tensor, place_P: Tensor, item_P: Tensor, score_P: Tensor) -> None:
    """Write the items with the highest scores of each row, named by its place, into its list."""
    order_P = score_P.sort(descending=True, stable=True)[1]
    order_P = order_P[place_P[order_P].sort(stable=True)[1]]
    sorted_P = place_P[order_P]
    rank_P = torch.arange(len(order_P)) - torch.searchsorted(sorted_P, sorted_P)
    listed_P = rank_P < lists_QK.shape[1]
    lists_QK[sorted_P[listed_P], rank_P[listed_P]] = item_P[order_P[listed_P]]


def gains(higher_Q: Tensor, same_Q: Tensor, tops: tuple[int, ...] = TOPS) -> dict[str, Tensor]:
    """The expected hit and discounted gain in the first places, and the reciprocal rank, of each row where ties are
    broken at random."""
    ends_Q = higher_Q + same_Q + 1
    rank = torch.arange(1, int(ends_Q.max()) + 1 if len(ends_Q) else 1, dtype=torch.float64)
    discounts = 1 / (1 + rank).log2()
    hits = {f"hit_rate_{top}": (rank <= top).double() for top in tops}
    by_rank = {**hits, **{f"ndcg_{top}": hits[f"hit_rate_{top}"] * discounts for top in tops}, "mrr": 1 / rank}
    expected = {}
    for name, gain in by_rank.items():
        until = torch.nn.functional.pad(gain.cumsum(0), (1, 0))
        expected[name] = (until[ends_Q] - until[higher_Q]) / (same_Q + 1)
    return expected


def first_positives(labels_N: Tensor, users_N: Tensor, times_N: Tensor | None) -> Tensor:
    """The first positive row of every user that has one, users in a fixed random order."""
    rows_M = (labels_N > 0).nonzero().squeeze(1)
    if times_N is not None:
        rows_M = rows_M[times_N[rows_M].sort(stable=True)[1]]
    sorted_M, order_M = users_N[rows_M].sort(stable=True)
    starts = torch.ones_like(sorted_M, dtype=torch.bool)
    starts[1:] = sorted_M[1:] != sorted_M[:-1]
    first_Q = rows_M[order_M[starts]]
    return first_Q[torch.randperm(len(first_Q), generator=torch.Generator().manual_seed(len(first_Q)))]


def drawn(items_I: Tensor, count: int, row: int) -> Tensor:
    """`count` different items of the catalogue, a pure function of the row; all of them where there are no more."""
    if count >= len(items_I):
        return items_I
    generator = torch.Generator().manual_seed(row)
    if 4 * count >= len(items_I):
        return items_I[torch.randperm(len(items_I), generator=generator)[:count]]
    # Far fewer than there are: a few more draws make up for repeats.
    places = torch.unique(torch.randint(len(items_I), (2 * count + 16,), generator=generator))
    return items_I[places[torch.randperm(len(places), generator=generator)[:count]]]


def item_rules(
    users_N: Tensor, items_N: Tensor, labels_N: Tensor, items: int, scored_users_N: Tensor
) -> dict[str, Scorer]:
    """Rules from training rows: how often an item is in them, how often with a positive label, and a logistic
    regression on user and item. `items` is the largest item number + 1; the users of the scored rows come last."""
    regression = fit_additive([users_N, items_N], labels_N)
    counts_I, positives_I = (
        torch.bincount(of_N, minlength=items).double() for of_N in (items_N, items_N[labels_N > 0])
    )
    return {
        "popularity": lambda rows_P, items_P: counts_I[items_P],
        "positives": lambda rows_P, items_P: positives_I[items_P],
        "user_item_bias": lambda rows_P, items_P: regression([scored_users_N[rows_P], items_P]),
    }


def joint(score: Scorer, meeting: Scorer) -> Scorer:
    """The log probability that a user sees an item and that the label is then positive, from the logits of a model of
    labels. Labels say what users think of items that they saw, and alone put items first that nobody sees."""
    return lambda rows_P, items_P: rank_scores(score(rows_P, items_P).cpu(), meeting(rows_P, items_P))


def rank_scores(logits: Tensor, meeting: Tensor) -> Tensor:
    """Of logits and log probabilities of meeting."""
    return torch.nn.functional.logsigmoid(logits.double()) + meeting


def log_shares(rows_I: Tensor) -> Tensor:
    """Log probability that a row has an item, by how many rows each item has, and one row spread over all items."""
    return ((rows_I.double() + 1 / max(1, len(rows_I))) / (rows_I.sum() + 1)).log()


@dataclass(frozen=True, eq=False)
class RecentShares:
    """How likely a user sees an item at a moment: the item's share of all events in a time before it, with one event
    spread over the catalogue."""

    items_N: Tensor
    times_N: Tensor
    """In seconds, below 2^32."""
    catalogue: int
    """Number of items."""
    seconds: int = 1 << 32
    """How long an event counts."""

    @cached_property
    def _codes_N(self) -> Tensor:
        """Item in the upper bits, time in the lower 32."""
        return (self.items_N.long() << 32 | self.times_N).sort()[0]

    @cached_property
    def _by_time(self) -> tuple[Tensor, Tensor]:
        """Times, ascending, and the items of the events."""
        if bool((self.times_N[1:] >= self.times_N[:-1]).all()):
            return self.times_N, self.items_N
        times_N, order_N = self.times_N.sort(stable=True)
        return times_N, self.items_N[order_N]

    def __call__(self, items_P: Tensor, times_P: Tensor, seconds: int | None = None) -> Tensor:
        """Log probabilities, from events of earlier seconds."""
        begins_P = (times_P - (self.seconds if seconds is None else seconds)).clamp_min(0)
        of_item_P, all_P = (
            torch.searchsorted(sorted_N, upper_P | times_P) - torch.searchsorted(sorted_N, upper_P | begins_P)
            for sorted_N, upper_P in ((self._codes_N, items_P << 32), (self._by_time[0], torch.zeros_like(items_P)))
        )
        return ((of_item_P.double() + 1 / self.catalogue) / (all_P + 1)).log()

    def windows(self, times_B: Tensor, seconds: int) -> Iterator[tuple[int, Tensor]]:
        """How many events each of the items 0 to `catalogue` - 1 has in the time before each moment, in the order of
        the moments: the number of the moment, and counts that the next step changes."""
        (times_N, items_N), begin, stop = self._by_time, 0, 0
        counts_I = torch.zeros(self.catalogue, dtype=torch.int32)
        one_N = counts_I.new_ones(1).expand(len(items_N))
        stops_B, begins_B = (torch.searchsorted(times_N, ends_B).tolist() for ends_B in (times_B, times_B - seconds))
        for row in times_B.argsort(stable=True).tolist():
            for sign, changed in ((1, slice(stop, stops_B[row])), (-1, slice(begin, begins_B[row]))):
                counts_I.index_add_(0, items_N[changed], one_N[changed], alpha=sign)
            begin, stop = begins_B[row], stops_B[row]
            yield row, counts_I

    def counts(self, times_B: Tensor, seconds: int) -> Tensor:
        """The same of all moments at once."""
        counts_BI = torch.zeros(len(times_B), self.catalogue, dtype=torch.float64)
        for row, counts_I in self.windows(times_B, seconds):
            counts_BI[row] = counts_I
        return counts_BI

    def halvings(self) -> list[int]:
        """Times that an event may count: that of all events, half of it, and so on."""
        span = int(self._by_time[0][-1] - self._by_time[0][0]) + 1
        return [max(1, span >> halving) for halving in range(HALVINGS)]

    def fitted(self, users_N: Tensor, labels_N: Tensor) -> RecentShares:
        """With the time, of the halvings of that of all events, that makes what is ranked most likely among these
        events: the first positive item of each user, here in each quarter of them."""
        times_N = self._by_time[0]
        edges = times_N[[len(times_N) * quarter // QUARTERS for quarter in range(1, QUARTERS)]]
        quarters_N = torch.searchsorted(edges, self.times_N, right=True)
        rows_Q = first_positives(labels_N, users_N * QUARTERS + quarters_N, self.times_N)
        items_Q, times_Q = self.items_N[rows_Q], self.times_N[rows_Q]
        likelihoods = {seconds: float(self(items_Q, times_Q, seconds).sum()) for seconds in self.halvings()}
        return replace(self, seconds=max(likelihoods, key=lambda seconds: likelihoods[seconds]))


def repeated_share(parts: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of rows whose pair of user and item an earlier row has, from the users and items of the rows. Rows may
    come in parts, with all of a user in one."""
    rows = distinct = 0
    for users_N, items_N in parts:
        if len(users_N):
            rows += len(users_N)
            distinct += len(torch.unique(users_N * (int(items_N.max()) + 1) + items_N))
    return 1 - distinct / rows if rows else 0.0


def grouped_items(users_N: Tensor, items_N: Tensor) -> Callable[[int], Tensor]:
    """A function that returns the items of a user's rows."""
    sorted_N, order_N = users_N.sort(stable=True)

    def items_of(user: int) -> Tensor:
        first, stop = torch.searchsorted(sorted_N, torch.tensor([user, user + 1])).tolist()
        return items_N[order_N[first:stop]]

    return items_of


def list_quality(lists_NK: Tensor, items: int, counts_I: NDArray[np.int64] | None = None) -> dict[str, float]:
    """What users complain of that accuracy does not show, from lists of items 1 to `items`; 0 stands for no item.

    coverage: share of the catalogue that is in some list; overlap: share of a list that another user's list has, on
    average; same_first: share of users who get the most frequent first item; popularity: the mean place of the
    recommended items among all items by their training events `counts_I`, 0 for the rarest and 1 for the most frequent.
    """
    there = lists_NK[lists_NK > 0]
    times_I = torch.bincount(there - 1, minlength=items).double()
    pairs = float((times_I * (times_I - 1)).sum())
    quality = {
        "coverage": float((times_I > 0).double().mean()),
        "overlap": pairs / max(1, len(there) * (len(lists_NK) - 1)),
        "same_first": float(torch.bincount(lists_NK[:, 0])[1:].max()) / len(lists_NK) if len(there) else 0.0,
    }
    if counts_I is not None and len(there):
        quality["popularity"] = float((torch.from_numpy(_places(counts_I)) * times_I).sum() / len(there))
    return quality


def _places(counts_I: NDArray[np.int64]) -> NDArray[np.float64]:
    """The share of the other items that have fewer training events; of items with as many, half."""
    sorted_I = np.sort(counts_I)
    fewer_I = np.searchsorted(sorted_I, counts_I, side="left")
    upto_I = np.searchsorted(sorted_I, counts_I, side="right") - 1
    places_I: NDArray[np.float64] = (fewer_I + upto_I) / 2 / max(1, len(counts_I) - 1)
    return places_I
