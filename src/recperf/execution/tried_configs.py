"""The configs that a diagnosis trains, and their scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import flatten, from_json, to_json
from ..learn.experiments import Change
from ..learn.gains import Scored
from ..runs.evidence import Evidence
from ..runs.schemas import SavedScores
from ..tasks import NDCG, Task, signed
from .workload import RankingConfig

SCREENED = 4
"""Screening has this part of the steps."""


def key_of(config: Any) -> str:
    """A name of a config, whatever its seeds."""
    values = to_json(replace(config, seed=0, seeds=1, baseline_seconds=0.0, ranking=RankingConfig()))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def with_change(config: Any, change: Change) -> Any:
    """The config with the fields of a change."""
    return with_fields(config, change.fields)


def with_fields(config: Any, fields: Mapping[str, Any]) -> Any:
    """The config with new values of fields, by their dotted names."""
    values = to_json(config)
    for name, value in fields.items():
        *sections, last = name.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        inner[last] = value
    return from_json(type(config), values)


def shortened(config: Any) -> Any:
    """The config with a quarter of the steps; its schedule is that of so many."""
    epochs, steps = config.train.epochs, config.train.max_steps
    if steps:
        return replace(config, train=replace(config.train, max_steps=max(1, steps // SCREENED)))
    return replace(config, train=replace(config.train, epochs=max(1, epochs // SCREENED)))


def without(scored: Scored, seeds: set[int]) -> Scored:
    """The scores of the other seeds; of all where there are no others."""
    others = scored.values.keys() - seeds or scored.values.keys()
    return Scored(*({seed: part[seed] for seed in others if seed in part} for part in _parts(scored)))


def _parts(scored: Scored) -> tuple[Any, ...]:
    return scored.values, scored.replicates, scored.chosen


def command_of(before: Any, after: Any) -> list[str]:
    """The options of a command that make one config of another."""
    old, new = flatten(to_json(before)), flatten(to_json(after))
    fields = {name: value for name, value in new.items() if old.get(name) != value}
    return [Change("", "", {name: value}).command for name, value in fields.items()]


def scored_of(evidence: Evidence, task: Task) -> Scored:
    """The scores of a run by seed, higher is better."""
    scores, trials = evidence.file("scores.json", SavedScores), evidence.trials()
    replicates: dict[int, list[float]] = {}
    for seed, row in scores.seeds.items():
        if row.ranking and task.leading == NDCG:
            replicates[int(seed)] = row.ranking.ndcg_replicates
        elif task.leading in row.replicates:
            replicates[int(seed)] = [signed(task.leading, value) for value in row.replicates[task.leading]]
    return Scored(
        values={trial.seed: signed(task.leading, trial.metrics[task.leading]) for trial in trials},
        replicates=replicates,
        chosen={trial.seed: signed(task.choosing, trial.metrics[task.choosing]) for trial in trials},
    )
