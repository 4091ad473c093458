"""Running rates: what is known just before an anchor of its user and item, from counts of listens and similar items.

Shapes: E events, N listens, B anchors or other queries, G groups, F features, H events of a history, I frequent items.

Everything is causal. Of a user only events before the anchor count, of an item only events of an earlier second. The
listens of a group (a user, an item, a user with an item...) lie side by side in the order of time, with running sums,
so that a binary search finds any moment, also that of a candidate that is no event. Negatives that an import drew count
as listens that were not positive, but not in groups of a user with an item or artist: no user met an
item that was drawn.

Similar items are those of item-kNN along the stream. Two items are similar if the same users' outcomes with both were
above, or both below, what user and item alone let expect: the cosine of these residuals, smaller for few users. Where
an import drew the negatives, outcomes say nothing: items are similar there if more users have both than independent
users would. Drawn negatives are not learned from. Similarities that an anchor of the training windows is described with
come from outcomes before its part of the time; from the cut on they stay as they are. Without these columns the model's
AUC on MovieLens-100K is 0.764 instead of 0.771, and that of a regression on the rates 0.008 lower (0.005 to 0.010); on
the log `courses` of benchmarks/event_quality.py the regression's is 0.002 lower (0.001 to 0.003).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...stop import poll
from ..events.kinds import ANCHORS, DRAWN, LISTEN_PLUS, LISTENS
from ..events.store import EventStore, Queries
from .features import RATES

PRIOR = 4.0
"""Listens at the overall share that every share is smoothed with."""
RECENT = 10
"""Listens of a user or item that count as recent."""
BINS = 1 << 12
"""Parts of the time span in which the overall share is looked up."""
BYTES_AN_EVENT = 200
"""Memory while the running sums are built."""
PRECISION = 2.0
"""What draws effects to 0: the inverse variance of their normal prior."""
MOST_EVENTS = 1 << 32
MEANS = ("overall", "user", "item")
"""Columns whose sum is the log odds that user and item alone give."""
_PART = 1 << 18
CLOCK = MOST_EVENTS - 1
"""The bits of a code that hold the clock."""
SIMILAR_ITEMS = 2048
"""Items with similarities: the most frequent ones before the cut. Others have no neighbours."""
COMPARED = 50
"""Listens before an anchor that are compared with its item."""
PARTS = 64
"""Parts of the anchors before the cut; similarities are updated after each."""
SHRINKAGE, DAMPING = 30.0, 1.0
MOST_COMPARED_EVENTS = 5_000_000
"""Larger stores have no neighbours: the pass over all histories would take minutes."""
NEIGHBOUR_COLUMNS = 3
_ROWS = 1 << 13

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Singles = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Groups:
    """Listens sorted by group and clock, with running sums of those that are positive."""

    keys_G: Longs
    codes_N: Longs
    """The group in the upper bits, the clock in the lower 32."""
    positives_N1: NDArray[np.uint32]

    @staticmethod
    def of(keys_N: Longs, clock_N: Longs, positive_N: NDArray[np.bool_]) -> Groups:
        keys_G, group_N = np.unique(keys_N, return_inverse=True)
        codes_N = (group_N.astype(np.int64) << 32) | clock_N
        order_N = np.argsort(codes_N, kind="stable")
        sums = np.concatenate([[0], np.cumsum(positive_N[order_N], dtype=np.uint32)]).astype(np.uint32)
        return Groups(keys_G, codes_N[order_N], sums)

    def before(self, keys_B: Longs, clock_B: Longs) -> tuple[Longs, Longs]:
        """Where the listens of a group begin, and where those before the clock end; equal where there are none."""
        group_B = np.searchsorted(self.keys_G, keys_B)
        known_B = self.keys_G[np.minimum(group_B, len(self.keys_G) - 1)] == keys_B
        code_B = group_B.astype(np.int64) << 32
        first_B, stop_B = np.searchsorted(self.codes_N, code_B), np.searchsorted(self.codes_N, code_B | clock_B)
        return np.where(known_B, first_B, 0), np.where(known_B, stop_B, 0)

    def positives(self, first_B: Longs, stop_B: Longs) -> Floats:
        return self.positives_N1[stop_B].astype(np.float64) - self.positives_N1[first_B]


@dataclass(frozen=True, eq=False)
class Effects:
    """The log odds by which a group's outcomes are above what was expected: a Newton step from 0, drawn to 0."""

    residuals_N1: Floats
    curvatures_N1: Floats

    @staticmethod
    def of(position_N: Longs, positive_N: NDArray[np.bool_], logits_N: Floats) -> Effects:
        """From the outcome of each listen, the logit that was expected, and how many listens of all groups sorted by
        group and clock lie before it."""
        order_N, expected_N = np.argsort(position_N, kind="stable"), _sigmoid(logits_N)
        sums = (np.cumsum(column_N[order_N]) for column_N in (positive_N - expected_N, expected_N * (1 - expected_N)))
        return Effects(*(np.concatenate([[0.0], sums_N]) for sums_N in sums))

    def __call__(self, first_B: Longs, stop_B: Longs) -> Floats:
        residuals_B, curvatures_B = (
            sums_N1[stop_B] - sums_N1[first_B] for sums_N1 in (self.residuals_N1, self.curvatures_N1)
        )
        return np.asarray(residuals_B / (curvatures_B + PRECISION))


