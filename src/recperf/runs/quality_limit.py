"""What limits the quality of a run, from its log, its scores and what its trainings showed. Torch-free."""

from __future__ import annotations

from collections import Counter

from ..learn.records import UNCLEAR, QualityEvidence, QualityLimit
from ..learn.rules import Trained, limit_of
from ..tasks import ORACLES, Task, signed
from .evidence import Evidence
from .result import Difference, Interval, Quality
from .schemas import LEARNING, SavedLearning, Scores, Step

PARTS = 8
"""Parts of a training whose mean losses are compared."""


def of_run(
    evidence: Evidence, task: Task, quality: Quality, best: Difference | None, interval: Interval | None
) -> QualityLimit | None:
    """The limit that most seeds show; None where nothing was looked at. `best` is the difference to the best
    baseline."""
    if not evidence.has(LEARNING):
        return None
    saved = evidence.file(LEARNING, SavedLearning).seeds
    limits = [
        limit_of(_trained(evidence, task, quality, best, interval, seed, saved[str(seed)]))
        for seed in evidence.seeds()
        if str(seed) in saved
    ]
    if not limits:
        return None
    name, count = Counter(one.limit for one in limits).most_common(1)[0]
    limit = next(one for one in limits if one.limit == name)
    if count < len(limits):
        limit.doubts.append(f"{count} of {len(limits)} seeds show it")
        if 2 * count <= len(limits):
            limit.limit = UNCLEAR
    return limit


def _trained(
    evidence: Evidence,
    task: Task,
    quality: Quality,
    best: Difference | None,
    interval: Interval | None,
    seed: int,
    seen: QualityEvidence,
) -> Trained:
    evaluations = [one for one in evidence.events(Scores, seed=seed) if one.kind == "metric"]
    choosing = [one for one in evaluations if task.choosing in one.metrics]
    losses = [one.loss for one in evidence.events(Step, seed=seed) if one.loss is not None]
    edges = [len(losses) * part // PARTS for part in range(PARTS + 1)]
    parts = [losses[first:last] for first, last in zip(edges, edges[1:])]
    rules = {
        name: metrics[task.leading]
        for name, metrics in quality.baselines.items()
        if task.leading in metrics and name not in ORACLES
    }
    return Trained(
        task=task,
        evidence=seen,
        curve=[signed(task.choosing, one.metrics[task.choosing]) for one in choosing],
        epochs=max((one.epoch or 0 for one in evaluations), default=0),
        losses=[sum(part) / len(part) for part in parts if part],
        value=quality.metrics[task.leading],
        half=(interval.high - interval.low) / 2 if interval else 0.0,
        units=best.units if best else 0,
        rules=rules,
        behind=_behind(task, quality),
        below=best is not None and best.standing == "below",
        drawn=quality.ranking.negatives if quality.ranking else 0,
    )


def _behind(task: Task, quality: Quality) -> float:
    """How far the model is below the best baseline in what the choosing metric measures."""
    name = task.leading if task.ranks_items else "log_loss"
    own = quality.metrics.get(name)
    others = [row[name] for rule, row in quality.baselines.items() if name in row and rule not in ORACLES]
    if own is None or not others:
        return 0.0
    return max(signed(name, other) for other in others) - signed(name, own)
