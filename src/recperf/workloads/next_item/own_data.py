"""Sizes and settings of a next-item model that follow from its data. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...data.next_item import NextItemData

STEPS, LEAST_STEPS, PATIENCE = 45, 6000, 2000
"""Steps of an epoch, steps of a whole training, and steps without a better evaluation, at least."""
FULL = 200_000
"""Events from which on the patience counts in full; of fewer events in proportion, but 10 evaluations at least."""
LONG = 95
"""Percentile of the events of a user that the model reads at most."""


def mean_events(data: NextItemData) -> float:
    """Events of a user on average."""
    return len(data.items_E) / max(1, data.users)


def read_length(data: NextItemData, most: int) -> int:
    """How many of a user's events a model reads, at most `most`."""
    import numpy as np

    return min(most, max(10, int(np.percentile(np.diff(data.offsets_U1), LONG))))


def training_for(data: NextItemData) -> dict[str, Any]:
    """Batches so small that an epoch has STEPS steps or more. What order decides may be learned late, so that small
    data has more epochs. The patience grows with the number of events, up to FULL."""
    users, events = int((data.offsets_U1[1:] - data.offsets_U1[:-1] > 1).sum()), len(data.items_E)
    batch = 1 << min(7, max(4, (users // STEPS).bit_length() - 1))
    steps = max(1, users // batch)
    patience = max(10, PATIENCE * min(events, FULL) // FULL // steps)
    return {"batch_size": batch, "epochs": max(100, LEAST_STEPS // steps), "patience": patience}


def settings_for(data: NextItemData) -> dict[str, dict[str, Any]]:
    """Fields of the model and of its training."""
    model = {
        "encoder": "transformer", "dim": 64, "blocks": 1, "heads": 1, "head_dim": 64, "dropout": 0.5,
        "temperature": 0.07, "counts": "on", "max_length": read_length(data, 50),
    }  # fmt: skip
    train = {**training_for(data), "batch_size": 256, "weight_decay": 0.01, "table_weight_decay": 0.01}
    return {"model": model, "train": train}
