"""The events of dlrm-v4: opened, their windows divided into those to train on and those to score, and simple rules for
the same split.

Shapes: N anchors, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.events.kinds import DRAWN, POSITIVE
from ...data.events.store import EventStore, own_ids
from ...data.known import event_files as catalogue
from ...data.known.event_files import open_events
from ...data.known.yambda.yambda_like import of_size
from ...data.order import Samples
from ...data.streaming.features import RATES
from ...data.streaming.fewer import with_fewer
from ...data.streaming.history import Histories
from ...data.streaming.loader import StreamOrder
from ...data.streaming.queries import Queries
from ...data.streaming.rates import MOST_COMPARED_EVENTS, RunningRates
from ...data.streaming.windows import Users, WindowIndex
from ...errors import DataError
from ...execution.workload import MOST_ROWS, ScoredRows
from ...train.baselines import MOST_CHOOSING, Rules, bias_logits, can_boost, popularity, regression
from ...train.loop import Position
from ...train.ranking import RecentShares, item_rules, repeated_share
from .config import DLRMv4WorkloadConfig, EventsConfig, bounds, require_room, split_of
from .own_data import with_groups
from .ranking import PART, EventCatalogue, Features, LastItems, Rule, gradient_boosting, regressed, running_means

Positions = NDArray[np.int64]

MOST_BASELINE_ROWS = 4_000_000
"""The simple rules learn from the newest anchors, at most this many."""
MOST_ROWS_BESIDE = 200_000
"""Anchors that the regression which is added to the model learns from."""
MOST_ROWS_TO_FIT = 300_000
"""Gradient boosting learns from the newest training anchors, at most this many."""


class Part(NamedTuple):
    """Some anchors: those of a part of the events, or of some users, in consecutive windows."""

    windows: range
    users: Users


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
        return with_groups(open_events(data.path))
    return catalogue.embedded(say=lambda _: None, config=of_size(data.events))


class EventWindows:
    """Events opened, and their windows divided into those to train on and those to score."""

    def __init__(self, config: DLRMv4WorkloadConfig) -> None:
        self.config, data = config, config.data
        self.store = opened(data)
        self.split = split_of(self.store, config)
        self.index = WindowIndex.open(self.store, data.windows, None if self.split is None else self.split.cuts)
        if self.split is None:
            self.train, self.holdout = self._windows()
            self.fitted, self.validation = self.train, None
            """`train` are the anchors before those held out, of which `fitted` are trained on and those of
            `validation` choose the epoch."""
        else:
            self.train, self.holdout, choosing = self._part("train"), self._part("held-out"), self._part("choose")
            self.fitted = self._part("fit") if data.validate else self.train
            self.validation = choosing if data.validate and choosing.windows else None
        self.index = with_fewer(self.index, *self.fitted, share=data.train_share, recent=data.recent)
        train = self.train_order()
        # Without a batch to train on there is no next window.
        self.valid_samples = self.valid_order(self.part_at(None)).samples if train.samples else 0
        """Number of anchors that are scored at the end of training."""
        if not self.valid_samples:
            what = "score" if train.samples else "train on"
            raise DataError(
                f"there is no anchor to {what}", where={"store": self.store.folder}, fix="--data.windows.min-history"
            )
        chosen = self.valid_order(self.validation).samples if self.validation else 0
        self.data = {
            "name": self.store.name,
            "digest": self.store.digest,
            "rows": train.samples + chosen + self.valid_samples,
            "train_rows": train.samples,
            "valid_rows": self.valid_samples,
            "synthetic": self.store.synthetic,
            **(self._window_facts() if self.split is None else self.split.facts(self.store.split_note)),
        }
        if config.data.baselines == "all" and train.samples > MOST_CHOOSING:
            self.data["chosen_rows"] = MOST_CHOOSING
        left_out = int(train.counts_S.sum()) - train.samples
        if left_out:
            self.data["skipped"] = {"anchors that fill no batch at the end of their window": left_out}
        self.target = bounds(config, neighbours=self.store.events <= MOST_COMPARED_EVENTS)

    @property
    def last_trained(self) -> Part | None:
        """As many of the last windows that are trained on as there are to choose the epoch."""
        windows, most = self.fitted.windows, len(self.validation.windows) if self.validation else 0
        return Part(windows[-most:], self.fitted.users) if most and windows else None

    def _windows(self) -> tuple[Part, Part]:
        """The windows to train on, and those held out."""
        data = self.config.data
        try:
            train, held_out = divided(data.holdout_windows, data.holdout_first, self.index.windows)
        except DataError as error:
            raise DataError(error.what, where={"store": self.store.folder, **error.where}, fix=error.fix) from None
        return Part(train, "train"), Part(held_out, "held-out" if data.windows.train_share < 1 else "all")

    def _part(self, users: Users) -> Part:
        """The windows that have anchors of a part of a split."""
        occupied = np.flatnonzero(self.index.counts(users))
        return Part(range(occupied[0], occupied[-1] + 1) if len(occupied) else range(0), users)

    def _window_facts(self) -> dict[str, Any]:
        train, scored = self.train.windows, self.part_at(None).windows
        users = ", held-out users" if self.holdout.users == "held-out" else ""
        text = f"windows {train.start} to {train.stop - 1}, scored {scored.start} to {scored.stop - 1}{users}"
        timed = self.store.time_order == "time" and self.config.evaluate.on == "holdout"
        begin = self.index.t_min + self.holdout.windows.start * self.config.data.windows.seconds
        return {"split": text + self.store.split_note, **({"held_out_from": begin} if timed else {})}

    @cached_property
    def rates(self) -> RunningRates:
        """Running rates of users and items, for the model and for baselines."""
        cut = self.index.t_min + self.train.windows.stop * self.config.data.windows.seconds
        if self.split is not None and self.split.moments is not None:
            cut = self.split.moments[1]
        return RunningRates(self.store, cut, self.unknown_E)

    @cached_property
    def unknown_E(self) -> NDArray[np.bool_] | None:
        """Which events are held out where earlier and later ones are not; None where all held-out events are later."""
        if self.split is None or self.split.kind == "time":
            return None
        return self.split.held_out(slice(0, self.store.events))

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

    def part_at(self, at: Position | None) -> Part:
        """What an evaluation scores that far into training; at its end without a position."""
        if self.config.evaluate.on == "holdout":
            return self.holdout
        window = _next_window(self.train_order(), at or Position(1, 0, 1))
        if window is None:
            raise DataError(
                "no window with anchors follows those that are trained on: nothing is left to score",
                where={"store": self.store.folder},
                fix="--data.holdout-windows",
            )
        return Part(range(window, window + 1), self.holdout.users)

    def train_order(self) -> StreamOrder:
        data, batch_size = self.config.data, self.config.train.batch_size
        windows, users = self.fitted
        return StreamOrder(self.index, windows=windows, batch_size=batch_size, leftover=data.leftover, users=users)

    def valid_order(self, part: Part) -> StreamOrder:
        """Every anchor, whatever the batch size."""
        batch_size = self.config.evaluate.batch_size or self.config.train.batch_size
        return StreamOrder(self.index, windows=part.windows, batch_size=batch_size, leftover="carry", users=part.users)

    def rows_of(self, part: Part) -> ScoredRows:
        """The anchors of a part, in the order in which they are scored."""
        positions_N = self.positions(part)
        labels_N = torch.from_numpy(self._labels(positions_N))
        if len(positions_N) > MOST_ROWS:
            return ScoredRows(labels_N)
        users_N = torch.from_numpy(self.store.users_of(positions_N))
        items_N = torch.from_numpy(self.store.items_at(positions_N))
        targets_N = None
        if self.split is not None:
            targets_N = torch.from_numpy(np.isin(positions_N, self.split.targets("valid")[1]))
        # The events of a user lie in the order of time.
        return ScoredRows(labels_N, users_N, items_N, torch.from_numpy(positions_N), targets_N)

    @cached_property
    def events(self) -> EventCatalogue:
        """The items that scored anchors are ranked among."""
        newest_N, scored_N = self._newest_positions, self.positions(self.part_at(None))
        users_N, items_N = self._newest_samples.ids_FN
        taken_N = torch.from_numpy(self._taken(newest_N))
        repeats = repeated_share([(users_N[taken_N], items_N[taken_N])])

        def find_shares() -> RecentShares | None:
            # Items that appear after the training do not compete, so an anchor's own must not count either.
            trained_N = np.isin(self.store.items_at(scored_N), items_N.numpy()) & (self.unknown_E is None)
            return self.shares(np.concatenate([newest_N, scored_N[trained_N]]))

        return EventCatalogue(self.store, items_N, scored_N, repeats, self._taken, find_shares)

    def _taken(self, which: slice | Positions) -> NDArray[np.bool_]:
        """Of which events the user took the item; without a split of own data, of all that happened."""
        if self.split is not None:
            return self.split.taken(which)
        return np.asarray((self.store.kinds(which) & np.uint8(DRAWN)) == 0)

    def shares(self, positions_N: Positions | None = None) -> RecentShares | None:
        """How likely users see items, from these events, or from the newest of all; what counts as recent comes from
        the training. None where negatives were drawn."""
        if self.store.stored_per_event > 1:
            return None
        if positions_N is None:
            positions_N = self._newest(Part(range(self.index.windows), "all"))
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
        return self._newest(self.train)

    def _newest(self, part: Part) -> np.ndarray[Any, Any]:
        """The newest anchors, as many as simple rules learn from; also those that choose the epoch."""
        newest: list[np.ndarray[Any, Any]] = []
        for window in reversed(part.windows):
            newest.insert(0, self.index.anchors(window, part.users))
            if sum(map(len, newest)) >= MOST_BASELINE_ROWS:
                break
        return np.concatenate(newest)[-MOST_BASELINE_ROWS:]

    def positions(self, part: Part) -> Positions:
        return np.concatenate([self.index.order(window, part.users) for window in part.windows])

    def _labels(self, positions_N: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return ((self.store.kinds(positions_N) & POSITIVE) > 0).astype(np.float32)

    def scored_rows(self) -> ScoredRows:
        return self.rows_of(self.part_at(None))

    def baseline_logits(self) -> Mapping[str, Tensor]:
        """Logits of each baseline for the rows that are scored at the end of training."""
        scored_N = self.positions(self.part_at(None))
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
        train_N = self._newest(self.fitted)[-MOST_ROWS_BESIDE:]
        weights_F, intercept = regression(self._in_parts(self.rates.of, train_N), self._labels(train_N))
        assert self.validation is not None
        validated_N = self.positions(self.validation)
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
        return LastItems(self.store, self.rates, self.config.data.history.scan, self.unknown_E)

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


def _next_window(order: StreamOrder, at: Position) -> int | None:
    """The first window whose anchors are in no batch so far; none where the data ends."""
    if at.batch == 0 and at.step == 0:
        return order.windows[0]
    done = at.batch or len(order)
    last = max(order.last_window_index(done - 1), int(np.searchsorted(order.seams_S, done, side="right")) - 1)
    after = order.windows[last] + 1
    occupied = np.flatnonzero(order.index.counts("all")[after:])
    return after + int(occupied[0]) if len(occupied) else None
