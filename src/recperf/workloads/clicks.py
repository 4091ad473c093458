"""Building a click-prediction workload on MovieLens: the part of it that needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.clicks import ClickArrays, build
from ..data.movielens import load
from ..data.order import Samples, ShuffledOrder, cut
from ..errors import ConfigError
from ..models.dlrm import DLRM
from ..train.baselines import baselines
from ..train.device import choose
from ..train.loop import Recipe
from ..train.metrics import binary_metrics
from ..train.optim import AdamW, one_cycle
from .micro_dlrm import MicroDLRMConfig, target

SCORING_BATCH = 8192


class PreparedClicks:
    """MovieLens read, split and turned into tensors on the device that trains."""

    def __init__(self, config: MicroDLRMConfig) -> None:
        self.config = config
        raw = load(config.data)
        clicks = build(raw, config.data)
        _check_sizes(config, clicks.rows, len(clicks.dense_names))
        products = [
            2 * config.train.batch_size * before * after
            for widths in (config.model.bottom, config.model.top_widths)
            for before, after in zip(widths, widths[1:])
        ]
        self.settings = choose(config.train, largest_product_flops=max(products))
        self.train, self.valid = _samples(clicks.train), _samples(clicks.valid)
        self.data = {
            "name": raw.name,
            "digest": raw.digest,
            "rows": len(raw.rating),
            "train_rows": len(self.train),
            "valid_rows": len(self.valid),
            "split": config.data.split,
            "synthetic": raw.synthetic,
        }
        self.target = target(config, published=raw.name == "movielens-100k")

    def baselines(self) -> dict[str, dict[str, float]]:
        return baselines(self.train, self.valid)

    def trial(self, seed: int) -> ClickTrial:
        device = self.settings.device
        return ClickTrial(self.config, self.train.to(device), self.valid.to(device), seed, device)


class ClickTrial:
    """One DLRM, its optimizer and the order of its batches."""

    def __init__(
        self, config: MicroDLRMConfig, train: Samples, valid: Samples, seed: int, device: torch.device
    ) -> None:
        settings = config.train
        self.model = DLRM(config.model, seed=seed).to(device)
        self.optimizer = AdamW(self.model.table_parameters(), self.model.dense_parameters(), settings)
        self.valid = valid
        order = ShuffledOrder(samples=train, batch_size=settings.batch_size, seed=seed)
        planned = settings.epochs * len(order)
        self.recipe = Recipe(
            model=self.model,
            optimizer=self.optimizer,
            order=order,
            learning_rate=lambda step: one_cycle(step, planned, peak=settings.learning_rate, rise=settings.rise),
            epochs=settings.epochs,
            max_steps=settings.max_steps,
        )

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Of the validation rows, in their order."""
        self.model.eval()
        return torch.cat([self.model(b.dense_BD, b.features) for b in cut(self.valid, SCORING_BATCH)])

    def score(self) -> dict[str, float]:
        return binary_metrics(self.logits(), self.valid.labels_N)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _samples(arrays: ClickArrays) -> Samples:
    return Samples(
        keys=("user", "item", "occupation"),
        dense_ND=torch.from_numpy(arrays.dense),
        ids_FN=torch.from_numpy(arrays.ids).t().contiguous().t(),
        labels_N=torch.from_numpy(arrays.labels),
    )


def _check_sizes(config: MicroDLRMConfig, rows: tuple[int, ...], dense: int) -> None:
    """Ids of the data must fit the tables: a stacked lookup would not notice one that does not."""
    wanted = ("user", "item", "occupation")
    if config.model.features != wanted:
        raise ConfigError(f"model.features is {config.model.features}; MovieLens has {wanted}")
    for name, have, need in zip(wanted, config.model.rows, rows):
        if have < need:
            raise ConfigError(
                f"table {name!r} has {have} rows, the data needs {need}",
                where={"field": "model.rows"},
                fix=f"--model.rows {' '.join(map(str, rows))}",
            )
    if config.model.dense != dense:
        raise ConfigError(
            f"model.bottom starts with {config.model.dense} dense features, the data has {dense}",
            where={"field": "model.bottom"},
        )
