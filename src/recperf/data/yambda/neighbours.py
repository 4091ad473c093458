"""Item-kNN along the stream: what outcomes with similar items say about a candidate.

Two items are similar if the same users' outcomes with both were above, or both below, what user and item alone let
expect: the cosine of these residuals, smaller for few users. Where an import drew the negatives, outcomes say nothing:
items are similar there if more users have both than independent users would. Drawn negatives are not learned from:
no user gave these outcomes. Similarities that an anchor of the training windows is described with come from outcomes
before its part of the time; from the cut on they stay as they are.

Shapes: E events, N anchors, B queries, H events of a history, I frequent items.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...stop import poll
from .schema import ANCHORS, LISTEN_PLUS, LISTENS
from .store import EventStore, Queries

ITEMS = 2048
"""Items with similarities: the most frequent ones before the cut. Others have no neighbours."""
HISTORY = 50
"""Listens before an anchor that are compared with its item."""
PARTS = 64
"""Parts of the anchors before the cut; similarities are updated after each."""
SHRINKAGE, DAMPING = 30.0, 1.0
MOST_EVENTS = 5_000_000
"""Larger stores have no neighbours: the pass over all histories would take minutes."""
COLUMNS = 3
_ROWS = 1 << 13

Longs = NDArray[np.int64]
Floats = NDArray[np.float32]


class Neighbours:
    """Features of anchors and of other queries; `expected_E` are probabilities by user and item alone."""

    def __init__(self, store: EventStore, expected_E: Floats, cut: int) -> None:
        self.store = store
        self.times_E = store.times_E[:].astype(np.int64)
        kinds_E = store.kinds(slice(0, store.events))
        self.residuals_E = ((kinds_E & np.uint8(LISTEN_PLUS)) > 0).astype(np.float32) - expected_E
        anchors_N = np.flatnonzero((kinds_E & np.uint8(ANCHORS) > 0) & (self.times_E < cut))
        items_E = store.items_at(slice(0, store.events))
        self.listens_L = np.flatnonzero(kinds_E & np.uint8(LISTENS))
        """Positions of what a history may hold: not of what an import drew."""
        counts_I = np.bincount(items_E[self.listens_L[self.times_E[self.listens_L] < cut]], minlength=store.items)
        frequent = np.sort(np.argsort(-counts_I, kind="stable")[:ITEMS])
        self.rows = np.full(store.items, -1, np.int32)
        """Row of each item in the matrices; -1 for an item without similarities."""
        self.rows[frequent] = np.arange(len(frequent))
        self.items_E = self.rows[items_E]
        self.drawn = store.stored_per_event > 1
        self.learned_E = kinds_E & np.uint8(LISTENS) > 0
        size = len(frequent)
        self.products_II, self.squares_II, self.users_II = (np.zeros((size, size), np.float32) for _ in range(3))
        self.cut, self.trained_E = cut, np.zeros((store.events, COLUMNS), np.float32)
        self.expected_II: Floats | None = None
        """Users that would have two items if they were independent; of drawn negatives only."""
        self._pass(anchors_N)

    def _pass(self, anchors_N: Longs) -> None:
        """Describe the anchors before the cut, part after part, and learn from each part."""
        times_N = self.times_E[anchors_N]
        order_N = np.argsort(times_N, kind="stable")
        anchors_N, times_N = anchors_N[order_N], times_N[order_N]
        # A part ends between two seconds.
        ends = np.searchsorted(times_N, times_N[np.linspace(0, len(times_N) - 1, PARTS + 1).astype(np.int64)[1:-1]])
        edges = np.unique(np.concatenate([[0], ends, [len(times_N)]]))
        for begin, end in zip(edges, edges[1:]):
            for learn in (False, True):
                for start in range(begin, end, _ROWS):
                    poll()
                    part = anchors_N[start : min(end, start + _ROWS)]
                    users = self.store.users_of(part)
                    past_BH, ok_BH = self._past(users, part, self.times_E[part])
                    if learn:
                        self._learn(part, past_BH, ok_BH)
                    else:
                        self.trained_E[part] = self._described(self.items_E[part], past_BH, ok_BH)
            if self.drawn:
                users_I = self.users_II.sum(1)
                self.expected_II = np.outer(users_I, users_I) / max(1.0, users_I.sum())

    def _past(self, users_B: Longs, ends_B: Longs, times_B: Longs) -> tuple[Longs, NDArray[np.bool_]]:
        """Positions of the last listens before queries, and which of them exist and have similarities."""
        first_B = np.where(users_B >= 0, self.store.user_first_U1[users_B], ends_B).astype(np.int64)
        place_BH = np.searchsorted(self.listens_L, ends_B)[:, None] - 1 - np.arange(HISTORY)
        past_BH = self.listens_L[np.maximum(place_BH, 0)]
        ok_BH = (place_BH >= 0) & (past_BH >= first_B[:, None]) & (self.items_E[past_BH] >= 0)
        if self.drawn:
            ok_BH &= self.times_E[past_BH] < times_B[:, None]
        return past_BH, ok_BH

    def _learn(self, part_B: Longs, past_BH: Longs, ok_BH: NDArray[np.bool_]) -> None:
        """Add the pairs of each listen and an earlier one of its user."""
        ok_BH = ok_BH & (self.learned_E[part_B] & (self.items_E[part_B] >= 0))[:, None]
        anchors_P, past_P = np.broadcast_to(part_B[:, None], past_BH.shape)[ok_BH], past_BH[ok_BH]
        size = len(self.products_II)
        one_P, other_P = self.items_E[anchors_P].astype(np.int64), self.items_E[past_P].astype(np.int64)
        mine_P, theirs_P = self.residuals_E[anchors_P], self.residuals_E[past_P]
        # Few of all pairs of items occur in a part.
        pairs, pair_P = np.unique(one_P * size + other_P, return_inverse=True)
        rows, columns = np.divmod(pairs, size)

        def add(matrix_II: Floats, forth_P: Floats, back_P: Floats) -> None:
            for one, other, values_P in ((rows, columns, forth_P), (columns, rows, back_P)):
                matrix_II[one, other] += np.bincount(pair_P, values_P, len(pairs)).astype(np.float32)

        add(self.products_II, mine_P * theirs_P, mine_P * theirs_P)
        add(self.users_II, np.ones_like(mine_P), np.ones_like(mine_P))
        add(self.squares_II, mine_P * mine_P, theirs_P * theirs_P)

    def _described(self, candidates_B: NDArray[np.int32], past_BH: Longs, ok_BH: NDArray[np.bool_]) -> Floats:
        """The mean residual of similar items weighted by similarity, its numerator, and how many users it rests on."""
        ok_BH = ok_BH & (candidates_B >= 0)[:, None]
        rows_B1, columns_BH = np.maximum(candidates_B, 0)[:, None], np.maximum(self.items_E[past_BH], 0)
        norms = np.sqrt(self.squares_II[rows_B1, columns_BH] * self.squares_II[columns_BH, rows_B1]) + 1e-6
        users_BH = self.users_II[rows_B1, columns_BH] * ok_BH
        weights_BH = self.products_II[rows_B1, columns_BH] / norms * users_BH / (users_BH + SHRINKAGE)
        if self.expected_II is not None:
            expected_BH = self.expected_II[rows_B1, columns_BH] * ok_BH
            weights_BH = (users_BH - expected_BH) / (users_BH + expected_BH + SHRINKAGE)
        sums_B = (weights_BH * self.residuals_E[past_BH]).sum(1)
        return np.stack([4 * sums_B / (np.abs(weights_BH).sum(1) + DAMPING), sums_B, np.log1p(users_BH.sum(1)) / 4], 1)

    def of(self, queries: Queries) -> Floats:
        ends_B = np.minimum(queries.ends_B, self.store.events - 1)
        own_B = (queries.times_B < self.cut) & (self.times_E[ends_B] == queries.times_B)
        # Beyond the user's own events lie those of the next.
        own_B &= queries.ends_B < self.store.user_first_U1[queries.users_B + 1]
        own_B &= self.store.items_at(ends_B) == queries.items_B
        features_BF = self.trained_E[ends_B]
        rest = np.flatnonzero(~own_B)
        for start in range(0, len(rest), _ROWS):
            part = rest[start : start + _ROWS]
            past = self._past(queries.users_B[part], queries.ends_B[part], queries.times_B[part])
            features_BF[part] = self._described(self.rows[queries.items_B[part]], *past)
        return features_BF
