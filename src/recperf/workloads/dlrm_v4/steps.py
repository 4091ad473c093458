"""A step of dlrm-v4: its learning rate, its loss with the metrics of what it predicts, and its update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed.ranks import current
from ...measure.spans import span
from ...models.dlrm_v4.model import DLRMv4, StagedLoss
from ...train.metrics import Tally
from ...train.optim import norm_of
from .batches import Numbered
from .config import HistoryTrainConfig


def learning_rate(train: HistoryTrainConfig, step: int, rise: int, steps: int) -> float:
    """Adam's rate at a step. The first step runs at 0, as the benchmark's does."""
    rate = train.learning_rate * min(1.0, step / rise)
    if train.final_rate == 1 or step <= rise:
        return rate
    return rate * (1 - (1 - train.final_rate) * (step - rise) / max(1, steps - rise))


class SteppedModel:
    """The model as the training loop knows models. What it predicts of batches it learns from is counted."""

    def __init__(self, model: DLRMv4, seed: int, device: torch.device) -> None:
        self.model, self.seed = model, seed
        self.lifetime, self.recent = Tally(device=device), Tally(device=device)
        """Counts of predictions: of all steps, and of the steps since `seen` was last called."""

    def train(self, mode: bool = True) -> SteppedModel:
        self.model.train(mode)
        return self

    def loss(self, batch: Numbered) -> StagedLoss:
        self.model.set_step(self.seed, batch.step)
        loss = self.model.loss(batch.inputs)
        if batch.counted:
            with span("metrics"):
                self.recent.add(loss.logits_B, batch.inputs.labels_B)
        return loss

    def forget_gradients(self) -> None:
        self.model.forget_gradients()

    def seen(self) -> dict[str, float] | None:
        """Of all ranks; the lifetime tally is theirs together too."""
        recent = current().merge_tally(self.recent)
        metrics = recent.metrics()
        if metrics is None:
            return None
        self.lifetime.merge(recent)
        self.recent.clear()
        return {**metrics, "lifetime_auc": self.lifetime.auc()}


class AdamAndRows:
    """Adam of the dense parameters, their gradient clipped, and row-wise Adagrad of the rows a step used."""

    def __init__(self, model: DLRMv4, config: HistoryTrainConfig) -> None:
        self.model, self.config = model, config
        kind, decay = (torch.optim.AdamW, config.weight_decay) if config.weight_decay else (torch.optim.Adam, 0.0)
        self.adam = kind(
            model.dense_parameters(), lr=0.0, betas=(0.95, 0.999), eps=1e-8, weight_decay=decay, fused=True
        )

    def step(self, learning_rate: float | Tensor) -> None:
        """A rate on a GPU is read there, as a CUDA graph needs it."""
        rate = learning_rate.reshape(()) if torch.is_tensor(learning_rate) and learning_rate.is_cuda else None
        with span("dense_update"):
            if self.config.clip:
                nn.utils.clip_grad_norm_(self.model.dense_parameters(), self.config.clip)
            with self._rate(float(learning_rate) if rate is None else rate):
                self.adam.step()
            self.adam.zero_grad()
        with span("sparse_update"):
            ratio = self.config.table_learning_rate / self.config.learning_rate
            self.model.tables.update(float(learning_rate) * ratio if rate is None else rate * ratio)

    def gradient_norm(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.model.dense_parameters()]
        return norm_of([gradient for gradient in gradients if gradient is not None])

    @contextmanager
    def _rate(self, rate: float | Tensor) -> Iterator[None]:
        """Adam's learning rate; one on a GPU is not left in its groups, which a checkpoint saves."""
        groups, captured = self.adam.param_groups, torch.is_tensor(rate)
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"], group["capturable"] = rate, captured
        try:
            yield
        finally:
            for group, number in zip(groups, before if captured else ()):
                group["lr"], group["capturable"] = number, False

    def begin(self) -> None:
        """Create Adam's state, which it would otherwise do in its first step: a graph must find it in its place."""
        for parameter in self.model.dense_parameters():
            if not self.adam.state[parameter]:
                self.adam.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    def state_dict(self) -> dict[str, Any]:
        return self.adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies into the state that is there: a graph holds its addresses."""
        before = {parameter: dict(moments) for parameter, moments in self.adam.state.items()}
        self.adam.load_state_dict(state)
        for parameter, moments in before.items():
            loaded = self.adam.state[parameter]
            for name, tensor in moments.items():
                # A state that was saved before the first step has no moments yet.
                tensor.copy_(loaded[name]) if name in loaded else tensor.zero_()
                loaded[name] = tensor