class RunningRates:
    """Counts and shares as of a moment, for the model and for baselines; `RATES` names the columns."""

    def __init__(self, store: EventStore, cut: int, unknown_E: NDArray[np.bool_] | None = None) -> None:
        """Similarities of items are learned from events before `cut`, counts and shares from all before a query;
        nothing from the events in `unknown_E`, which are held out although later ones are trained on."""
        if store.events >= MOST_EVENTS:
            raise DataError(
                f"running rates are kept for fewer than {MOST_EVENTS:,} events",
                where={"store": store.folder},
                fix="--model.rates-hidden 0 --data.baselines bias",
            )
        self.store = store
        self.by_second = store.stored_per_event > 1
        """Whether a user's events of the same second do not count: next to an event lie negatives drawn for it."""
        kinds_E = store.kinds(slice(0, store.events))
        known_E = True if unknown_E is None else ~unknown_E
        listens_N = np.flatnonzero((kinds_E & np.uint8(ANCHORS) > 0) & known_E)
        positive_N = (kinds_E[listens_N] & np.uint8(LISTEN_PLUS)) > 0
        times_N = store.times_E[listens_N].astype(np.int64)
        own_N = times_N if self.by_second else listens_N
        users_N, items_N = store.users_of(listens_N), store.items_at(listens_N)
        self.user = Groups.of(users_N, own_N, positive_N)
        self.item = Groups.of(items_N, times_N, positive_N)
        real_N = (kinds_E[listens_N] & np.uint8(DRAWN)) == 0
        self.user_item = Groups.of(_pair(users_N, items_N)[real_N], own_N[real_N], positive_N[real_N])
        self.artist = self.user_artist = None
        if store.catalogue_I2[:, 0].any():
            artists_N = self._artists(items_N)
            self.artist = Groups.of(artists_N, times_N, positive_N)
            self.user_artist = Groups.of(_pair(users_N, artists_N)[real_N], own_N[real_N], positive_N[real_N])
        self.first_time, last = (int(times_N.min()), int(times_N.max())) if len(times_N) else (0, 0)
        self.period = max(1, (last - self.first_time) // 64)
        """Seconds that count as recent in the popularity of an item."""
        self._bin = max(1, -(-(last - self.first_time + 1) // BINS))
        bins_N = (times_N - self.first_time) // self._bin
        self._listens, self._positives = (
            np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=BINS))]) for bins in (bins_N, bins_N[positive_N])
        )
        expected_N = self._fit_effects(users_N, own_N, items_N, times_N, positive_N)
        self.neighbours: Neighbours | None = None
        if store.events <= MOST_COMPARED_EVENTS:
            expected_E = np.zeros(store.events, np.float32)
            expected_E[listens_N] = expected_N
            self.neighbours = Neighbours(store, expected_E, cut, known_E)

    def _fit_effects(
        self, users_N: Longs, own_N: Longs, items_N: Longs, times_N: Longs, positive_N: NDArray[np.bool_]
    ) -> Floats:
        """Fit the effects of users beyond those of their items, and of items beyond those of their users; the
        probability that both give each listen."""
        overall_N = self.overall(times_N)
        logits_N, of_user, of_item = (
            _log_odds(overall_N), self.user.before(users_N, own_N), self.item.before(items_N, times_N)
        )  # fmt: skip
        self.user_effect = Effects.of(of_user[1], positive_N, logits_N + _share(self.item, *of_item, overall_N))
        logits_N += self.user_effect(*of_user)
        self.item_effect = Effects.of(of_item[1], positive_N, logits_N)
        return _sigmoid(logits_N + self.item_effect(*of_item))

    def share_and_count(self, groups: Groups, keys_B: Longs, times_B: Longs) -> list[Floats]:
        """The log odds of a group's share of positive listens before a time, and the logarithm of their number."""
        first_B, stop_B = groups.before(keys_B, times_B)
        return [_share(groups, first_B, stop_B, self.overall(times_B)), _logarithm(stop_B - first_B)]

    def _artists(self, items_B: Longs) -> Longs:
        return np.asarray(self.store.catalogue_I2[items_B, 0], np.int64)

    def overall(self, times_B: Longs) -> Floats:
        """The share of positive listens before the part of the time span that each time lies in."""
        part_B = np.clip((times_B - self.first_time) // self._bin, 0, BINS)
        return np.asarray((self._positives[part_B] + 1.0) / (self._listens[part_B] + 2.0))

    def of(self, queries: Queries) -> NDArray[np.float32]:
        columns, none_B = self._columns(queries), np.zeros(len(queries))
        if self.neighbours is not None:
            columns |= zip(RATES[-NEIGHBOUR_COLUMNS:], self.neighbours.of(queries).T)
        return np.stack([columns.get(name, none_B) for name in RATES], 1).astype(np.float32)

    def _columns(self, queries: Queries) -> dict[str, Floats]:
        users_B, items_B, times_B = queries.users_B, queries.items_B, queries.times_B
        own_B = times_B if self.by_second else queries.ends_B
        artists_B, overall_B = self._artists(items_B), self.overall(times_B)
        columns = {"overall": _log_odds(overall_B)}
        for name, groups, keys_B, clock_B in (
            ("user", self.user, users_B, own_B),
            ("item", self.item, items_B, times_B),
            ("user_item", self.user_item, _pair(users_B, items_B), own_B),
            ("artist", self.artist, artists_B, times_B),
            ("user_artist", self.user_artist, _pair(users_B, artists_B), own_B),
        ):
            if groups is None:
                continue
            first_B, stop_B = groups.before(keys_B, clock_B)
            columns[name] = _share(groups, first_B, stop_B, overall_B)
            columns[f"{name}_listens"] = _logarithm(stop_B - first_B)
            columns[f"{name}_recent"] = _share(groups, np.maximum(first_B, stop_B - RECENT), stop_B, overall_B)
            if name == "user":
                columns["user_effect"] = self.user_effect(first_B, stop_B)
                columns["since_last_event"] = _logarithm(times_B - self._last_times(first_B, stop_B, times_B)) / 2
            if name == "item":
                columns["item_effect"] = self.item_effect(first_B, stop_B)
                earlier_B = groups.before(keys_B, np.maximum(times_B - self.period, 0))[1]
                columns["item_trend"] = _logarithm(stop_B - earlier_B)
        return columns

    def _last_times(self, first_B: Longs, stop_B: Longs, times_B: Longs) -> Longs:
        """The times of the users' last listens; the time of the query where there is none."""
        clock_B = self.user.codes_N[np.maximum(stop_B - 1, 0)] & CLOCK
        last_B = clock_B if self.by_second else self.store.times_E[clock_B].astype(np.int64)
        return np.minimum(np.where(stop_B > first_B, last_B, times_B), times_B)


def _pair(users_N: Longs, others_N: Longs) -> Longs:
    return users_N << 32 | others_N


def _share(groups: Groups, first_B: Longs, stop_B: Longs, overall_B: Floats) -> Floats:
    """How far the log odds of the smoothed share are above those of the overall share."""
    share_B = (groups.positives(first_B, stop_B) + PRIOR * overall_B) / (stop_B - first_B + PRIOR)
    return _log_odds(share_B) - _log_odds(overall_B)


def _log_odds(share_B: Floats) -> Floats:
    share_B = np.clip(share_B, 1e-4, 1 - 1e-4)
    return np.asarray(np.log(share_B / (1 - share_B)))


def _sigmoid(logits_N: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-logits_N)))


