"""Settings of a next-item model that follow from its data and the device. Torch-free."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...data.next_item import NextItemData

STEPS, LEAST_STEPS, PATIENCE = 45, 6000, 2000
"""Steps of an epoch, steps of a whole training, and steps without a better evaluation, at least."""
FULL = 200_000
"""Events from which on the patience counts in full; of fewer events in proportion, but 10 evaluations at least."""
LONG = 95
"""Percentile of the events of a user that the model reads at most."""
AVERAGE = 200
"""Steps over which the weights are averaged; of small data, whose best weights do not last as long, they are not."""
SMALL = 40_000
"""Events below which data is small."""
DENSE = 50
"""Events of a user, on average, from which on data is dense; all other data is sparse."""
Sizes = dict[str, int]
SIZES: dict[tuple[str, bool, str], Sizes] = {
    ("transformer", True, "small"): {"dim": 128, "blocks": 1, "heads": 1},
    ("transformer", True, "sparse"): {"dim": 256, "blocks": 2, "heads": 1},
    ("transformer", True, "dense"): {"dim": 192, "blocks": 4, "heads": 4},
    ("transformer", False, "small"): {"dim": 64, "blocks": 1, "heads": 1},
    ("transformer", False, "sparse"): {"dim": 64, "blocks": 1, "heads": 1},
    ("transformer", False, "dense"): {"dim": 64, "blocks": 2, "heads": 2},
    ("hstu", True, "small"): {"dim": 32, "blocks": 2, "heads": 2},
    ("hstu", True, "sparse"): {"dim": 64, "blocks": 4, "heads": 2},
    ("hstu", True, "dense"): {"dim": 96, "blocks": 8, "heads": 2},
}
"""By encoder, whether there is a GPU, and kind of data; hstu has the same sizes on a CPU."""


def kind_of(data: NextItemData) -> str:
    """small, dense or sparse."""
    if len(data.items_E) < SMALL:
        return "small"
    return "dense" if mean_events(data) >= DENSE else "sparse"


def mean_events(data: NextItemData) -> float:
    """Events of a user on average."""
    return len(data.items_E) / max(1, data.users)


def read_length(data: NextItemData, most: int) -> int:
    """How many of a user's events a model reads, at most `most`."""
    import numpy as np

    return min(most, max(10, int(np.percentile(np.diff(data.offsets_U1), LONG))))


def batch_for(users: int, largest: int) -> int:
    """A power of two so small that an epoch has STEPS steps or more; at least 16."""
    return 1 << min(largest.bit_length() - 1, max(4, (users // STEPS).bit_length() - 1))


def training_for(data: NextItemData) -> dict[str, Any]:
    """What order decides may be learned late, so that small data has more epochs. The patience grows with the number of
    events, up to FULL."""
    users, events = int((data.offsets_U1[1:] - data.offsets_U1[:-1] > 1).sum()), len(data.items_E)
    batch = batch_for(users, 128)
    steps = max(1, users // batch)
    patience = max(10, PATIENCE * min(events, FULL) // FULL // steps)
    return {"batch_size": batch, "epochs": max(100, LEAST_STEPS // steps), "patience": patience}


def settings_for(data: NextItemData) -> dict[str, dict[str, Any]]:
    """Fields of the model, whose sizes follow the encoder and the device, and of its training."""
    kind = kind_of(data)
    model = {
        "encoder": "auto", "dim": 0, "blocks": 0, "heads": 0, "head_dim": 0, "counts": "on",
        "max_length": read_length(data, 200 if kind == "dense" else 50),
        "dropout": 0.5 if kind == "sparse" else 0.3,
        "temperature": 0.07,
    }  # fmt: skip
    train = {"weight_decay": 0.01, "table_weight_decay": 0.01}
    if kind == "small":
        return {"model": model, "train": {**training_for(data), **train}}
    batch = batch_for(data.users, 256 if kind == "sparse" else 128)
    looks = {"epochs": 100, "evaluate_epochs": 2, "patience": 4}
    return {"model": model, "train": {**train, **looks, "batch_size": batch, "average_steps": AVERAGE}}


def sizes_for(data: NextItemData, encoder: str, gpu: bool) -> Sizes:
    """Width, blocks and heads of a model."""
    sizes = SIZES[encoder, gpu or encoder == "hstu", kind_of(data)]
    return {**sizes, "head_dim": sizes["dim"] // sizes["heads"]}


def has_gpu(device: str) -> bool:
    """Whether a device of the config is a GPU, without torch, whose import takes seconds."""
    if device != "auto":
        return device == "cuda"
    try:
        return Path("/dev/nvidia0").exists() and not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
