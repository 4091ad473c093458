"""Training configs refuse conflicting fields."""

from __future__ import annotations

from typing import Any

import pytest

from recperf.errors import ConfigError
from recperf.train.config import DLRMTrainConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_weights": (0.5, 1.0)}, "train.loss_weights .* with train.loss wbce"),
        ({"loss": "wbce", "loss_weights": (0.0, 0.0)}, "at least one above 0"),
        ({"loss": "wbce", "loss_weights": (float("nan"), 1.0)}, "numbers 0 to 1e6"),
        ({"loss": "wbce", "loss_weights": (1.0, 1.0, 1.0)}, "two numbers"),
        ({"warmup_steps": 5}, "train.warmup_steps .* with train.schedule warmup-decay"),
        ({"schedule": "one-cycle", "decay_steps": 5}, "train.decay_steps .* with train.schedule warmup-decay"),
        (
            {"schedule": "warmup-decay", "warmup_steps": 9, "decay_steps": 5, "decay_start": 8},
            "warm-up and decay cannot overlap",
        ),
        ({"schedule": "warmup-decay", "decay_start": 8}, "train.decay_steps is 0; allowed: at least 1"),
        ({"weight_decay": 0.1}, "train.weight_decay .* with train.optimizer adamw"),
        ({"micro_batches": 5, "batch_size": 4}, r"at most train.batch_size \(4\)"),
        ({"eps": 0.0}, "train.eps"),
        ({"evaluate_steps": -1}, "train.evaluate_steps"),
    ],
)
def test_conflicting_fields_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DLRMTrainConfig(**changes)