def _logarithm(count_B: Longs) -> Floats:
    """The logarithm of one more than a count, scaled to a few units at most."""
    return np.asarray(np.log1p(count_B.astype(np.float64)) / 4)


class Neighbours:
    """Features of anchors and of other queries; `expected_E` are probabilities by user and item alone."""

    def __init__(self, store: EventStore, expected_E: Singles, cut: int, known_E: NDArray[np.bool_] | bool) -> None:
        self.store = store
        self.times_E = store.times_E[:].astype(np.int64)
        kinds_E = store.kinds(slice(0, store.events))
        self.learned_E = (kinds_E & np.uint8(LISTENS) > 0) & known_E
        self.residuals_E = ((kinds_E & np.uint8(LISTEN_PLUS)) > 0).astype(np.float32) - expected_E
        self.residuals_E *= known_E
        anchors_N = np.flatnonzero((kinds_E & np.uint8(ANCHORS) > 0) & (self.times_E < cut))
        items_E = store.items_at(slice(0, store.events))
        self.listens_L = np.flatnonzero(kinds_E & np.uint8(LISTENS))
        """Positions of what a history may hold: not of what an import drew."""
        counts_I = np.bincount(items_E[self.learned_E & (self.times_E < cut)], minlength=store.items)
        frequent = np.sort(np.argsort(-counts_I, kind="stable")[:SIMILAR_ITEMS])
        self.rows = np.full(store.items, -1, np.int32)
        """Row of each item in the matrices; -1 for an item without similarities."""
        self.rows[frequent] = np.arange(len(frequent))
        self.items_E = self.rows[items_E]
        self.drawn = store.stored_per_event > 1
        size = len(frequent)
        self.products_II, self.squares_II, self.users_II = (np.zeros((size, size), np.float32) for _ in range(3))
        self.cut, self.trained_E = cut, np.zeros((store.events, NEIGHBOUR_COLUMNS), np.float32)
        self.expected_II: Singles | None = None
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
        position_BH = np.searchsorted(self.listens_L, ends_B)[:, None] - 1 - np.arange(COMPARED)
        past_BH = self.listens_L[np.maximum(position_BH, 0)]
        ok_BH = (position_BH >= 0) & (past_BH >= first_B[:, None]) & (self.items_E[past_BH] >= 0)
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

        def add(matrix_II: Singles, forth_P: Singles, back_P: Singles) -> None:
            for one, other, values_P in ((rows, columns, forth_P), (columns, rows, back_P)):
                matrix_II[one, other] += np.bincount(pair_P, values_P, len(pairs)).astype(np.float32)

        add(self.products_II, mine_P * theirs_P, mine_P * theirs_P)
        add(self.users_II, np.ones_like(mine_P), np.ones_like(mine_P))
        add(self.squares_II, mine_P * mine_P, theirs_P * theirs_P)

    def _described(self, candidates_B: NDArray[np.int32], past_BH: Longs, ok_BH: NDArray[np.bool_]) -> Singles:
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

    def of(self, queries: Queries) -> Singles:
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
