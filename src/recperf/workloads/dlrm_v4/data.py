"""The events of dlrm-v4: opened, their windows divided into those to train on and those to score, and simple rules for
the same split.

Shapes: N anchors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data.order import Samples
from ...data.yambda import catalogue
from ...data.yambda.history import Histories
from ...data.yambda.order import StreamOrder
from ...data.yambda.reference.cache import open_events
from ...data.yambda.schema import LISTEN_PLUS
from ...data.yambda.synthesize.config import of_size
from ...data.yambda.windows import Users, WindowIndex, refuse_overlap
from ...distributed.world import current
from ...errors import ConfigError, DataError
from ...execution.workload import Fix, Trial
from ...measure.cost import FLOAT, Cost
from ...models.dlrm_v4.cost import load_of, step
from ...train.baselines import baselines, popularity
from ...train.device import choose, repeatable
from ...train.loop import Position, Recipe
from ...train.stream import next_window
from ..micro_dlrm.build import cpu_fixes
from .config import DLRMv4WorkloadConfig, EventsConfig, bounds

if TYPE_CHECKING:
    from .build import HistoryTrial

MOST_BASELINE_ROWS = 4_000_000
"""The simple rules learn from the newest anchors, at most so many."""


class PreparedHistories:
    """Events opened, windows found, some of them set aside."""

    def __init__(self, config: DLRMv4WorkloadConfig) -> None:
        self.config, data = config, config.data
        if data.path is None:
            made = of_size(data.events, seed=data.embedded_seed)
            self.store = catalogue.embedded(say=lambda _: None, config=made)
        else:
            self.store = open_events(data.path)
        self.index = WindowIndex.open(self.store, data.windows)
        try:
            self.train_windows, self.holdout = divided(data, self.index.windows)
        except DataError as error:
            raise DataError(error.what, where={"store": self.store.folder, **error.where}, fix=error.fix) from None
        self.scored_users: Users = "held-out" if data.windows.train_share < 1 else "all"
        model = config.model
        product = 2 * config.train.batch_size * model.hstu.max_length * model.dim * model.hstu.uvqk_width
        settings = choose(config.train, largest_product_flops=product)
        # Those of the transducer; the rest of the model is float32.
        settings = replace(settings, precision=model.precision, others_exact=True)
        self.settings = repeatable(settings) if config.train.deterministic else settings
        self.histories = Histories(self.store, data.history, pin=self.settings.device.type == "cuda")
        train, valid = self.train_order(), self.valid_order(self.windows_at(None))
        if not train.samples or not valid.samples:
            what = "score" if train.samples else "train on"
            raise DataError(
                f"there is no anchor to {what}", where={"store": self.store.folder}, fix="--data.windows.min-history"
            )
        self.valid_samples = valid.samples
        """Scored at the end of training."""
        self.data = {
            "name": self.store.name,
            "digest": self.store.digest,
            "rows": train.samples + valid.samples,
            "train_rows": train.samples,
            "valid_rows": self.valid_samples,
            "split": self._split(),
            "synthetic": self.store.synthetic,
        }
        left_out = int(train.counts_S.sum()) - train.samples
        if left_out:
            self.data["skipped"] = {"anchors that fill no batch at the end of their window": left_out}
        self.target = bounds(config)

    def _split(self) -> str:
        train, scored = self.train_windows, self.windows_at(None)
        users = ", held-out users" if self.scored_users == "held-out" else ""
        return f"windows {train.start} to {train.stop - 1}, scored {scored.start} to {scored.stop - 1}{users}"

    def windows_at(self, at: Position | None) -> range:
        """The windows an evaluation scores that far into training; at its end without a position."""
        if self.config.evaluate.on == "holdout":
            return self.holdout
        window = next_window(self.train_order(), at or Position(1, 0, 1))
        if window is None:
            raise DataError(
                "no window with anchors follows those that are trained on: nothing is left to score",
                where={"store": self.store.folder},
                fix="--data.train-windows, or --data.holdout-windows",
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

    def baselines(self) -> dict[str, dict[str, float]]:
        """Of the rows that the end of training is scored on."""
        newest: list[np.ndarray[Any, Any]] = []
        for window in reversed(self.train_windows):
            newest.insert(0, self.index.anchors(window, "train"))
            if sum(map(len, newest)) >= MOST_BASELINE_ROWS:
                break
        train = self._samples(np.concatenate(newest)[-MOST_BASELINE_ROWS:])
        scored = [self.index.anchors(window, self.scored_users) for window in self.windows_at(None)]
        valid = self._samples(np.concatenate(scored))
        return {**baselines(train, valid), "popularity": popularity(train, valid)}

    def _samples(self, positions_N: np.ndarray[Any, Any]) -> Samples:
        users = self.store.users_by_position(positions_N)
        ids = np.stack([users, self.store.items_E[positions_N].astype(np.int64)])
        labels = (self.store.kinds(positions_N) & LISTEN_PLUS) > 0
        return Samples(
            keys=("user", "item"),
            dense_ND=torch.zeros(len(positions_N), 0),
            ids_FN=torch.from_numpy(ids),
            labels_N=torch.from_numpy(labels.astype(np.float32)),
        )

    def trial(self, seed: int) -> HistoryTrial:
        world = current()
        if world.size > 1:
            from .ranks import RankTrial

            return RankTrial(self, seed, world)
        from .build import HistoryTrial

        return HistoryTrial(self, seed)

    def step_cost(self, ids: int, unique: int) -> dict[str, Cost]:
        """Of a step with the lengths of a batch from the middle of training; of several ranks, of this one's share."""
        order, world = self.train_order(), current()
        positions_B = order.batch(len(order) // 2)
        ours_B = positions_B[world.rank :: world.size]
        lengths = self.histories.batch(ours_B if len(ours_B) else positions_B[:1]).history_offsets_B1.diff()
        least = self.config.model.context_tokens + 1
        return step(self.config.model, [load_of(self.config.model, (lengths + least).tolist())], rows=unique)

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.config.model.table_dim
        return row, row * sum(self.config.model.table_rows.values())

    def fixes(self) -> tuple[Fix, ...]:
        return cpu_fixes(self.config, self.settings)

    def pair(self, trial: Trial) -> dict[str, Recipe] | None:
        return None


def divided(data: EventsConfig, windows: int) -> tuple[range, range]:
    """The windows to train on and those held out, which come after; held-out users may share windows with others."""
    first = windows - data.holdout_windows if data.holdout_first is None else data.holdout_first
    holdout = range(first, first + data.holdout_windows)
    stop = data.first_window + data.train_windows if data.train_windows else min(first, windows)
    train = range(data.first_window, stop)
    if not train:
        raise DataError(
            f"of {windows} windows {data.holdout_windows} are to be scored: none is left to train on",
            fix="--data.holdout-windows, or shorter --data.windows.seconds",
        )
    for what, chosen in (("trained on", train), ("held out", holdout)):
        if chosen.stop > windows:
            raise DataError(
                f"windows {chosen.start} to {chosen.stop - 1} are to be {what}, but the data has {windows}",
                fix="--data.holdout-first, --data.train-windows, or shorter --data.windows.seconds",
            )
    if data.windows.train_share >= 1:
        refuse_overlap(train, holdout)
        if holdout.start < train.start:
            raise ConfigError(
                f"hold-out windows {holdout.start} to {holdout.stop - 1} lie before training, which begins with "
                f"{train.start}: they must be its future",
                where={"field": "data.holdout_first"},
            )
    return train, holdout
