"""The events of dlrm-v4: opened, their windows divided into those to train on and those to score, and simple rules for
the same split.

Shapes: N anchors, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.events.kinds import DRAWN, LISTEN_PLUS
from ...data.events.store import EventStore, Queries, own_ids
from ...data.known import event_files as catalogue
from ...data.known.opening import open_events
from ...data.known.yambda.yambda_like import of_size
from ...data.order import Samples
from ...data.streaming.features import RATES
from ...data.streaming.history import Histories
from ...data.streaming.loader import StreamOrder
from ...data.streaming.rates import MOST_COMPARED_EVENTS, RunningRates
from ...data.streaming.windows import Users, WindowIndex
from ...errors import DataError
from ...execution.workload import MOST_ROWS, ScoredRows
from ...train.baselines import MOST_CHOOSING, Rules, bias_logits, can_boost, popularity, regression
from ...train.loop import Position
from ...train.ranking import RecentShares, item_rules, repeated_share
from .config import DLRMv4WorkloadConfig, EventsConfig, bounds, require_room
from .ranking import PART, EventCatalogue, Features, LastItems, Rule, gradient_boosting, regressed, running_means

Positions = NDArray[np.int64]

HELD_OUT = 0.2
"""Share of the anchors, the latest, that the hold-out windows have unless a number of windows is requested."""
MOST_BASELINE_ROWS = 4_000_000
"""The simple rules learn from the newest anchors, at most this many."""
MOST_ROWS_BESIDE = 200_000
"""Anchors that the regression which is added to the model learns from."""
MOST_ROWS_TO_FIT = 300_000
"""Gradient boosting learns from the newest training anchors, at most this many."""


def check(config: DLRMv4WorkloadConfig) -> str:
    """Check memory and data without training; the line names the data."""
    require_room(config)
    if config.data.path is None:
        return f"yambda-like, about {config.data.events:,} events (synthetic)"
    store = open_events(config.data.path)
    return f"{store.name}, {store.events:,} events{' (synthetic)' if store.synthetic else ''}"


def opened(data: EventsConfig) -> EventStore:
    """The store of a config; the embedded events are generated if they do not exist."""
    if data.path is not None:
        return open_events(data.path)
    return catalogue.embedded(say=lambda _: None, config=of_size(data.events))


class EventWindows:
    """Events opened, and their windows divided into those to train on and those to score."""

    def __init__(self, config: DLRMv4WorkloadConfig) -> None:
        self.config, data = config, config.data
        self.store = opened(data)
        self.index = WindowIndex.open(self.store, data.windows)
        try:
            held_out = data.holdout_windows or _last_windows(HELD_OUT, self.index.counts())
            before, self.holdout = divided(held_out, data.holdout_first, self.index.windows)
        except DataError as error:
            raise DataError(error.what, where={"store": self.store.folder, **error.where}, fix=error.fix) from None
        self.train_windows, self.validation = validated(data.validation_share, self.index.counts()[: len(before)])
        self.scored_users: Users = "held-out" if data.windows.train_share < 1 else "all"
        train = self.train_order()
        # Without a batch to train on there is no next window.
        self.valid_samples = self.valid_order(self.windows_at(None)).samples if train.samples else 0
        """Number of anchors that are scored at the end of training."""
        if not self.valid_samples:
            what = "score" if train.samples else "train on"
            raise DataError(
                f"there is no anchor to {what}", where={"store": self.store.folder}, fix="--data.windows.min-history"
            )
        self.data = {
            "name": self.store.name,
            "digest": self.store.digest,
            "rows": train.samples + self.valid_order(self.validation).samples + self.valid_samples,
            "train_rows": train.samples,
            "valid_rows": self.valid_samples,
            "split": self._split(),
            "synthetic": self.store.synthetic,
        }
        if self.store.time_order == "time" and config.evaluate.on == "holdout":
            self.data["held_out_from"] = self.index.t_min + self.holdout.start * data.windows.seconds
        if config.data.baselines == "all" and train.samples > MOST_CHOOSING:
            self.data["chosen_rows"] = MOST_CHOOSING
        left_out = int(train.counts_S.sum()) - train.samples
        if left_out:
            self.data["skipped"] = {"anchors that fill no batch at the end of their window": left_out}
        self.target = bounds(config, neighbours=self.store.events <= MOST_COMPARED_EVENTS)

    def _split(self) -> str:
        train, scored, chosen = self.train_windows, self.windows_at(None), self.validation
        validation = f", validated on {chosen.start} to {chosen.stop - 1}" if chosen else ""
        users = ", held-out users" if self.scored_users == "held-out" else ""
        users += self.store.split_note
        scored_are = f"scored {scored.start} to {scored.stop - 1}{users}"
        return f"windows {train.start} to {train.stop - 1}{validation}, {scored_are}"

    @cached_property
    def rates(self) -> RunningRates:
        """Running rates of users and items, for the model and for baselines."""
        return RunningRates(self.store, self.index.t_min + self._before.stop * self.config.data.windows.seconds)

    @property
    def _before(self) -> range:
        """The windows before the hold-out: simple rules learn from those that choose the epoch too."""
        return range(self.validation.stop)

    @cached_property
    def plain(self) -> Histories:
        """Describes anchors as queries."""
        return Histories(self.store, self.config.data.history)

    def gatherer(self, *, pin: bool = False) -> Histories:
        """Makes batches of anchors, with running rates if the model reads them."""
        rates = self.rates if self.config.model.rates_hidden else None
        return Histories(self.store, self.config.data.history, pin=pin, rates=rates)

    def verified(self) -> dict[str, int]:
        return self.store.verified()

    def windows_at(self, at: Position | None) -> range:
        """The windows an evaluation scores that far into training; at its end without a position."""
        if self.config.evaluate.on == "holdout":
            return self.holdout
        window = _next_window(self.train_order(), at or Position(1, 0, 1))
        if window is None:
            raise DataError(
                "no window with anchors follows those that are trained on: nothing is left to score",
                where={"store": self.store.folder},
                fix="--data.holdout-windows",
            )
        return range(window, window + 1)

    def train_order(self) -> StreamOrder:
        data, batch_size = self.config.data, self.config.train.batch_size
        return StreamOrder(
            self.index, windows=self.train_windows, batch_size=batch_size, leftover=data.leftover, users="train"
        )

    def valid_order(self, windows: range) -> StreamOrder:
        """Every anchor, whatever the batch size."""
        batch_size = self.config.evaluate.batch_size or self.config.train.batch_size
        return StreamOrder(
            self.index, windows=windows, batch_size=batch_size, leftover="carry", users=self.scored_users
        )

    def rows_of(self, windows: range) -> ScoredRows:
        """The anchors of windows, in the order in which they are scored."""
        positions_N = self._scored_positions(windows)
        labels_N = torch.from_numpy(self._labels(positions_N))
        if len(positions_N) > MOST_ROWS:
            return ScoredRows(labels_N)
        users_N = torch.from_numpy(self.store.users_of(positions_N))
        items_N = torch.from_numpy(self.store.items_at(positions_N))
        # The events of a user lie in the order of time.
        return ScoredRows(labels_N, users_N, items_N, times_N=torch.from_numpy(positions_N))

    @cached_property
    def events(self) -> EventCatalogue:
        """The items that scored anchors are ranked among."""
        newest_N, scored_N = self._newest_positions, self._scored_positions(self.windows_at(None))
        users_N, items_N = self._newest_samples.ids_FN
        happened_N = torch.from_numpy((self.store.kinds(newest_N) & np.uint8(DRAWN)) == 0)
        repeats = repeated_share([(users_N[happened_N], items_N[happened_N])])

        def find_shares() -> RecentShares | None:
            # Items that appear after the training do not compete, so an anchor's own must not count either.
            trained_N = np.isin(self.store.items_at(scored_N), items_N.numpy())
            return self.shares(np.concatenate([newest_N, scored_N[trained_N]]))

        return EventCatalogue(self.store, items_N, scored_N, repeats, find_shares)

    def shares(self, positions_N: Positions | None = None) -> RecentShares | None:
        """How likely users meet items, from these events, or from the newest of all; what counts as recent comes from
        the training. None where negatives were drawn."""
        if self.store.stored_per_event > 1:
            return None
        if positions_N is None:
            positions_N = self._newest(range(self.index.windows), "all")
        train, newest_N = self._newest_samples, self._newest_positions
        items = len(torch.unique(train.ids_FN[1]))
        fitted = RecentShares(train.ids_FN[1], self._times(newest_N), items).fitted(train.ids_FN[0], train.labels_N)
        items_N = torch.from_numpy(self.store.items_at(positions_N))
        return replace(fitted, items_N=items_N, times_N=self._times(positions_N))

    def _times(self, positions_N: Positions) -> Tensor:
        return torch.from_numpy(self.store.times_E[positions_N].astype(np.int64))

    def catalogue(self) -> EventCatalogue:
        return self.events

    def own_ids(self, role: str) -> Sequence[object] | None:
        return own_ids(self.store, role)

    def baseline_scorers(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        train = self._newest_samples
        users_N = torch.from_numpy(self.store.users_of(self.events.positions_N))
        rules = item_rules(train.ids_FN[0], train.ids_FN[1], train.labels_N, self.store.items, users_N)
        if self.events.shares is not None:
            rules["recent_popularity"] = self.events.meeting
        return Rules.of(rules) | self._running_rules.then(self._ranks_by)

    @cached_property
    def _newest_samples(self) -> Samples:
        return self._samples(self._newest_positions)

    @cached_property
    def _newest_positions(self) -> np.ndarray[Any, Any]:
        return self._newest(self._before, "train")

    def _newest(self, windows: range, users: Users) -> np.ndarray[Any, Any]:
        """The newest anchors, as many as simple rules learn from."""
        newest: list[np.ndarray[Any, Any]] = []
        for window in reversed(windows):
            newest.insert(0, self.index.anchors(window, users))
            if sum(map(len, newest)) >= MOST_BASELINE_ROWS:
                break
        return np.concatenate(newest)[-MOST_BASELINE_ROWS:]

    def _scored_positions(self, windows: range) -> np.ndarray[Any, Any]:
        return np.concatenate([self.index.order(window, self.scored_users) for window in windows])

    def _labels(self, positions_N: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return ((self.store.kinds(positions_N) & LISTEN_PLUS) > 0).astype(np.float32)

    def scored_rows(self) -> ScoredRows:
        return self.rows_of(self.windows_at(None))

    def baseline_logits(self) -> Mapping[str, Tensor]:
        """Logits of each baseline for the rows that are scored at the end of training."""
        scored_N = self._scored_positions(self.windows_at(None))
        train, valid = self._newest_samples, self._samples(scored_N)
        features = cache(lambda: self._in_parts(self._features, scored_N))
        logits = Rules.of({**bias_logits(train, valid), "popularity": popularity(train, valid)})
        return logits | self._running_rules.then(lambda rule: rule(features()))

    @cached_property
    def _running_rules(self) -> Rules[Rule]:
        """Rules that read on through the hold-out, fitted on the newest training anchors."""
        if self.config.data.baselines == "bias":
            return Rules({})
        train_N = self._newest_positions[-MOST_ROWS_TO_FIT:]
        train_NF, labels_N = self._in_parts(self._features, train_N), self._labels(train_N)
        makers: dict[str, Callable[[], Rule | None]] = {
            "running_means": lambda: running_means,
            "rates_regression": lambda: regressed(train_NF, labels_N, RATES),
        }
        if self.rates.neighbours is not None:
            columns = ("overall", "user_effect", "item_effect", "neighbours", "neighbours_sum")
            makers["item_knn"] = lambda: regressed(train_NF, labels_N, columns)
        if can_boost(labels_N):
            makers["gradient_boosting"] = lambda: gradient_boosting(train_NF, labels_N, self._last_items.is_category)
        # Each is asked for twice: to predict labels, and to rank.
        return Rules({name: cache(make) for name, make in makers.items()})

    @cached_property
    def rates_regression(self) -> tuple[NDArray[np.float64], float, NDArray[np.float64]]:
        """A regression on the running rates of the newest anchors that are trained on: weights, intercept, and logits
        of the anchors that choose the epoch, in their order."""
        train_N = self._newest(self.train_windows, "train")[-MOST_ROWS_BESIDE:]
        weights_F, intercept = regression(self._in_parts(self.rates.of, train_N), self._labels(train_N))
        validated_N = self._scored_positions(self.validation)
        return (
            weights_F,
            intercept,
            self._in_parts(self.rates.of, validated_N).astype(np.float64) @ weights_F + intercept,
        )

    def _in_parts(self, describe: Callable[[Queries], Features], positions_N: Positions) -> Features:
        """What is known at anchors, a part at a time: there are several temporary numbers for each."""
        parts = np.array_split(positions_N, 1 + len(positions_N) // PART)
        return np.concatenate([describe(self.plain.events(part, self.store.kinds(part))) for part in parts])

    def _ranks_by(self, rule: Rule) -> Callable[[Tensor, Tensor], Tensor]:
        """A rule as a scorer of scored anchors with other items."""

        def score(rows_P: Tensor, items_P: Tensor) -> Tensor:
            positions_P = self.events.positions_N[rows_P.numpy()]
            events = self.plain.events(positions_P, self.store.kinds(positions_P))
            return rule(self._features(replace(events, items_B=items_P.numpy())))

        return score

    @cached_property
    def _last_items(self) -> LastItems:
        return LastItems(self.store, self.rates, self.config.data.history.scan)

    def _features(self, queries: Queries) -> Features:
        return np.concatenate([self.rates.of(queries), self._last_items.of(queries)], 1)

    def _samples(self, positions_N: np.ndarray[Any, Any]) -> Samples:
        users = self.store.users_of(positions_N)
        ids = np.stack([users, self.store.items_at(positions_N)])
        return Samples(
            keys=("user", "item"),
            dense_ND=torch.zeros(len(positions_N), 0),
            ids_FN=torch.from_numpy(ids),
            labels_N=torch.from_numpy(self._labels(positions_N)),
        )


def _last_windows(share: float, counts_W: np.ndarray[Any, Any]) -> int:
    """How many of the last windows, with at least one anchor, together come nearest to a share of all anchors; one
    window, the first, is never among them."""
    last_W = np.cumsum(counts_W[::-1])[:-1]
    away_W = np.where(last_W > 0, np.abs(last_W - share * counts_W.sum()), np.inf)
    return 1 + int(away_W.argmin()) if len(last_W) else 1


def divided(held_out: int, first: int | None, windows: int) -> tuple[range, range]:
    """The windows to train on, and those held out, which begin with the `first`; None: they are the last ones."""
    first = windows - held_out if first is None else first
    stop = first + held_out
    if windows == 1:
        raise DataError(
            "all events lie in one window of time: there is no later one to score",
            fix="shorter --data.windows.seconds, or import with other times, or with --order rows instead of times",
        )
    if first < 1:
        raise DataError(
            f"of {windows} windows {held_out} are to be scored: none is left to train on",
            fix="--data.holdout-windows, or shorter --data.windows.seconds",
        )
    if stop > windows:
        raise DataError(
            f"windows {first} to {stop - 1} are to be held out, but the data has {windows}",
            fix="--data.holdout-first, or shorter --data.windows.seconds",
        )
    return range(first), range(first, stop)


def validated(share: float, counts_W: np.ndarray[Any, Any]) -> tuple[range, range]:
    """The windows to train on, at least one, and the last ones, which choose the epoch: together they come nearest to
    the share of all anchors."""
    windows = _last_windows(share, counts_W) if share and counts_W[1:].any() else 0
    first = len(counts_W) - windows
    return range(first), range(first, len(counts_W))


def _next_window(order: StreamOrder, at: Position) -> int | None:
    """The first window whose anchors are in no batch so far; none where the data ends."""
    if at.batch == 0 and at.step == 0:
        return order.windows[0]
    done = at.batch or len(order)
    last = max(order.last_window_index(done - 1), int(np.searchsorted(order.seams_S, done, side="right")) - 1)
    after = order.windows[last] + 1
    occupied = np.flatnonzero(order.index.counts("all")[after:])
    return after + int(occupied[0]) if len(occupied) else None
