"""Fewer training rows or columns than a dataset has, which experiments train on.

Shapes: N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ..config import SplitConfig
from ..split.rows import RowSplit

if TYPE_CHECKING:
    from ..split.events import EventSplit

SEED = 7
NEVER = 1e300
"""A deviation by which every number becomes 0."""
Marks = NDArray[np.bool_]


def training_part(fit_N: Marks, config: SplitConfig, split: RowSplit | EventSplit) -> Marks:
    """Those of the training rows that a config trains on."""
    if config.train_share == config.recent == 1.0:
        return fit_N
    if config.recent < 1.0:
        if not isinstance(split, RowSplit) or split.times_N is None:
            what = f"{split.name} has no times" if isinstance(split, RowSplit) else "rows of events are not cut by time"
            raise ConfigError(what, where={"field": "data.recent"}, fix="--data.recent 1")
        at_N = np.flatnonzero(fit_N)
        order_N = at_N[np.argsort(split.times_N[at_N], kind="stable")]
        fit_N = np.zeros_like(fit_N)
        fit_N[order_N[-max(1, round(config.recent * len(order_N))) :]] = True
    draw = np.random.default_rng(SEED)
    if isinstance(split, RowSplit) and split.options.split == "cold" and split.users_N is not None:
        drawn_N = (draw.random(int(split.users_N.max()) + 1) < config.train_share)[split.users_N]
    else:
        drawn_N = draw.random(len(fit_N)) < config.train_share
    return np.asarray(fit_N & drawn_N)


def hide(clicks: Any, name: str) -> None:
    """Make a column of imported clicks the same in every row."""
    numbers = [one.name for one in clicks.columns.numeric]
    if name in numbers and numbers.index(name) not in clicks.indicators:
        clicks.scales[numbers.index(name)] = type(clicks.scales[0])(0.0, NEVER)
    elif name in clicks.keys and clicks.columns.sparse[clicks.keys.index(name)][1].values is not None:
        clicks.tables[clicks.keys.index(name)][:] = 0
    else:
        what = f"{name!r} is no listed category of {clicks.manifest.name}, and no number that all rows have"
        raise ConfigError(what, where={"field": "data.without"}, fix="other columns, or a dataset without this one")
