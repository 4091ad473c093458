"""One epoch of micro-dlrm at batch 256 against the usual loop, in one run, at equal quality.

The usual loop: a Dataset that returns one sample, torch's DataLoader with default collate and shuffling, one
EmbeddingBag a feature, AdamW as torch gives it on a CPU (unfused), torch's default threads and libraries. Both train
the same model from the same weights with the same recipe; epochs alternate, so that other work hits both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from _rows import record, row, show
from recperf.data.order import Samples
from recperf.models.published import public_parameters
from recperf.train.config import one_cycle
from recperf.train.device import applied
from recperf.train.loop import Position, train
from recperf.train.metrics import binary_metrics
from recperf.workloads.micro_dlrm.build import ClickTrial, PreparedClicks
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig, default


class OneSample(Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __init__(self, samples: Samples) -> None:
        self.dense, self.ids, self.labels = samples.dense_ND, samples.ids_FN.t().contiguous(), samples.labels_N

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.dense[index], self.ids[index], self.labels[index]


class UsualDLRM(nn.Module):
    """The same model as most courses write it."""

    def __init__(self, trial: ClickTrial) -> None:
        super().__init__()
        config, weights = trial.model.config, public_parameters(trial.model)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, config.dim, mode="sum") for rows in config.rows)
        self.bottom = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
        names = {"tables": "emb_l", "bottom": "bot_l", "top": "top_l"}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                first, _, rest = name.partition(".")
                parameter.copy_(weights[f"{names[first]}.{rest}"])

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        offsets = torch.arange(len(dense))
        pooled = [table(ids[:, i], offsets) for i, table in enumerate(self.tables)]
        logits: Tensor = self.top(torch.cat([self.bottom(dense), *pooled], dim=1))
        return logits.squeeze(1)


class UsualLoop:
    def __init__(self, config: MicroDLRMConfig, trial: ClickTrial, train_samples: Samples) -> None:
        self.config, self.model = config.train, UsualDLRM(trial)
        dense = [*self.model.bottom.parameters(), *self.model.top.parameters()]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": dense, "weight_decay": self.config.weight_decay},
                {"params": list(self.model.tables.parameters()), "weight_decay": self.config.table_weight_decay},
            ]
        )
        self.loader = DataLoader(
            OneSample(train_samples),
            batch_size=self.config.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(config.seed),
        )
        self.step, self.total = 0, self.config.epochs * len(self.loader)

    def epoch(self) -> float:
        """Seconds of one epoch."""
        self.model.train()
        began = perf_counter()
        for dense, ids, labels in self.loader:
            rate = one_cycle(self.step, self.total, peak=self.config.learning_rate, rise=self.config.rise)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss = F.binary_cross_entropy_with_logits(self.model(dense, ids), labels)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.step += 1
        return perf_counter() - began

    @torch.no_grad()
    def score(self, valid: Samples) -> dict[str, float]:
        self.model.eval()
        return binary_metrics(self.model(valid.dense_ND, valid.ids_FN.t()), valid.labels_N)


class Silent:
    """Watches nothing: the bare loop, as the usual one is bare."""

    def before_epoch(self) -> None: ...

    def before_step(self, step: int) -> None: ...

    def after_step(self, position: Position, loss: Tensor, samples: int) -> None: ...

    def after_epoch(self, position: Position) -> None: ...


def compare(epochs: int, path: Path | None) -> float:
    config = default()
    source = replace(config.data, path=path) if path else replace(config.data, source="embedded")
    config = replace(config, data=source, train=replace(config.train, epochs=epochs, device="cpu"))
    prepared = PreparedClicks(config)
    trial = prepared.trial(config.seed)
    usual = UsualLoop(config, trial, prepared.train)
    rows, batches = len(prepared.train), len(trial.recipe.order)
    ours_rate, usual_rate, ratios = [], [], []
    for epoch in range(epochs):
        usual_seconds = usual.epoch()
        # max_steps ends our loop after this epoch; the schedule spans all of them.
        recipe = replace(trial.recipe, max_steps=(epoch + 1) * batches)
        with applied(prepared.settings):
            began = perf_counter()
            train(recipe, Position(epoch, 0, epoch * batches), Silent())
            ours_seconds = perf_counter() - began
        ours_rate.append(rows / ours_seconds)
        usual_rate.append(rows / usual_seconds)
        ratios.append(usual_seconds / ours_seconds)
    ours_score, usual_score = trial.metrics(trial.predictions()), usual.score(prepared.source.samples("valid"))
    conditions = {
        "batch": config.train.batch_size,
        "rows": rows,
        "epochs": epochs,
        "data": prepared.data["name"],
        "threads": {"recperf": prepared.settings.threads, "usual": torch.get_num_threads()},
        "auc": {"recperf": ours_score["auc"], "usual": usual_score["auc"]},
        "accuracy": {"recperf": ours_score["accuracy"], "usual": usual_score["accuracy"]},
    }
    entries = [
        row("micro_dlrm_epoch", "recperf", "throughput", "samples/s", ours_rate, conditions),
        row("micro_dlrm_epoch", "usual loop", "throughput", "samples/s", usual_rate, conditions),
        row("micro_dlrm_epoch", "recperf / usual", "ratio", "x", ratios, conditions),
    ]
    for entry in entries:
        print(show(entry))
    print(f"AUC {ours_score['auc']:.4f} (usual loop {usual_score['auc']:.4f}) on {prepared.data['name']}")
    print(f"rows appended to {record(entries).name}")
    return statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--path", type=Path, default=None, help="folder of MovieLens-100K; default: embedded data")
    options = parser.parse_args()
    return 0 if compare(options.epochs, options.path) >= 4 else 5


if __name__ == "__main__":
    sys.exit(main())
