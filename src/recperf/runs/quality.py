"""What the bootstrap replicates of a run say: intervals, differences to baselines with their certainty, warnings.

Computed from scores.json without torch, so that `recperf check` can compute it again.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from ..train.config import ORACLES
from .result import (
    CalibrationBin,
    Difference,
    Interval,
    Metrics,
    ModelInterval,
    ProbabilityDifference,
    Quality,
    Ranking,
    RankingDifference,
    Segment,
    WithinUsers,
)
from .schemas import SampledRanking, SampledScores, SampledUsers, SavedScores, SegmentFacts

FEW_ROWS = 1000
LEAKED_AUC = 0.99

D = TypeVar("D", Difference, RankingDifference)


def percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = share / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def interval(replicates: Sequence[float]) -> Interval:
    """The middle 95 % of the replicates."""
    return Interval(low=percentile(replicates, 2.5), high=percentile(replicates, 97.5))


def combined(seeds: Sequence[Sequence[float]]) -> list[float]:
    """Replicates of the mean over the seeds: in each replicate the seeds are drawn with replacement, as users are."""
    if len(seeds) == 1:
        return list(seeds[0])
    draw = random.Random(len(seeds))
    return [statistics.fmean(draw.choice(seeds)[place] for _ in seeds) for place in range(len(seeds[0]))]


def add_detail(quality: Quality, scores: SavedScores) -> None:
    """Fill in what follows from scores.json."""
    seeds, baselines = list(scores.seeds.values()), scores.baselines
    if seeds and seeds[0].auc is not None:
        bounds = interval(combined([seed.auc_replicates for seed in seeds]))
        quality.interval = ModelInterval(
            low=bounds.low, high=bounds.high, by=scores.by, units=scores.units, replicates=len(seeds[0].auc_replicates)
        )
    paired = [seed for seed in seeds if seed.rows_digest == scores.rows_digest]
    if paired:
        quality.segments = tuple(_segment(name, facts, paired, scores) for name, facts in scores.segments.items())
        quality.calibration = tuple(_calibration(bins) for bins in zip(*(seed.calibration for seed in paired)))
    if paired and baselines:
        quality.baseline_intervals = {name: interval(rule.auc_replicates) for name, rule in baselines.items()}
        replicates = [seed.auc_replicates for seed in paired]
        quality.differences = tuple(
            Difference(
                baseline=name,
                auc=statistics.fmean(seed.auc or 0.0 for seed in paired) - (rule.auc or 0.0),
                **_replicated(replicates, rule.auc_replicates),
            )
            for name, rule in sorted(baselines.items(), key=lambda item: -(item[1].auc or 0.0))
        )
        for row in quality.differences:
            row.standing = standing(row)
        quality.probabilities = tuple(_probabilities(quality, paired, baselines))
    if own := [seed.within_users for seed in paired if seed.within_users]:
        users = {name: rule.within_users for name, rule in baselines.items() if rule.within_users}
        quality.within_users = WithinUsers(users=own[0].users, **_beside(own, users, "user_ndcg_10"))
    facts, ranked = scores.ranking, [seed.ranking for seed in paired if seed.ranking]
    if facts and ranked:
        quality.ranking = Ranking(
            users=facts.users,
            catalogue=facts.catalogue,
            negatives=facts.negatives,
            repeats=facts.repeats,
            meeting=facts.meeting,
            split=facts.split,
            lists=_means([seed.lists for seed in ranked]) or None,
            **_beside(ranked, facts.baselines, "ndcg_10"),
        )
    else:
        quality.not_ranked = scores.not_ranked
    quality.warnings = tuple(warnings(scores, quality.metrics.get("auc", 0.0)))


def _probabilities(
    quality: Quality, seeds: list[SampledScores], baselines: dict[str, SampledScores]
) -> Iterator[ProbabilityDifference]:
    """Log loss and calibration error, of which less is better, beside those of the baseline with the lowest log
    loss."""
    losses = {rule: values["log_loss"] for rule, values in quality.baselines.items() if "log_loss" in values}
    rules = [rule for rule in baselines if rule in losses and rule not in ORACLES]
    best = min(rules, key=lambda rule: losses[rule], default=None)
    if best is None:
        return
    for name, theirs in baselines[best].probability_replicates.items():
        facts = _replicated([seed.probability_replicates[name] for seed in seeds], theirs)
        low, high = facts["low"], facts["high"]
        yield ProbabilityDifference(
            metric=name,
            baseline=best,
            difference=quality.metrics[name] - quality.baselines[best][name],
            low=low,
            high=high,
            standing="better" if high < 0 else "worse" if low > 0 else "level",
        )


def _segment(name: str, facts: SegmentFacts, seeds: list[SampledScores], scores: SavedScores) -> Segment:
    ranked = [seed.ranking.segments[name] for seed in seeds if seed.ranking and name in seed.ranking.segments]
    own = [seed.segments[name] for seed in seeds if name in seed.segments]
    return Segment(
        name=name,
        rows=facts.rows,
        at_most=facts.at_most,
        counted=facts.counted,
        auc=statistics.fmean(own) if own else None,
        baselines={rule: row.segments[name] for rule, row in scores.baselines.items() if name in row.segments},
        ranking=_means(ranked) if ranked else None,
    )


def _calibration(bins: Sequence[CalibrationBin]) -> CalibrationBin:
    return CalibrationBin(
        predicted=statistics.fmean(one.predicted for one in bins),
        observed=statistics.fmean(one.observed for one in bins),
        rows=bins[0].rows,
    )


def _means(rows: Sequence[Metrics]) -> Metrics:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def _beside(seeds: Sequence[SampledRanking | SampledUsers], rules: dict[str, Any], metric: str) -> dict[str, Any]:
    """Metrics of the seeds and of the baselines, with the interval and the differences of an NDCG."""
    replicates, own = [seed.ndcg_replicates for seed in seeds], _means([seed.metrics for seed in seeds])
    return {
        "metrics": own,
        "baselines": {name: rule.metrics for name, rule in rules.items()},
        "interval": interval(combined(replicates)),
        "differences": tuple(
            RankingDifference(
                baseline=name,
                ndcg=own[metric] - rule.metrics[metric],
                **_replicated(replicates, rule.ndcg_replicates),
            )
            for name, rule in sorted(rules.items(), key=lambda item: -float(item[1].metrics[metric]))
        ),
    }


def _replicated(seeds: Sequence[Sequence[float]], theirs: Sequence[float]) -> dict[str, Any]:
    """Model less baseline: the interval over users and seeds, and how often the difference is negative."""
    replicates = combined([[one - other for one, other in zip(own, theirs)] for own in seeds])
    bounds, negative = interval(replicates), sum(value < 0 for value in replicates)
    return {"low": bounds.low, "high": bounds.high, "below_zero": negative / len(replicates), "seeds": len(seeds)}


def best_of(differences: Sequence[D]) -> D | None:
    """Of differences with the best baseline first, that to the first one that is no oracle."""
    return next((row for row in differences if row.baseline not in ORACLES), None)


def compared(quality: Quality) -> Sequence[Difference | RankingDifference]:
    """The differences to every baseline that decide whether it is beaten: in AUC, or of a workload that ranks items
    without labels in NDCG@10."""
    ranking = quality.ranking
    return ranking.differences if ranking and ranking.split else quality.differences


def standing(row: Difference | RankingDifference) -> str:
    """Whether the model is above, level with or below a baseline: level where the 95 % interval includes 0."""
    return "above" if row.low > 0 else "below" if row.high < 0 else "level"


def few_rows(rows: int) -> str | None:
    if rows >= FEW_ROWS:
        return None
    return f"only {rows:,} rows are scored; below {FEW_ROWS:,} metrics say little: hold out more"


def warnings(scores: SavedScores, auc: float) -> list[str]:
    """Reasons to doubt the metrics."""
    texts = [few_rows(scores.rows)]
    if auc > LEAKED_AUC:
        text, strongest = f"AUC {auc:.4f}: a feature may contain the label", scores.strongest_feature
        texts.append(f"{text}; {strongest.name} alone reaches {strongest.auc:.4f}" if strongest else text)
    return [text for text in texts if text]
