"""Experiments of a diagnosis that are no change to keep: the best config trained on a part of the rows, and its
log-odds added to those of another model.

Shapes: N scored rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import flatten, to_json
from ..errors import ConfigError
from ..files import writing
from ..learn.curve import SHARES, CurvePoint, LearningCurve, doubled
from ..learn.diagnosis import Sum
from ..learn.gains import Scored, gain
from ..tasks import Task, signed
from .quality import AssessedRows, keys_of_rows
from .tried_configs import with_fields
from .workload import Workload, load

BOOSTING, SEED = "gradient_boosting", "its second seed"


def part_of(config: Any, share: float) -> Any | None:
    """The config on a share of its training rows; None where they cannot be divided so."""
    if flatten(to_json(config)).get("data.train_share") != 1.0:
        return None
    try:
        return with_fields(config, {"data.train_share": share})
    except ConfigError:
        return None


def curve_of(
    whole: Scored, config: Any, train: Callable[[Any, int, str], Scored | None], seeds: Callable[[], tuple[float, int]],
    left: Callable[[], float], cost: float,
) -> LearningCurve | None:  # fmt: skip
    """The scores of parts of the rows, with as many seeds as there is time for; None where not one was possible."""
    parts: dict[float, Scored] = {}
    for seed in sorted(whole.values):
        if left() < sum(SHARES) * cost:
            break
        for share in SHARES:
            divided = part_of(config, share)
            scored = None if divided is None else train(divided, seed, f"{share:g} of the rows, seed {seed}")
            if scored is None:
                return None
            parts[share] = scored
    if not parts:
        return None
    scores = [*(parts[share] for share in SHARES), whole]
    common = set.intersection(*(set(one.values) for one in scores))
    points = [
        CurvePoint(share, statistics.fmean(one.values[seed] for seed in common), len(common))
        for share, one in zip((*SHARES, 1.0), scores)
    ]
    return LearningCurve(points, gain(whole, parts[SHARES[-1]], seeds()), doubled(scores, seeds()))


def save_logits(path: Path, logits_N: Tensor | None) -> None:
    if logits_N is not None and len(logits_N):
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, logits_N.float().numpy())


def sums_of(
    workload: Workload, config: Any, saved: Mapping[int, Path], seeds: tuple[float, int], task: Task
) -> list[Sum]:
    """The log-odds of the first of these seeds, added to those of the second, and to those of gradient boosting on the
    same rows; both parts have one weight, so that nothing is fitted."""
    own = {seed: torch.from_numpy(np.load(path)) for seed, path in sorted(saved.items()) if path.exists()}
    if not own or task.ranks_items:
        return []
    prepared = load(workload.build)(replace(config, baseline_seconds=0.0))
    rows = prepared.scored_rows()
    assessed = AssessedRows(rows, keys_of_rows(prepared, rows), None, "", load(task.assessment).scoring)
    first, *others = own.values()
    parts = {SEED: others[0]} if others else {}
    boosted = prepared.baseline_logits()
    if BOOSTING in boosted:
        parts["gradient boosting"] = boosted[BOOSTING].float()

    def scored(logits_N: Tensor) -> Scored:
        one = assessed.sampled(logits_N, rows.labels_N)
        replicates = [signed(task.leading, value) for value in one.replicates[task.leading]]
        return Scored({0: signed(task.leading, one.leading or 0.0)}, {0: replicates}, {})

    sums = []
    for name, part_N in parts.items():
        added = scored((first + part_N) / 2)
        gains = [gain(added, scored(one_N), seeds) for one_N in (first, part_N)]
        sums.append(Sum(name=name, gain=min(gains, key=lambda one: one.value), simple=name != SEED))
    return sums
