"""Building dlrm-v4: the part of it that needs torch.

Shapes: N anchors, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.order import Samples
from ..data.yambda import catalogue
from ..data.yambda.history import Histories
from ..data.yambda.loader import Loader
from ..data.yambda.order import StreamOrder
from ..data.yambda.reference.cache import open_events
from ..data.yambda.schema import LISTEN_PLUS
from ..data.yambda.synthesize.config import of_size
from ..data.yambda.windows import WindowIndex
from ..errors import DataError
from ..measure.cost import FLOAT, Cost
from ..measure.spans import span
from ..models.dlrm_v4 import DLRMv4
from ..models.dlrm_v4_config import DLRMv4Config
from ..models.dlrm_v4_cost import load_of, step
from ..models.dlrm_v4_inputs import Inputs, prepare
from ..models.stages import StagedLoss
from ..train.baselines import baselines
from ..train.device import choose
from ..train.loop import Recipe
from ..train.metrics import binary_metrics
from .base import Fix, Trial
from .clicks import cpu_fixes
from .dlrm_v4 import DLRMv4WorkloadConfig, HistoryTrainConfig, bounds


class PreparedHistories:
    """Events opened, windows found, the last of them set aside."""

    def __init__(self, config: DLRMv4WorkloadConfig) -> None:
        self.config, data = config, config.data
        if data.path is None:
            made = of_size(data.events, seed=data.embedded_seed)
            self.store = catalogue.embedded(say=lambda _: None, config=made)
        else:
            self.store = open_events(data.path)
        self.index = WindowIndex.open(self.store, data.windows)
        train = self.index.windows - data.holdout_windows
        if train < 1:
            raise DataError(
                f"of {self.index.windows} windows {data.holdout_windows} are to be scored: none is left to train on",
                where={"store": self.store.folder},
                fix="--data.holdout-windows, or shorter --data.windows.seconds",
            )
        self.train_windows, self.valid_windows = range(train), range(train, self.index.windows)
        model = config.model
        product = 2 * config.train.batch_size * model.hstu.max_length * model.dim * model.hstu.uvqk_width
        self.settings = choose(config.train, largest_product_flops=product)
        self.histories = Histories(self.store, data.history, pin=self.settings.device.type == "cuda")
        valid = int(self.index.counts()[train:].sum())
        samples = self.train_order().samples
        if not samples or not valid:
            what = "train on" if not samples else "score"
            raise DataError(
                f"there is no anchor to {what}", where={"store": self.store.folder}, fix="--data.windows.min-history"
            )
        self.data = {
            "name": self.store.name,
            "digest": self.store.digest,
            "rows": samples + valid,
            "train_rows": samples,
            "valid_rows": valid,
            "split": f"last {data.holdout_windows} windows",
            "synthetic": self.store.synthetic,
        }
        self.target = bounds(config)

    def train_order(self) -> StreamOrder:
        """Nothing is dropped: what does not fill a batch goes on into the next window."""
        return StreamOrder(
            self.index,
            windows=self.train_windows,
            batch_size=self.config.train.batch_size,
            leftover="carry",
            users="train",
        )

    def valid_order(self) -> StreamOrder:
        return StreamOrder(
            self.index,
            windows=self.valid_windows,
            batch_size=self.config.train.batch_size,
            leftover="carry",
            users="all",
        )

    def baselines(self) -> dict[str, dict[str, float]]:
        train = np.concatenate([self.index.anchors(window, "train") for window in self.train_windows])
        valid = np.concatenate([self.index.anchors(window) for window in self.valid_windows])
        return baselines(self._samples(train), self._samples(valid))

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
        return HistoryTrial(self, seed)

    def step_cost(self, ids: int, unique: int) -> dict[str, Cost]:
        """Of a step with the lengths of a batch from the middle of training."""
        order = self.train_order()
        lengths = self.histories.batch(order.batch(len(order) // 2)).history_offsets_B1.diff()
        least = self.config.model.context_tokens + 1
        return step(self.config.model, [load_of(self.config.model, (lengths + least).tolist())], rows=unique)

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.config.model.table_dim
        return row, row * sum(self.config.model.table_rows.values())

    def fixes(self) -> tuple[Fix, ...]:
        return cpu_fixes(self.config, self.settings)

    def pair(self, trial: Trial) -> dict[str, Recipe] | None:
        return None


@dataclass(frozen=True, eq=False)
class Numbered:
    """What the model reads, and the step it belongs to, which decides what dropout drops."""

    inputs: Inputs
    step: int

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, eq=False)
class InputOrder:
    """Batches as the model reads them, window after window, the same in every epoch."""

    order: StreamOrder
    histories: Histories
    model: DLRMv4Config
    device: torch.device
    workers: int

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Numbered]:
        with Loader(self.order, self.histories, workers=self.workers, start=start, device=self.device) as loader:
            for number, batch in enumerate(loader, start):
                yield Numbered(prepare(batch.to(self.device), self.model), epoch * len(self) + number)


class SteppedModel:
    """The model as the training loop knows models."""

    def __init__(self, model: DLRMv4, seed: int) -> None:
        self.model, self.seed = model, seed

    def train(self, mode: bool = True) -> SteppedModel:
        self.model.train(mode)
        return self

    def loss(self, batch: Numbered) -> StagedLoss:
        self.model.set_step(self.seed, batch.step)
        return self.model.loss(batch.inputs)


class AdamAndRows:
    """Adam of the dense parameters, their gradient clipped, and row-wise Adagrad of the rows a step used."""

    def __init__(self, model: DLRMv4, config: HistoryTrainConfig) -> None:
        self.model, self.config = model, config
        self.adam = torch.optim.Adam(model.dense_parameters(), lr=0.0, betas=(0.95, 0.999), eps=1e-8, fused=True)

    def step(self, learning_rate: float | Tensor) -> None:
        with span("dense_update"):
            if self.config.clip:
                nn.utils.clip_grad_norm_(self.model.dense_parameters(), self.config.clip)
            for group in self.adam.param_groups:
                group["lr"] = float(learning_rate)
            self.adam.step()
            self.adam.zero_grad()
        with span("sparse_update"):
            ratio = self.config.table_learning_rate / self.config.learning_rate
            self.model.tables.update(float(learning_rate) * ratio)

    def state_dict(self) -> dict[str, Any]:
        return self.adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state)


class HistoryTrial:
    """One model, its optimizer and the order of its batches."""

    def __init__(self, prepared: PreparedHistories, seed: int) -> None:
        config, device = prepared.config, prepared.settings.device
        self.prepared = prepared
        self.model = DLRMv4(config.model, seed=seed, device=device)
        self.optimizer = AdamAndRows(self.model, config.train)
        order = self._inputs(prepared.train_order())
        planned = config.train.epochs * len(order)
        rise = config.train.warmup_steps or max(1, round(config.train.rise * planned))
        self.recipe = Recipe(
            model=SteppedModel(self.model, seed),
            optimizer=self.optimizer,
            order=order,
            # The first step runs at 0, as the benchmark's does.
            learning_rate=lambda step: config.train.learning_rate * min(1.0, step / rise),
            epochs=config.train.epochs,
            max_steps=config.train.max_steps,
        )

    def _inputs(self, order: StreamOrder) -> InputOrder:
        prepared = self.prepared
        device, workers = prepared.settings.device, prepared.config.data.workers
        return InputOrder(order, prepared.histories, prepared.config.model, device, workers)

    @torch.no_grad()
    def score(self) -> dict[str, float]:
        """Of every anchor of the windows set aside."""
        self.model.eval()
        logits, labels = [], []
        for batch in self._inputs(self.prepared.valid_order()).batches(0):
            logits.append(self.model(batch.inputs))
            labels.append(batch.inputs.labels_B)
        return binary_metrics(torch.cat(logits), torch.cat(labels))

    def rows_of(self, batch: Numbered) -> Tensor:
        """The distinct rows of all tables that a batch looks up, tables one behind the other."""
        found, start = [], 0
        for name, rows in self.tables():
            if name in batch.inputs.rows:
                found.append(batch.inputs.rows[name].long() + start)
            start += rows
        return torch.cat(found)

    def tables(self) -> list[tuple[str, int]]:
        return list(self.prepared.config.model.table_rows.items())

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
